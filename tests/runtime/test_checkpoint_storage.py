"""Checkpoints behind URLs: the same guarantees as in a folder, uploads that break off included."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from support.object_store import bucket
from torch import nn

from elasticflow_airflow.runtime import load_weights
from elasticflow_airflow.runtime.checkpoints import checkpoint
from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.checkpoints.checkpointer import Checkpointer
from elasticflow_airflow.runtime.stores import retrying
from elasticflow_airflow.runtime.stores.manifest import CheckpointError
from elasticflow_airflow.runtime.stores.open_store import open_store
from elasticflow_airflow.runtime.stores.store import Part

fsspec = pytest.importorskip("fsspec", reason="needs fsspec")


@pytest.fixture(params=["folder", "file", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def where(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = uuid.uuid4().hex
    if request.param == "folder":
        return str(tmp_path / name)
    if request.param == "file":
        return f"file://{tmp_path}/{name}"
    if request.param == "memory":
        return f"memory://{name}"
    return bucket(request.getfixturevalue("s3_server"), monkeypatch, name)


def trained(seed: int = 0) -> Registered:
    torch.manual_seed(seed)
    model = nn.Linear(40, 30)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 40)).sum().backward()
    optimizer.step()
    return Registered(model, {"optimizer": optimizer})


@contextlib.contextmanager
def checkpointer(where: str, **options: object) -> Iterator[Checkpointer]:
    saver = Checkpointer(where, incarnation=1, promotes=True, keep=2, **options)
    try:
        yield saver
    finally:
        saver.close()


def save(saver: Checkpointer, registered: Registered, step: int, **options: object):
    return saver.save(registered, generation=1, step=step, metadata={"step": step}, **options)


def name_of(step: int) -> str:
    return f"g000001/step-{step:012d}"


def damage(where: str, step: int, file: str, change) -> None:
    """Change a stored file."""
    url = f"{where}/{name_of(step)}/{file}"
    with fsspec.open(url, "rb") as stream:
        content = change(stream.read())
    with fsspec.open(url, "wb") as stream:
        stream.write(content)


def promoted_step(where: str, warnings: list[str] | None = None) -> int | None:
    with open_store(where).promoted((lambda _: None) if warnings is None else warnings.append) as info:
        return None if info is None else info.step


def test_what_is_saved_comes_back(where):
    before = trained()
    with checkpointer(where) as saver:
        assert save(saver, before, 1, wait=True).name == name_of(1)
        assert save(saver, before, 2) is None or where.startswith("memory:")
        saver.flush()
        store = saver.store
        assert store.candidates() == [name_of(1), name_of(2)]
        with store.promoted(pytest.fail) as info:
            assert (info.step, info.metadata) == (2, {"step": 2})
            after = trained(1)
            checkpoint.load(after, info)
            assert torch.equal(after.model.weight, before.model.weight)
            assert str(after.others["optimizer"].state_dict()) == str(before.others["optimizer"].state_dict())
    model = nn.Linear(40, 30)
    load_weights(model, f"{where}/{name_of(2)}")
    assert torch.equal(model.weight, before.model.weight)


def test_nothing_promoted_is_nothing(where):
    assert promoted_step(where) is None
    assert open_store(where).candidates() == []


def test_the_newest_are_kept_and_the_promoted_one(where):
    with checkpointer(where) as saver:
        for step in (1, 2, 3, 4):
            save(saver, trained(), step, wait=True)
        assert saver.store.candidates() == [name_of(3), name_of(4)]
        with saver.store.fetch(name_of(3)) as info:
            saver.store.promote(info)
        for step in (5, 6):
            with unpromoting(where) as other:
                save(other, trained(), step, wait=True)
        assert saver.store.remove_old(1) == [name_of(4), name_of(5)]
        assert saver.store.candidates() == [name_of(3), name_of(6)]


@contextlib.contextmanager
def unpromoting(where: str) -> Iterator[Checkpointer]:
    saver = Checkpointer(where, incarnation=1)
    try:
        yield saver
    finally:
        saver.close()


@pytest.mark.parametrize("file", ["manifest.json", "model.tensors", "training.tensors"])
@pytest.mark.parametrize("how", ["torn", "flipped", "emptied"])
def test_damage_is_found_and_the_one_before_is_used(where, file, how):
    changes = {
        "torn": lambda raw: raw[: len(raw) // 2],
        "flipped": lambda raw: raw[:200] + bytes([raw[200] ^ 4]) + raw[201:],
        "emptied": lambda raw: b"",
    }
    with checkpointer(where) as saver:
        save(saver, trained(), 1, wait=True)
        save(saver, trained(), 2, wait=True)
    damage(where, 2, file, changes[how])
    warnings: list[str] = []
    assert promoted_step(where, warnings) == 1
    assert warnings[0].startswith("skipped: checkpoint ")
    assert name_of(2) in warnings[0]


def test_a_damaged_promotion_falls_back_to_the_newest_valid(where):
    with checkpointer(where) as saver:
        save(saver, trained(), 1, wait=True)
    with fsspec.open(f"{where}/promoted.json", "wb") as stream:
        stream.write(b"{")
    warnings: list[str] = []
    assert promoted_step(where, warnings) == 1
    assert "promoted.json is damaged" in warnings[0]


class Broken:
    """A stream whose other end goes away after some bytes, of all streams together."""

    def __init__(self, stream, left: list[int]) -> None:
        self._stream, self._left = stream, left

    def __enter__(self):
        self._stream.__enter__()
        return self

    def __exit__(self, *error):
        return self._stream.__exit__(*error)

    def write(self, data):
        self._left[0] -= len(data)
        if self._left[0] < 0:
            raise ConnectionError("the connection broke")
        return self._stream.write(data)


@pytest.mark.parametrize("left", [0, 100, 3000, 6000, 12_000])
def test_an_upload_that_breaks_off_leaves_nothing_that_counts(where, left, monkeypatch):
    if "://" not in where:
        pytest.skip("nothing is uploaded to a folder")
    monkeypatch.setattr(retrying, "sleep", lambda _: None)
    before = trained()
    with checkpointer(where, in_background=False) as saver:
        save(saver, before, 1, wait=True)
        real = saver.store.open_for_writing
        budget = [left]
        monkeypatch.setattr(saver.store, "open_for_writing", lambda name: Broken(real(name), budget))
        with pytest.raises(CheckpointError, match=r"step 2 could not be written below .*the connection broke"):
            save(saver, before, 2, wait=True)
        assert saver.store.candidates() == [name_of(1)]
        assert promoted_step(where) == 1
        monkeypatch.setattr(saver.store, "open_for_writing", real)
        save(saver, before, 2, wait=True)
        assert promoted_step(where) == 2


@pytest.mark.parametrize("left", [0, 100, 6000])
def test_an_upload_that_breaks_off_is_begun_anew(where, left, monkeypatch):
    if "://" not in where:
        pytest.skip("nothing is uploaded to a folder")
    with checkpointer(where, in_background=False) as saver:
        save(saver, trained(), 1, wait=True)
        real, budget, rested = saver.store.open_for_writing, [left], []

        def rest(pause_s: float) -> None:
            rested.append(pause_s)
            if len(rested) == 3:
                budget[0] = 10**9

        monkeypatch.setattr(retrying, "sleep", rest)
        monkeypatch.setattr(saver.store, "open_for_writing", lambda name: Broken(real(name), budget))
        save(saver, trained(), 2, wait=True)
        assert rested == [0.5, 1.0, 2.0]
    assert promoted_step(where) == 2


@pytest.mark.parametrize(
    "error", [PermissionError(errno.EACCES, "Access Denied"), OSError(errno.ENOSPC, "No space left on device")]
)
def test_what_another_try_cannot_mend_is_said_at_once(where, monkeypatch, error):
    if "://" not in where:
        pytest.skip("nothing is uploaded to a folder")
    with checkpointer(where, in_background=False) as saver:
        rested: list[float] = []
        monkeypatch.setattr(retrying, "sleep", rested.append)
        monkeypatch.setattr(saver.store, "open_for_writing", Mock(side_effect=error))
        with pytest.raises(CheckpointError, match=rf"step 1 could not be written below .*: {error.strerror}\. Free"):
            save(saver, trained(), 1, wait=True)
        assert not rested


def test_a_checkpoint_that_is_whole_but_does_not_count_yet_is_said_to_be_that(where, monkeypatch):
    if "://" not in where:
        pytest.skip("nothing is uploaded to a folder")
    with checkpointer(where, in_background=False) as saver:
        real, rested = saver.store.replace, []

        def replace(name: str, data: bytes) -> None:
            if name == "promoted.json":
                raise ConnectionError("the connection broke")
            real(name, data)

        monkeypatch.setattr(retrying, "sleep", rested.append)
        monkeypatch.setattr(saver.store, "replace", replace)
        with pytest.raises(
            CheckpointError, match=r"step 1 is whole, but .*promoted.json, by which it counts, could not"
        ):
            save(saver, trained(), 1, wait=True)
        assert len(rested) == 5
        assert saver.store.candidates() == [name_of(1)]


def test_what_stays_behind_of_parts_costs_no_checkpoint(where, monkeypatch):
    """Written anew, it would lack what the others have handed in."""
    if "://" not in where:
        pytest.skip("parts of a folder are removed with it")
    with checkpointer(where, in_background=False) as saver:
        real = saver.store.delete_file

        def delete_file(name: str) -> None:
            if "/part-" in name:
                raise ConnectionError("the connection broke")
            real(name)

        monkeypatch.setattr(retrying, "sleep", lambda _: pytest.fail("it is begun anew"))
        monkeypatch.setattr(saver.store, "delete_file", delete_file)
        save(saver, trained(), 1, wait=True, part=Part(rank=0, size=1, token="once"))
    assert promoted_step(where) == 1


def test_leftovers_without_a_manifest_are_removed_when_a_newer_one_counts(where):
    if "://" not in where:
        pytest.skip("in a folder they have another name; see test_manifest.py")
    fs, root = fsspec.core.url_to_fs(where)
    fs.makedirs(f"{root}/{name_of(1)}", exist_ok=True)
    fs.pipe_file(f"{root}/{name_of(1)}/model.tensors", b"half")
    with checkpointer(where) as saver:
        assert saver.store.candidates() == []
        save(saver, trained(), 2, wait=True)
    fs.invalidate_cache()
    assert not fs.exists(f"{root}/{name_of(1)}/model.tensors")


KILLED = textwrap.dedent("""
    import sys
    import torch
    from torch import nn
    from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
    from elasticflow_airflow.runtime.checkpoints.checkpointer import Checkpointer
    saver = Checkpointer(sys.argv[1], incarnation=1, promotes=True)
    registered = Registered(nn.Linear(1000, 4000))
    saver.save(registered, generation=1, step=1, metadata={})
    saver.flush()
    saver.save(registered, generation=1, step=2, metadata={})
    print(saver.writer_pid, flush=True)
    sys.stdin.read()
