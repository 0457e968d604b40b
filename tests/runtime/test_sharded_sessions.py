"""Sessions whose checkpoints are written in parts: by real workers, who come back in other numbers, or are killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support import digests
from support.bare_torchrun import LIMIT_S, torchrun
from support.digests import digest_of
from support.gang import Gang
from torch import nn

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime.checkpoints import checkpoint
from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.checkpoints.checkpointer import Checkpointer
from elasticflow_airflow.runtime.checkpoints.saving import Saver
from elasticflow_airflow.runtime.protocol import ReportKind
from elasticflow_airflow.runtime.stores.manifest import list_candidates, promoted, verify_candidate
from elasticflow_airflow.runtime.stores.store import Part

STEPS = 400
TRAINS = f"""
import json, os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from elasticflow_airflow import runtime
sys.path.insert(0, {str(Path(digests.__file__).parent)!r})
from digests import digest_of

session = runtime.init(steps={STEPS}, checkpoint_dir="checkpoints", logical_workers=4,
    checkpoint_interval_s=float(os.environ.get("TEST_INTERVAL_S", 1e6)), shard_checkpoints_above_gb=1e-6)
generator = torch.Generator().manual_seed(3)
inputs = torch.randn(90, 8, generator=generator)
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Dropout(0.2), nn.Linear(32, 32), nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, {STEPS})
session.register(model=model, optimizer=optimizer, scheduler=schedule)
loader = session.dataloader(TensorDataset(inputs, inputs[:, :2]), global_batch_size=16)
resumed, leaves, stopped = session.steps_done, Path(f"leave-{{session.world_size}}"), False

def leave_where_parts_are_promoted():
    # All at one step: who reads this has done a step after it was written.
    promoted = Path("checkpoints/promoted.json")
    if session.rank == 0 and not leaves.exists() and promoted.exists():
        folder = Path("checkpoints", json.loads(promoted.read_text())["path"])
        if list(folder.glob(f"model-*-of-0000{{session.world_size}}.tensors")):
            Path("leave.new").write_text(str(session.steps_done + 2))
            Path("leave.new").rename(leaves)
    return leaves.exists() and session.steps_done >= int(leaves.read_text())

def stop_own_writer():
    global stopped
    checkpointer = session._core.saver._checkpointer
    if not stopped and checkpointer is not None and checkpointer.writer_pid:
        os.kill(checkpointer.writer_pid, signal.SIGSTOP)
        stopped = True
        Path("stopped-writer").write_text(str(checkpointer.writer_pid))

for _ in session.epochs():
    for batch in loader:
        with session.step() as step:
            for micro, targets in step.split(batch):
                step.backward(nn.functional.mse_loss(model(micro), targets))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if "TEST_STOPS_WRITER" in os.environ:
            stop_own_writer()
        if "TEST_LEAVES" in os.environ:
            if leave_where_parts_are_promoted():
                raise SystemExit
            time.sleep(0.08)
        elif session._core.context.managed and not Path(session.config.incarnation_dir, "hurry").exists():
            time.sleep(0.08)
if not session.is_warming_up:
    os.write(1, f"RESULT {{session.rank}} {{digest_of(model)}} {{resumed}}\\n".encode())
session.finish()
"""


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> str:
    return re.search(r"^RESULT 0 (\w+) 0$", alone(tmp_path_factory.mktemp("undisturbed")), re.MULTILINE)[1]


def alone(folder: Path) -> str:
    """Output of one worker that trains to the end."""
    (folder / "train.py").write_text(TRAINS)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_workers_write_parts_and_others_resume_from_them(tmp_path, undisturbed):
    """Four workers, then two, then one, which finishes: with the weights of one that did it all."""
    found = None
    for workers in (4, 2):
        status, output = torchrun(tmp_path, TRAINS, workers, TEST_LEAVES="yes", TEST_INTERVAL_S="0.05")
        assert status == 0, output
        before, found = found, promoted(tmp_path / "checkpoints", pytest.fail)
        assert found.step > (before.step if before else 0)
        names = {f"{what}-{i:05d}-of-{workers:05d}.tensors" for what in ("model", "training") for i in range(workers)}
        assert {path.name for path in found.path.iterdir()} == names | {"manifest.json"}
    output = alone(tmp_path)
    assert re.findall(r"^RESULT (\d) (\w+) (\d+)$", output, re.MULTILINE) == [("0", undisturbed, str(found.step))]
    # What a training ends with is written whole.
    last = promoted(tmp_path / "checkpoints", pytest.fail)
    assert last.step == STEPS
    assert {path.name for path in last.path.iterdir()} == {"manifest.json", "model.tensors", "training.tensors"}
    assert not list(tmp_path.glob("checkpoints/*/.writing-*"))


@pytest.mark.slow
def test_a_worker_killed_before_its_part_is_written_costs_that_candidate_only(tmp_path, undisturbed):
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    config = {"steps": STEPS, "global_batch_size": 16, "logical_workers": 4, "checkpoint_interval_s": 0.1, "seed": 0}
    with Gang(tmp_path, script, **config) as run:
        checkpoints = run.folder / "checkpoints"
        run.env_of["w1"] = {"TEST_STOPS_WRITER": "yes"}
        run.plan("w0", "w1")
        run.wait(lambda: any(checkpoints.glob("g*/.writing-*/part-00000-*.json")), "rank 0's part")
        (unfinished,) = checkpoints.glob("g*/.writing-*")
        step = run.step()
        run.wait(lambda: run.step() > step + 3, "steps beside a save that waits for a part")
        assert unfinished.exists()
        run.kill("w1")
        with contextlib.suppress(ProcessLookupError):  # stopped so early that it may not have asked to end with w1
            os.kill(int((tmp_path / "stopped-writer").read_text()), signal.SIGKILL)
        run.plan("w0", lost=["w1"])
        run.wait_until_begun()
        run.wait(lambda: any(checkpoints.glob("g000002/step-*/model.tensors")), "a whole save of who is left")
        assert not unfinished.exists()
        run.plan("w0", "w2")
        run.wait_until_begun()
        run.wait(lambda: any(checkpoints.glob("g000003/step-*/model-00001-of-00002.tensors")), "parts of a new worker")
        run.hurry()
        run.finish()
        lines = [line for line in run.output() if line.startswith("RESULT")]
        told = run.reports(ReportKind.CHECKPOINT)
        assert not run.reports(ReportKind.FAILED), run.story()
    assert {line.split()[2] for line in lines} == {undisturbed}
    assert {report.worker_id for report in told} == {"w0"}
    for report in told:
        assert verify_candidate(checkpoints / report.data["path"]).digest == report.data["digest"]
    assert all((path / "manifest.json").exists() for path in list_candidates(checkpoints))
    assert not list(checkpoints.glob("*/.writing-*"))


class Own(nn.Module):
    """Something registered whose tensors are each worker's own."""

    def __init__(self, length: int, value: float) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.full((length,), value))


