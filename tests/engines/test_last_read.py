"""Statuses of supervisors: what has not changed is not read again, and what has changed is never missed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from elasticflow_airflow.engines.local.files.generation_folder import Status, SupervisorFolder
from elasticflow_airflow.engines.local.files.last_read import LastRead


@pytest.fixture
def folder(tmp_path: Path) -> SupervisorFolder:
    made = SupervisorFolder(tmp_path / "g000001-n0")
    made.path.mkdir()
    return made


def age(folder: SupervisorFolder, by_s: float = 1.0) -> None:
    """Have its status be written earlier."""
    at_s = time.time() - by_s
    os.utime(folder.status_file, (at_s, at_s))


def test_it_is_read_once_and_again_when_it_was_replaced(folder: SupervisorFolder) -> None:
    statuses = LastRead[Status]()
    assert statuses.get(folder.status_file, folder.read_status) is None
    folder.write_status(Status(reason="one"))
    age(folder)
    first = statuses.get(folder.status_file, folder.read_status)
    assert first == Status(reason="one")
    assert statuses.get(folder.status_file, folder.read_status) is first
    folder.write_status(Status(reason="two"))
    assert statuses.get(folder.status_file, folder.read_status) == Status(reason="two")
    folder.status_file.unlink()
    assert statuses.get(folder.status_file, folder.read_status) is None
    folder.write_status(Status(reason="two"))
    age(folder)
    statuses.get(folder.status_file, folder.read_status)
    folder.status_file.write_text("{")
    age(folder, 2.0)
    with pytest.raises(ValueError, match="Expecting property name"):
        statuses.get(folder.status_file, folder.read_status)


def test_changes_within_one_tick_of_the_clock_are_seen(folder: SupervisorFolder) -> None:
    """The same inode, time and size: only what is older than a tick is taken to be what it was."""
    statuses = LastRead[Status]()
    folder.write_status(Status(reason="a"))
    stamp = folder.status_file.stat()
    assert statuses.get(folder.status_file, folder.read_status) == Status(reason="a")
    folder.status_file.write_text(folder.status_file.read_text().replace('"a"', '"b"'))
    os.utime(folder.status_file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert statuses.get(folder.status_file, folder.read_status) == Status(reason="b")


def test_what_was_forgotten_is_read_again(folder: SupervisorFolder) -> None:
    statuses = LastRead[Status]()
    folder.write_status(Status())
    age(folder)
    first = statuses.get(folder.status_file, folder.read_status)
    statuses.forget(folder.status_file)
    assert statuses.get(folder.status_file, folder.read_status) is not first
