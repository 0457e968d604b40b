"""A state that is written by several workers, each its part, is one checkpoint: whole, or not there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.object_store import bucket
from torch import nn

from elasticflow_airflow.runtime import load_weights
from elasticflow_airflow.runtime.checkpoints import checkpoint
from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.checkpoints.checkpointer import Checkpointer
from elasticflow_airflow.runtime.checkpoints.state_copy import content_of, shard
from elasticflow_airflow.runtime.checkpoints.writer import Order, write_checkpoint
from elasticflow_airflow.runtime.stores.manifest import (
    CandidateInfo,
    CheckpointError,
    list_candidates,
    promoted,
    verify_candidate,
)
from elasticflow_airflow.runtime.stores.open_store import open_store
from elasticflow_airflow.runtime.stores.store import LocalStore, Part

LIMIT_S = 120.0
TOKEN = "5eed"

WORKER = textwrap.dedent("""
    import os, signal, sys
    import torch
    from torch import nn
    from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
    from elasticflow_airflow.runtime.checkpoints.checkpointer import Checkpointer
    from elasticflow_airflow.runtime.stores.store import Part
    where, rank, size, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 50)).sum().backward()
    optimizer.step()
    registered = Registered(model, {"optimizer": optimizer})
    saver = Checkpointer(where, incarnation=1, promotes=True)
    for step in (1, 2, 3):
        if mode == "killed" and rank == 1 and step == 3:
            os.kill(saver.writer_pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        part = Part(rank=rank, size=size, token=f"step{step}")
        saver.save(registered, generation=1, step=step, metadata={"step": step}, wait=mode == "waiting", part=part)
        for saved in saver.flush(30.0 if step < 3 or mode != "killed" else 1.0):
            print("saved", saved.step, flush=True)
    saver.close()
""")


def run(where: Path | str, size: int, mode: str) -> list[subprocess.CompletedProcess[str]]:
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(where), str(rank), str(size), mode], stdout=subprocess.PIPE, text=True
        )
        for rank in range(size)
    ]
    done = []
    for worker in workers:
        with worker:
            try:
                output, _ = worker.communicate(timeout=LIMIT_S)
            finally:
                worker.kill()
        done.append(subprocess.CompletedProcess([], worker.returncode, output))
    return done


def fresh() -> Registered:
    model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(6)))
    return Registered(model, {"optimizer": torch.optim.AdamW(model.parameters())})


def is_what_they_have(info: CandidateInfo) -> None:
    """The checkpoint holds what each of the workers made by itself."""
    torch.manual_seed(0)
    expected = fresh()
    expected.model(torch.randn(3, 50)).sum().backward()
    expected.others["optimizer"].step()
    found = fresh()
    checkpoint.load(found, info)
    for one, two in zip(found.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert str(found.others["optimizer"].state_dict()) == str(expected.others["optimizer"].state_dict())


@pytest.mark.parametrize(
    ("size", "mode"),
    [
        pytest.param(2, "background", marks=pytest.mark.slow),
        pytest.param(4, "background", marks=pytest.mark.slow),
        pytest.param(2, "waiting", marks=pytest.mark.slow),
    ],
)
def test_several_processes_write_one_checkpoint(tmp_path, size, mode):
    assert [worker.returncode for worker in run(tmp_path, size, mode)] == [0] * size
    info = promoted(tmp_path, pytest.fail)
    assert (info.step, info.metadata) == (3, {"step": 3})
    assert len(list_candidates(tmp_path)) == 2
    assert not list(tmp_path.glob("*/.writing-*"))
    names = {f"{what}-{rank:05d}-of-{size:05d}.tensors" for what in ("model", "training") for rank in range(size)}
    assert {path.name for path in info.path.iterdir()} == names | {"manifest.json"}
    sizes = [
        sum((info.path / f"{w}-{r:05d}-of-{size:05d}.tensors").stat().st_size for w in ("model", "training"))
        for r in range(size)
    ]
    assert max(sizes) < 1.5 * min(sizes)

    is_what_they_have(info)
    load_weights(fresh().model, info.path)


@pytest.mark.slow
def test_without_one_part_the_one_before_counts(tmp_path):
    """The worker that would have written it is killed."""
    done = run(tmp_path, 2, "killed")
    assert [worker.returncode for worker in done] == [0, -signal.SIGKILL]
    assert done[0].stdout.split("\n")[:2] == ["saved 1", "saved 2"]
    assert promoted(tmp_path, pytest.fail).step == 2
    with_leftovers = list(tmp_path.glob("*/.writing-*"))
    assert len(with_leftovers) <= 1
    checkpoint.save(fresh(), tmp_path, incarnation=1, generation=1, step=4, metadata={})
    assert not list(tmp_path.glob("*/.writing-*"))


def test_a_part_that_does_not_come_is_named(tmp_path):
    order = Order(incarnation=1, generation=1, step=5, part=Part(rank=0, size=4, token=TOKEN), part_limit_s=0.0)
    with pytest.raises(CheckpointError, match=r"parts of rank 1, 2, 3 \(of 4 workers\) did not come within 0 s"):
        write_checkpoint(LocalStore(tmp_path), [], order)
    assert list_candidates(tmp_path) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_damage_to_any_part_is_found(tmp_path, rank):
    for step in (1, 2):
        for writer in (1, 0):  # rank 0 would wait for the other
            saver = Checkpointer(tmp_path, incarnation=1, promotes=True, in_background=False)
            part = Part(rank=writer, size=2, token=f"step{step}")
            saver.save(fresh(), generation=1, step=step, metadata={}, part=part)
            saver.close()
    newest = promoted(tmp_path, pytest.fail)
    file = newest.path / f"model-{rank:05d}-of-00002.tensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 8
    file.write_bytes(content)
    warnings: list[str] = []
    assert promoted(tmp_path, warnings.append).step == 1
    assert file.name in warnings[0]
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
        verify_candidate(newest.path)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "step"), [("background", 3), ("killed", 2)])
def test_several_processes_write_one_checkpoint_to_an_object_store(s3_server, monkeypatch, mode, step):
    """A server that speaks S3: whoever dies before its part is there costs that checkpoint only."""
    where = bucket(s3_server, monkeypatch, f"parts-{mode}")
    codes = [worker.returncode for worker in run(where, 2, mode)]
    assert codes == ([0, 0] if mode == "background" else [0, -signal.SIGKILL])
    store = open_store(where)
    assert store.candidates() == [f"g000001/step-{number:012d}" for number in (step - 1, step)]
    with store.promoted(pytest.fail) as info:
        files = json.loads((info.path / "manifest.json").read_bytes())["files"]
        assert len(files) == 4
        is_what_they_have(info)


def test_parts_in_an_object_store():
    where = "memory://parts"
    pytest.importorskip("fsspec", reason="needs fsspec")
    registered = fresh()
    for rank in (2, 1, 0):  # rank 0 would wait for the others
        saver = Checkpointer(where, incarnation=1, promotes=True)
        saver.save(registered, generation=1, step=1, metadata={}, part=Part(rank=rank, size=3, token=TOKEN))
        assert saver.store.candidates() == ([] if rank else ["g000001/step-000000000001"])
        saver.close()
    with saver.store.promoted(pytest.fail) as info:
        files = json.loads((info.path / "manifest.json").read_bytes())["files"]
        assert len(files) == 6
        found = fresh()
        checkpoint.load(found, info)
        assert torch.equal(found.model[3].weight, registered.model[3].weight)


@given(st.lists(st.integers(0, 200), max_size=20), st.integers(1, 5))
def test_every_tensor_is_in_one_part(lengths, size):
    contents = [content_of("model", {str(i): torch.zeros(length) for i, length in enumerate(lengths)})]
    parts = [shard(contents, rank, size)[0] for rank in range(size)]
    numbers = [number for part in parts for piece in part.pieces for number in piece.numbers]
    assert sorted(numbers) == list(range(len(lengths)))
    assert [part.state is not None for part in parts] == [True] + [False] * (size - 1)
    loads = [sum(piece.nbytes for piece in part.pieces) for part in parts]
    assert max(loads) - min(loads) <= 4 * max([0, *lengths])


@pytest.mark.parametrize(("rank", "size", "token"), [(2, 2, "a"), (-1, 2, "a"), (0, 1, ""), (0, 1, "../x")])
def test_parts_that_cannot_be(rank, size, token):
    with pytest.raises(ValueError, match="not a part"):
        Part(rank=rank, size=size, token=token)
