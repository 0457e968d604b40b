"""A checkpoint that cannot be read now is no damaged one: it is tried again, then waited for, and never passed over."""

from __future__ import annotations

import contextlib
import errno
import resource
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from support.object_store import Road, bucket
from torch import nn

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime import load_weights, protocol
from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.checkpoints.checkpointer import Checkpointer
from elasticflow_airflow.runtime.stores import manifest, retrying
from elasticflow_airflow.runtime.stores.manifest import CheckpointUnreachable
from elasticflow_airflow.runtime.stores.open_store import open_store

memory = pytest.importorskip("fsspec.implementations.memory", reason="needs fsspec")

TRIES = 3


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Reads are tried three times, and the pauses between are noted."""
    seen: list[float] = []
    monkeypatch.setattr(retrying, "PAUSES_S", (0.5, 1.0))
    monkeypatch.setattr(retrying, "sleep", seen.append)
    return seen


def name_of(step: int) -> str:
    return f"g000001/step-{step:012d}"


def save(where: str, *steps: int) -> None:
    """Save and promote; the weights are the step."""
    saver = Checkpointer(where, incarnation=1, promotes=True, keep=2)
    for step in steps:
        model = nn.Linear(200, 200, bias=False)
        nn.init.constant_(model.weight, step)
        saver.save(Registered(model), generation=1, step=step, metadata={}, wait=True)
    saver.close()


@pytest.fixture
def where() -> str:
    """Two checkpoints in memory, the second promoted."""
    url = f"memory://{uuid.uuid4().hex}"
    save(url, 1, 2)
    return url


def promoted_step(where: str) -> int | None:
    with open_store(where).promoted(pytest.fail) as info:
        return None if info is None else info.step


class Flaky:
    """Breaks calls of a file system: the first ``times`` of those that are about ``what``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.failed = 0

    def fail(self, method: str, error: Exception, *, times: int = 1000, what: str = "", half: bool = False) -> None:
        real, left = getattr(memory.MemoryFileSystem, method), [times]

        def flaky(fs, path, *arguments, **options):
            if what not in path or not left[0]:
                return real(fs, path, *arguments, **options)
            left[0] -= 1
            self.failed += 1
            if half:
                Path(arguments[0]).write_bytes(fs.cat_file(path)[:100])
                return None
            raise error

        self._monkeypatch.setattr(memory.MemoryFileSystem, method, flaky)


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Flaky:
    return Flaky(monkeypatch)


RESET = ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


class Vendor(Exception):
    """A store's own error: botocore's and others' are no OSErrors."""


@pytest.mark.parametrize("method", ["get_file", "cat_file", "ls"])
@pytest.mark.parametrize("error", [RESET, Vendor("slow down"), PermissionError(errno.EACCES, "Forbidden")])
def test_what_fails_once_is_done_again_and_the_newest_is_loaded(where, flaky, pauses, method, error):
    flaky.fail(method, error, times=1)
    assert promoted_step(where) == 2
    assert (flaky.failed, pauses) == (1, [0.5])


@pytest.mark.parametrize("what", ["model.tensors", "training.tensors"])
def test_a_download_that_breaks_off_silently_is_done_again(where, flaky, what):
    flaky.fail("get_file", RESET, times=2, what=what, half=True)
    assert promoted_step(where) == 2
    assert flaky.failed == 2


@pytest.mark.parametrize("method", ["get_file", "cat_file", "ls"])
def test_what_fails_for_good_is_never_passed_over(where, flaky, pauses, method):
    flaky.fail(method, RESET, what=name_of(2) if method == "get_file" else "")
    with pytest.raises(CheckpointUnreachable, match=r"cannot be read now: .*Connection reset by peer.*network, and st"):
        promoted_step(where)
    assert (flaky.failed, pauses) == (TRIES, [0.5, 1.0])


def test_a_promotion_that_cannot_be_read_is_not_damaged(where, flaky):
    flaky.fail("cat_file", PermissionError(errno.EACCES, "Forbidden"), what="promoted.json")
    with pytest.raises(CheckpointUnreachable, match=r"promoted\.json cannot be read now: .*Give uid \d+, or the keys"):
        promoted_step(where)


def test_an_object_that_a_manifest_names_and_nobody_has_is_damage(where, pauses):
    memory.MemoryFileSystem().rm_file(f"{where.removeprefix('memory://')}/{name_of(2)}/model.tensors")
    warnings: list[str] = []
    with open_store(where).promoted(warnings.append) as info:
        assert info.step == 1
    assert warnings == [f"skipped: checkpoint {where}/{name_of(2)}: model.tensors is missing"]
    assert pauses == []


