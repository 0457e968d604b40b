"""Looks at candidate checkpoints: what cannot be read now is tried again, and only in the end counts for nothing."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

from elasticflow_airflow.engines.job_files import JobFolders
from elasticflow_airflow.runtime.protocol import checkpoint_dir
from elasticflow_airflow.runtime.stores import manifest
from elasticflow_airflow.runtime.stores.manifest import MANIFEST, publish, writing
from elasticflow_airflow.service.job_files import candidates
from elasticflow_airflow.service.job_files.candidates import CandidateService, Looked

PATH = "g000001/step-000000000005"


@pytest.fixture
def files(tmp_path: Path) -> JobFolders:
    return JobFolders(tmp_path)


@pytest.fixture
def checkpoints(files: JobFolders) -> Path:
    checkpoints = checkpoint_dir(files.folder("job", 1))
    with writing(checkpoints, 1, 5) as folder:
        (folder / "weights").write_bytes(b"abc")
        publish(folder, checkpoints, incarnation=1, generation=1, step=5, metadata={})
    return checkpoints


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], list[Path]]:
    """Let the first reads of manifests fail, as a disk's or a network's would; notes the reads."""

    def fail(code: int, times: int) -> list[Path]:
        real, reads = manifest.open_ordinary, []

        def read(path: Path) -> BinaryIO:
            if path.name == MANIFEST:
                reads.append(path)
                if len(reads) <= times:
                    raise OSError(code, "said the kernel")
            return real(path)

        monkeypatch.setattr(manifest, "open_ordinary", read)
        return reads

    return fail


@pytest.fixture
def service(files: JobFolders, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[CandidateService, threading.Event]]:
    """A service whose rests are short, and what it sets when the loop should look."""
    monkeypatch.setattr(candidates, "_LONGEST_REST_S", 0.05)
    woken = threading.Event()
    service = CandidateService(files, woken.set)
    yield service, woken
    service.close()


def ask_until_told(service: CandidateService, woken: threading.Event, ask: Callable[[], None]) -> Looked:
    """As the loop does it: it asks in each pass, and passes when it is woken."""
    end_s = time.monotonic() + 20
    while time.monotonic() < end_s:
        ask()
        assert woken.wait(10), "nobody wakes the loop"
        woken.clear()
        if found := service.collect():
            service.settled(found)
            return found[0]
    raise AssertionError("it never came to an end")


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.ESTALE])
@pytest.mark.parametrize("whole", [False, True])
def test_what_cannot_be_read_for_a_while_counts_in_the_end(service, checkpoints, failing, code, whole):
    reads = failing(code, 3)

    def ask() -> None:
        if whole:
            service[0].ask_generation("job", 1, 1, frozenset())
        else:
            service[0].ask_candidate("job", 1, PATH)

    told = ask_until_told(*service, ask)
    assert [(one.path, one.problem) for one in told.verified] == [(PATH, None)]
    assert len(reads) == 4


def test_what_cannot_be_read_for_good_is_not_waited_for_without_end(service, checkpoints, failing):
    reads = failing(errno.EIO, 10**6)
    told = ask_until_told(*service, lambda: service[0].ask_generation("job", 1, 1, frozenset()))
    assert "it could not be read, again and again: OSError(5, 'said the kernel')" in str(told.verified[0].problem)
    assert len(reads) == 10


def test_between_two_tries_it_rests(service, checkpoints, failing, monkeypatch):
    monkeypatch.setattr(candidates, "_LONGEST_REST_S", 60.0)
    reads = failing(errno.EIO, 10**6)
    for _ in range(50):
        service[0].ask_candidate("job", 1, PATH)
        service[0].wait()
        assert service[0].collect() == []
    assert len(reads) == 1


def test_between_two_copies_it_rests(service, checkpoints, failing, monkeypatch, tmp_path):
    monkeypatch.setattr(candidates, "_LONGEST_REST_S", 60.0)
    reads, told = failing(errno.EIO, 10**6), []
    for _ in range(50):
        service[0].ask_adopt("job", 2, 1, PATH)
        service[0].wait()
        found = service[0].collect()
        service[0].settled(found)
        told += found
    assert [one.adopted.again for one in told] == [True]
    assert len(reads) == 1


def test_damage_is_told_at_once(service, checkpoints):
    (checkpoints / PATH / "weights").write_bytes(b"abd")
    told = ask_until_told(*service, lambda: service[0].ask_candidate("job", 1, PATH))
    assert str(told.verified[0].problem).startswith("it is damaged: ")


def test_a_copy_that_cannot_be_made_now_is_said_and_tried_again_for_as_long_as_it_is_asked_for(
    service, checkpoints, failing, tmp_path
):
    reads, told = failing(errno.EIO, 12), []
    while not told or told[-1].again:
        found = ask_until_told(*service, lambda: service[0].ask_adopt("job", 2, 1, PATH))
        assert found.adopted is not None
        told.append(found.adopted)
    assert len(told) == 13
    assert all("said the kernel" in one.problem for one in told[:-1])
    assert told[-1].info is not None
    assert (told[-1].info.step, told[-1].info.incarnation, told[-1].problem) == (5, 2, "")
    assert len(reads) > 12


def test_a_copy_of_what_is_damaged_is_told_at_once(service, checkpoints, tmp_path):
    (checkpoints / PATH / "weights").write_bytes(b"abd")
    told = ask_until_told(*service, lambda: service[0].ask_adopt("job", 2, 1, PATH)).adopted
    assert told is not None
    assert (told.info, told.again) == (None, False)
    assert "weights" in told.problem