""")


@pytest.mark.slow
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.05, 0.1])
def test_a_kill_in_the_middle_of_an_upload(s3_server, monkeypatch, delay_s):
    """To moto's server, by multipart upload. Whether the second one made it depends on the moment."""
    where = bucket(s3_server, monkeypatch, uuid.uuid4().hex)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, where], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
    ) as trainer:
        try:
            writer = int(trainer.stdout.readline())
            time.sleep(delay_s)  # the moment is what this is about
            os.kill(writer, signal.SIGKILL)
        finally:
            trainer.kill()
    warnings: list[str] = []
    assert promoted_step(where, warnings) in (1, 2)
    assert warnings == []
    with checkpointer(where) as saver:
        save(saver, trained(), 3, wait=True)
    assert promoted_step(where) == 3


def test_a_url_that_nobody_serves(monkeypatch):
    with pytest.raises(CheckpointError, match=r"cannot be kept at nowhere://x/y: Protocol not known: nowhere"):
        Checkpointer("nowhere://x/y", incarnation=1)


@pytest.mark.slow
def test_a_bucket_that_is_not_there(s3_server, monkeypatch):
    bucket(s3_server, monkeypatch, uuid.uuid4().hex)
    with (
        unpromoting("s3://no-such-bucket-here/x") as saver,
        pytest.raises(CheckpointError, match="step 1 could not be written below s3://no-such-bucket-here/x"),
    ):
        save(saver, trained(), 1, wait=True)