def worker(rank: int) -> Registered:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 30)).sum().backward()
    optimizer.step()
    return Registered(model, {"optimizer": optimizer, "own": Own(100 * (rank + 1), float(rank))})


def test_what_is_each_workers_own_is_rank_0s_and_does_not_move_the_split(tmp_path):
    for rank in (2, 1, 0):  # rank 0 would wait for the others
        saver = Checkpointer(tmp_path, incarnation=1, promotes=True, in_background=False)
        saver.save(worker(rank), generation=1, step=1, metadata={}, part=Part(rank=rank, size=3, token="5eed"))
        saver.close()
    found = worker(0)
    with torch.no_grad():
        for tensor in [*found.model.parameters(), *found.others["own"].parameters()]:
            tensor.fill_(7.0)
    checkpoint.load(found, promoted(tmp_path, pytest.fail))
    assert digest_of(found.model) == digest_of(worker(0).model)
    assert str(found.others["optimizer"].state_dict()) == str(worker(0).others["optimizer"].state_dict())
    assert torch.equal(found.others["own"].seen, torch.zeros(100))


def test_rank_0s_part_removes_what_an_earlier_save_left(tmp_path):
    for generation, name in ((1, "a"), (2, "b"), (3, "c")):
        (tmp_path / f"g{generation:06d}" / f".writing-{name}").mkdir(parents=True)
    # Another worker's part of the same save is there before.
    for rank in (1, 0):
        part = Part(rank=rank, size=2, token="5eed", sweeps=True)
        saver = Checkpointer(tmp_path, incarnation=1, in_background=False)
        saver.save(worker(rank), generation=2, step=1, metadata={}, part=part)
        saver.close()
    assert [path.name for path in tmp_path.glob("*/.writing-*")] == [".writing-c"]
    assert json.loads((list_candidates(tmp_path)[0] / "manifest.json").read_text())["step"] == 1


@pytest.mark.parametrize("changes", [False, True], ids=["must be on disk at once", "the workers change"])
def test_parts_that_do_not_come_hold_nobody_up(tmp_path, changes):
    """Rank 0's writer waits for a part of a worker that is gone."""
    saver = Saver(tmp_path, incarnation=1, promotes=True, keep=2, interval=1e6)
    state, part = worker(0), Part(rank=0, size=2, token="5eed", sweeps=True)
    saver.prepare_part(state, part)
    assert saver.save(state, generation=1, step=1, metadata={}, wait=False, part=part) is None
    if changes:
        saver.drop()
        assert saver.must_prepare_parts(2)
    else:
        assert saver.end_parts(0.0) == []
    saved = saver.save(state, generation=1, step=2, metadata={}, wait=True)
    saver.close()
    assert (saved.step, promoted(tmp_path, pytest.fail).step) == (2, 2)
    assert [path.name for path in list_candidates(tmp_path)] == [Path(saved.name).name]


@pytest.mark.parametrize("said", [-1.0, float("nan")])
def test_a_size_that_is_none_is_refused(tmp_path, said):
    with pytest.raises(ValueError, match=f"shard_checkpoints_above_gb={said}: it is 0 or more"):
        runtime.init(steps=1, checkpoint_dir=tmp_path, shard_checkpoints_above_gb=said)
