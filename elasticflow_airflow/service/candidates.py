"""Looks at candidate checkpoints on disk: verifies, lists and deletes them, in a thread of its own.

Verifying reads every byte, which may take seconds: the loop asks, goes on, and finds the answer in a later pass.
Knows files only; what counts is decided by ``promotion.py``. Never touches anything outside an incarnation's folder.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import structlog

from elasticflow_airflow.runtime.manifest import CheckpointError, verify_patiently

log = structlog.get_logger()

CANDIDATE_PATH = re.compile(r"^g(\d{6})/step-(\d{12})$")


@dataclass(frozen=True, slots=True)
class Verified:
    """What a look at one candidate showed. ``problem`` None: it is whole."""

    path: str
    generation: int
    step: int
    digest: str
    problem: str | None


Verify = Callable[[Path], str]
"""Returns the digest of a candidate's folder; raises ValueError or OSError when it is damaged."""


def verify_by_manifest(folder: Path) -> str:
    """Verify what the runtime wrote (``manifest.json`` with a digest of every file), reading again what fails."""
    try:
        return verify_patiently(folder).digest
    except CheckpointError as error:
        raise ValueError(str(error)) from error


@dataclass(frozen=True, slots=True)
class Looked:
    """The outcome of one task: of a candidate, of a whole generation, or of a deletion."""

    job_id: str
    incarnation: int
    generation: int | None
    """The generation that was looked through as a whole; None for single candidates."""
    verified: tuple[Verified, ...] = ()
    deleted: tuple[str, ...] = ()


class CandidateDesk:
    """Runs one task at a time; asking for one that is under way changes nothing."""

    def __init__(self, verify: Verify, when_done: Callable[[], None]) -> None:
        self._verify = verify
        self._when_done = when_done
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._under_way: dict[tuple[object, ...], Future[Looked]] = {}

    def ask_candidate(self, job_id: str, incarnation: int, checkpoints: Path, path: str) -> None:
        """Verify one candidate of a running generation."""

        def task() -> Looked:
            return Looked(job_id, incarnation, None, verified=(look(checkpoints, path, self._verify),))

        self._ask(("candidate", job_id, incarnation, path), task)

    def ask_generation(
        self, job_id: str, incarnation: int, generation: int, checkpoints: Path, known: frozenset[str]
    ) -> None:
        """Verify every candidate of an ended generation that is not ``known``, reported or not."""

        def task() -> Looked:
            found = [path for path in list_candidates(checkpoints, generation) if path not in known]
            return Looked(
                job_id, incarnation, generation, verified=tuple(look(checkpoints, path, self._verify) for path in found)
            )

        self._ask(("generation", job_id, generation), task)

    def ask_delete(self, job_id: str, incarnation: int, checkpoints: Path, path: str) -> None:
        """Delete one candidate."""

        def task() -> Looked:
            folder = _inside(checkpoints, path)
            if folder.exists():
                shutil.rmtree(folder)
            return Looked(job_id, incarnation, None, deleted=(path,))

        self._ask(("delete", job_id, incarnation, path), task)

    def collect(self) -> list[Looked]:
        """Everything that is done. Call :meth:`settled` once it is stored.

        What failed (a folder that cannot be read or removed) is logged, and is asked for again by a later pass.
        """
        looked = []
        for key, future in list(self._under_way.items()):
            if not future.done():
                continue
            error = future.exception()
            if error is None:
                looked.append(future.result())
            else:
                log.warning("a checkpoint folder could not be looked at", what=key, error=repr(error))
                del self._under_way[key]
        return looked

    def settled(self, looked: list[Looked]) -> None:
        """Forget tasks whose outcome is stored."""
        self._under_way = {
            key: future
            for key, future in self._under_way.items()
            if not (future.done() and any(future.result() is one for one in looked))
        }

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._under_way)

    def wait(self) -> bool:
        """Wait until all that was asked for is done; False when nothing was."""
        wait(list(self._under_way.values()))
        return self.busy

    def close(self) -> None:
        """Finish what is being read; drop the rest (it is asked for again after a restart)."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _ask(self, key: tuple[object, ...], task: Callable[[], Looked]) -> None:
        if key in self._under_way:
            return
        future = self._pool.submit(task)
        self._under_way[key] = future
        future.add_done_callback(lambda _: self._when_done())


def look(checkpoints: Path, path: str, verify: Verify) -> Verified:
    """Verify one candidate by its relative path."""
    match = CANDIDATE_PATH.match(path)
    if match is None:
        return Verified(path, 0, 0, "", "its path is not that of a candidate")
    generation, step = int(match[1]), int(match[2])
    try:
        return Verified(path, generation, step, verify(_inside(checkpoints, path)), None)
    except (OSError, ValueError, KeyError) as error:
        return Verified(path, generation, step, "", f"{type(error).__name__}: {error}")


def list_candidates(checkpoints: Path, generation: int) -> list[str]:
    """Relative paths of a generation's candidates that have their final name, oldest step first."""
    folder = checkpoints / f"g{generation:06d}"
    if not folder.is_dir():
        return []
    names = sorted(f"g{generation:06d}/{entry.name}" for entry in folder.iterdir())
    return [name for name in names if CANDIDATE_PATH.match(name)]


def _inside(checkpoints: Path, path: str) -> Path:
    if not CANDIDATE_PATH.match(path):
        raise ValueError(f"{path!r} is not the path of a candidate checkpoint")
    return checkpoints / path