@contextlib.contextmanager
def small_files(limit_bytes: int) -> Iterator[None]:
    """A limit on the size of files stands in for a full disk: the kernel refuses the write in the same place."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_no_room_in_the_temporary_folder(where, pauses):
    with small_files(100_000), pytest.raises(CheckpointUnreachable, match=r"Make room .*set TMPDIR to a folder with"):
        promoted_step(where)
    assert pauses == [0.5, 1.0]
    assert promoted_step(where) == 2
    assert open_store(where).candidates() == [name_of(1), name_of(2)]


def test_a_temporary_folder_that_is_full(where, tiny_disk, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tiny_disk))
    with pytest.raises(CheckpointUnreachable, match=r"No space left on device.*set TMPDIR to a folder with room"):
        promoted_step(where)
    assert list(tiny_disk.iterdir()) == []


def test_a_temporary_folder_that_is_not_there(where, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(CheckpointUnreachable, match="the temporary folder cannot be read now"):
        promoted_step(where)


def test_weights_to_begin_with_are_tried_again_too(where, flaky):
    flaky.fail("get_file", RESET, times=2)
    model = nn.Linear(200, 200, bias=False)
    load_weights(model, f"{where}/{name_of(2)}")
    assert torch.equal(model.weight, torch.full((200, 200), 2.0))


# -- whole sessions ---------------------------------------------------------------------------------------------


def test_a_session_that_cannot_reach_its_checkpoints_deletes_none(training, flaky, monkeypatch, capsys):
    where = f"memory://{uuid.uuid4().hex}"
    training(epochs=1, checkpoint_dir=where, checkpoint_interval_s=0.0).run().session.finish()
    before = open_store(where).candidates()
    with monkeypatch.context() as while_it_is_away:
        Flaky(while_it_is_away).fail("get_file", RESET)
        with pytest.raises(runtime.CheckpointError, match="no older checkpoint is used in its stead"):
            training(epochs=2, checkpoint_dir=where)
    said = capsys.readouterr()
    assert "kind=bad_checkpoint" in said.err
    assert "skipped" not in said.err + said.out
    assert open_store(where).candidates() == before
    again = training(epochs=2, checkpoint_dir=where)
    assert again.session.steps_done == 4


# -- folders ----------------------------------------------------------------------------------------------------


def failing_reads(monkeypatch: pytest.MonkeyPatch, what: str, code: int, times: int) -> Callable[[], int]:
    """Let the first reads of what has this in its path fail, as a disk's or a network's would."""
    real, failed = manifest.open_ordinary, [0]

    def read(path: Path) -> BinaryIO:
        if what in str(path) and failed[0] < times:
            failed[0] += 1
            raise OSError(code, "said the kernel", str(path))
        return real(path)

    monkeypatch.setattr(manifest, "open_ordinary", read)
    return lambda: failed[0]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_disk_that_fails_once(tmp_path, monkeypatch, code):
    save(str(tmp_path), 1, 2)
    failed = failing_reads(monkeypatch, name_of(2), code, 1)
    assert manifest.promoted(tmp_path, pytest.fail).step == 2
    assert failed() == 1


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
def test_a_disk_that_fails_for_good(tmp_path, monkeypatch, code):
    save(str(tmp_path), 1, 2)
    failed = failing_reads(monkeypatch, name_of(2), code, 1000)
    with pytest.raises(CheckpointUnreachable, match=f"checkpoint {tmp_path}/{name_of(2)} cannot be read now"):
        manifest.promoted(tmp_path, pytest.fail)
    assert failed() == TRIES


def test_a_promotion_on_a_disk_that_fails(tmp_path, monkeypatch):
    save(str(tmp_path), 1, 2)
    real = protocol.open_ordinary

    def opened(path: Path) -> BinaryIO:
        if path.name == "promoted.json":
            raise OSError(errno.EIO, "Input/output error")
        return real(path)

    monkeypatch.setattr(protocol, "open_ordinary", opened)
    with pytest.raises(CheckpointUnreachable, match=r"promoted\.json cannot be read now"):
        manifest.promoted(tmp_path, pytest.fail)


def test_something_else_in_the_place_of_a_manifest_is_damage(tmp_path, pauses):
    save(str(tmp_path), 1, 2)
    (tmp_path / name_of(2) / "manifest.json").unlink()
    (tmp_path / name_of(2) / "manifest.json").mkdir()
    warnings: list[str] = []
    assert manifest.promoted(tmp_path, warnings.append).step == 1
    assert "Is a directory" in warnings[0]
    assert pauses == []


# -- a server ---------------------------------------------------------------------------------------------------


@pytest.fixture
def road(s3_server, monkeypatch) -> Iterator[tuple[Road, str]]:
    """Two checkpoints on moto's server, and the way to it."""
    road = Road(s3_server)
    where = bucket(road.url, monkeypatch, uuid.uuid4().hex)
    save(where, 1, 2)
    yield road, where
    road.close()


@pytest.mark.slow
@pytest.mark.parametrize("cut_after", [0, 5_000, 100_000])
def test_a_connection_to_the_server_that_breaks(road, cut_after):
    way, where = road
    way.cut_after, way.cuts = cut_after, 2
    assert promoted_step(where) == 2
    assert way.made >= 1


@pytest.mark.slow
def test_a_connection_to_the_server_that_stays_broken(road):
    way, where = road
    way.cut_after, way.cuts = 5_000, 1_000_000
    with pytest.raises(CheckpointUnreachable, match=r"cannot be read now: .* and start again\. Nothing was deleted"):
        promoted_step(where)
    way.cuts = 0
    assert open_store(where).candidates() == [name_of(1), name_of(2)]
    assert promoted_step(where) == 2
