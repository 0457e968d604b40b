"""A place that takes no checkpoints, and a disk that has no room for them, are found before there is a loss."""

from __future__ import annotations

import errno
import shutil
import uuid
from pathlib import Path

import pytest
from torch import nn

from elasticflow_airflow import runtime
from elasticflow_airflow.runtime.protocol import ReportKind
from elasticflow_airflow.runtime.stores import retrying
from elasticflow_airflow.runtime.stores.disk_space import lack_of_room, refuse_full_disk

memory = pytest.importorskip("fsspec.implementations.memory", reason="needs fsspec")


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    seen: list[float] = []
    monkeypatch.setattr(retrying, "sleep", seen.append)
    return seen


# -- places that take nothing -----------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, method: str, error: Exception, times: int = 1000) -> None:
    real, left = getattr(memory.MemoryFileSystem, method), [times]

    def fails(fs, path, *arguments, **options):
        if ".probe-" in path and left[0]:
            left[0] -= 1
            raise error
        return real(fs, path, *arguments, **options)

    monkeypatch.setattr(memory.MemoryFileSystem, method, fails)


@pytest.mark.parametrize("method", ["open", "rm_file"])
def test_a_url_that_is_read_only(session_globals, monkeypatch, pauses, method):
    failing(monkeypatch, method, PermissionError(errno.EACCES, "Access Denied"))
    where = f"memory://{uuid.uuid4().hex}"
    message = rf"checkpoint_dir='{where}' cannot be written: Access Denied\. Choose another place, or give the keys t"
    with pytest.raises(runtime.CheckpointError, match=message):
        runtime.init(epochs=1, checkpoint_dir=where)
    assert pauses == []


def test_a_store_that_takes_it_the_second_time(training, monkeypatch, pauses):
    failing(monkeypatch, "open", ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), times=1)
    training(epochs=1, checkpoint_dir=f"memory://{uuid.uuid4().hex}").run().session.finish()
    assert pauses == [0.5]


def test_nothing_of_the_trial_stays(session_globals):
    where = f"memory://{uuid.uuid4().hex}"
    runtime.init(epochs=1, checkpoint_dir=where)
    assert memory.MemoryFileSystem().find(where) == []


def test_a_protocol_that_cannot_write(session_globals):
    pytest.importorskip("aiohttp", reason="fsspec's http needs aiohttp")
    with pytest.raises(runtime.CheckpointError, match=r"checkpoint_dir='http://127.0.0.1:9/x' cannot be written"):
        runtime.init(epochs=1, checkpoint_dir="http://127.0.0.1:9/x")


def test_a_file_where_a_folder_of_a_url_should_be(session_globals, tmp_path, monkeypatch, pauses):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ELASTICFLOW_CHECKPOINT_DIR", f"file://{tmp_path}/file/x")
    with pytest.raises(runtime.CheckpointError, match=r"ELASTICFLOW_CHECKPOINT_DIR='file://.* cannot be written: "):
        runtime.init(epochs=1)


@pytest.mark.slow
def test_a_bucket_that_is_not_there(session_globals, s3_server, monkeypatch):
    from support.object_store import bucket

    bucket(s3_server, monkeypatch, uuid.uuid4().hex)
    with pytest.raises(runtime.CheckpointError, match=r"checkpoint_dir='s3://no-such-bucket-here/x' cannot be written"):
        runtime.init(epochs=1, checkpoint_dir="s3://no-such-bucket-here/x")


# -- disks without room -----------------------------------------------------------------------------------------


class Large:
    """Something with a state, as large as an optimizer's; it has it from the first step on."""

    def __init__(self) -> None:
        self.state = nn.Linear(1, 1)

    def state_dict(self):
        return dict(self.state.state_dict())

    def load_state_dict(self, state):
        self.state.load_state_dict(state)


def test_a_disk_without_room_for_the_weights(training, tiny_disk, capsys):
    (tiny_disk / "in the way").write_bytes(bytes(shutil.disk_usage(tiny_disk).free))
    run = training(epochs=1, checkpoint_dir=Path("elsewhere"))
    run.session._core.context.checkpoints = tiny_disk / "checkpoints"
    message = r"a checkpoint of this training takes \d.* has 0 bytes free\. Free \d.* or keep checkpoints elsewhere"
    with pytest.raises(runtime.CheckpointError, match=message):
        run.run()
    assert run.losses == []
    assert "kind=checkpoint_not_written" in capsys.readouterr().err


def test_a_disk_without_room_for_what_comes_with_the_first_step(training, tiny_disk):
    large = Large()
    run = training(epochs=1, checkpoint_dir=tiny_disk, register={"large": large})

    def grow(done: int) -> None:
        large.state = nn.Linear(200, 200)

    with pytest.raises(runtime.CheckpointError, match=r"takes 16\d\.\d kB, and the disk of .*/tiny has 65\.5 kB free"):
        run.run(before_step=grow)
    assert run.session.steps_done == 1


def test_what_a_killed_writer_left_takes_no_room(training, tiny_disk):
    left = tiny_disk / "g000000" / ".writing-killed"
    left.mkdir(parents=True)
    (left / "model.tensors").write_bytes(bytes(shutil.disk_usage(tiny_disk).free))
    run = training(epochs=1, checkpoint_dir=tiny_disk).run()
    run.session.finish()
    assert not left.exists()


def test_room_for_one_but_not_for_all_that_are_kept(training, tiny_disk, capsys):
    large = Large()
    large.state = nn.Linear(100, 100)
    training(epochs=1, checkpoint_dir=tiny_disk, register={"large": large}).run()
    said = capsys.readouterr().err
    assert "the newest 2 checkpoints are kept while the next one is written: that takes 12" in said
    assert said.count("or a save will fail") == 1


def test_under_the_service_too(service, training, monkeypatch):
    service.configure()
    service.start(1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    run = training()
    with pytest.raises(runtime.CheckpointError, match="has 1 bytes free"):
        run.run()
    (failed,) = service.reports(1, kind=ReportKind.FAILED)
    assert failed.data["kind"] == "checkpoint_not_written"


def test_what_is_there_already_needs_no_room(tmp_path, candidate, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 2500))
    refuse_full_disk(tmp_path / "not" / "yet", 2500)
    assert lack_of_room(tmp_path / "checkpoints", 1000, 2).endswith("Free 500 bytes there, or a save will fail")
    candidate(1, 1)
    assert lack_of_room(tmp_path / "checkpoints", 1000, 2) is None
