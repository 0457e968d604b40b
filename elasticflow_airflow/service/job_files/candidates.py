"""Has the engine verify, copy and delete candidate checkpoints, in threads of its own.

Verifying reads every byte, which may take seconds: the loop asks, continues, and collects the result in a later pass.
Which checkpoint to use is decided by ``checkpoint_promotion.py`` and ``resuming.py``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import structlog

from elasticflow_airflow.bounds import count_problem
from elasticflow_airflow.engines.job_files import CANDIDATE_PATH, JobFiles
from elasticflow_airflow.runtime.stores.manifest import CandidateInfo, CheckpointError, CheckpointUnreachable

log = structlog.get_logger()

_TRIES = 9
_LONGEST_REST_S = 60.0


@dataclass(frozen=True, slots=True)
class Verified:
    """The result of verifying one candidate. ``problem`` is None if it is intact."""

    path: str
    generation: int
    step: int
    digest: str
    problem: str | None


@dataclass(frozen=True, slots=True)
class Adopted:
    """The result of a copy: either ``info``, or a ``problem``, which is temporary if ``again`` is True."""

    info: CandidateInfo | None
    problem: str = ""
    again: bool = False


@dataclass(frozen=True, slots=True)
class Looked:
    """The outcome of one task: a candidate or a whole generation verified, a copy, or a deletion."""

    job_id: str
    incarnation: int
    generation: int | None
    """The generation that was verified as a whole; None for other tasks."""
    verified: tuple[Verified, ...] = ()
    deleted: tuple[str, ...] = ()
    adopted: Adopted | None = None


@dataclass(slots=True)
class _Failures:
    """How often a task has failed, and when it may be retried, in monotonic seconds of this process."""

    count: int = 0
    again_s: float = 0.0


class CandidateService:
    """Runs one task at a time, and one copy in parallel. Asking for a task in progress has no effect.

    A read that fails is retried with growing delays for about four minutes; then the candidate counts as unreadable. A
    copy that fails is retried for as long as it is asked for: the checkpoint holds all progress of the training.
    """

    def __init__(self, files: JobFiles, when_done: Callable[[], None]) -> None:
        self._files = files
        self._when_done = when_done
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._copies = ThreadPoolExecutor(1, thread_name_prefix="checkpoint copies")
        self._under_way: dict[tuple[object, ...], Future[Looked]] = {}
        self._failed: dict[tuple[object, ...], _Failures] = {}

    def ask_candidate(self, job_id: str, incarnation: int, path: str) -> None:
        """Verify one candidate of a running generation."""

        def task(patient: bool) -> Looked:
            verified = look(self._files, job_id, incarnation, path, patient=patient)
            return Looked(job_id, incarnation, None, verified=(verified,))

        self._ask(("candidate", job_id, incarnation, path), task)

    def ask_generation(self, job_id: str, incarnation: int, generation: int, known: frozenset[str]) -> None:
        """Verify every candidate of an ended generation that is not in ``known``, whether it was reported or not."""

        def task(patient: bool) -> Looked:
            found = [path for path in self._files.candidates(job_id, incarnation, generation) if path not in known]
            verified = tuple(look(self._files, job_id, incarnation, path, patient=patient) for path in found)
            return Looked(job_id, incarnation, generation, verified=verified)

        self._ask(("generation", job_id, generation), task)

    def ask_adopt(self, job_id: str, incarnation: int, earlier: int, path: str) -> None:
        """Copy a checkpoint of an ``earlier`` incarnation, for this incarnation to start from."""

        def task(_patient: bool) -> Looked:
            return Looked(job_id, incarnation, None, adopted=take_over(self._files, job_id, incarnation, earlier, path))

        self._ask(("adopt", job_id, incarnation), task, self._copies)

    def ask_delete(self, job_id: str, incarnation: int, path: str) -> None:
        """Delete one candidate."""

        def task(_patient: bool) -> Looked:
            self._files.delete(job_id, incarnation, path)
            return Looked(job_id, incarnation, None, deleted=(path,))

        self._ask(("delete", job_id, incarnation, path), task)

    def collect(self) -> list[Looked]:
        """Return the outcomes of all finished tasks. Call :meth:`settled` once they are stored.

        A failed task (a folder that cannot be read or removed) is logged; a later pass asks for it again.
        """
        looked = []
        for key, future in list(self._under_way.items()):
            if not future.done():
                continue
            error = future.exception()
            if error is None:
                one = future.result()
                looked.append(one)
                if one.adopted is not None and one.adopted.again:
                    self._rest(key)
                else:
                    self._failed.pop(key, None)
            else:
                log.warning("a checkpoint folder could not be looked at", what=key, error=repr(error))
                del self._under_way[key]
                self._rest(key)
        return looked

    def _rest(self, key: tuple[object, ...]) -> None:
        """Delay the retry of a failed task; the loop is woken after the delay, to ask again."""
        failures = self._failed.setdefault(key, _Failures())
        rest_s = min(_LONGEST_REST_S, 2.0**failures.count)
        failures.count += 1
        failures.again_s = time.monotonic() + rest_s
        timer = threading.Timer(rest_s, self._when_done)
        timer.daemon = True
        timer.start()

    def settled(self, looked: Sequence[Looked]) -> None:
        """Forget tasks whose outcome is stored."""
        self._under_way = {
            key: future
            for key, future in self._under_way.items()
            if not (future.done() and any(future.result() is one for one in looked))
        }

    def wait(self) -> bool:
        """Wait until all tasks are done; returns False if there were none."""
        wait(list(self._under_way.values()))
        return bool(self._under_way)

    def close(self) -> None:
        """Finish the running tasks, and drop the others (they are asked for again after a restart)."""
        for pool in (self._pool, self._copies):
            pool.shutdown(wait=True, cancel_futures=True)

    def _ask(
        self, key: tuple[object, ...], task: Callable[[bool], Looked], pool: ThreadPoolExecutor | None = None
    ) -> None:
        failures = self._failed.get(key, _Failures())
        if key in self._under_way or time.monotonic() < failures.again_s:
            return
        future = (pool or self._pool).submit(task, failures.count < _TRIES)
        self._under_way[key] = future
        future.add_done_callback(lambda _: self._when_done())


def look(files: JobFiles, job_id: str, incarnation: int, path: str, *, patient: bool) -> Verified:
    """Verify one candidate by its relative path. Raises CheckpointUnreachable only if ``patient``."""
    match = CANDIDATE_PATH.match(path)
    if match is None:
        return Verified(path, 0, 0, "", "its path is not that of a candidate")
    generation, step = int(match[1]), int(match[2])
    problem = count_problem(step)
    if problem is not None:
        return Verified(path, generation, 0, "", f"its step {problem}")
    try:
        return Verified(path, generation, step, files.verify(job_id, incarnation, path), None)
    except CheckpointUnreachable as error:
        if patient:
            raise
        return Verified(path, generation, step, "", f"it could not be read, again and again: {error.__cause__!r}")
    except (OSError, ValueError, KeyError) as error:
        return Verified(path, generation, step, "", f"it is damaged: {error}")


def take_over(files: JobFiles, job_id: str, incarnation: int, earlier: int, path: str) -> Adopted:
    """Copy a checkpoint into another incarnation's folder."""
    try:
        return Adopted(files.adopt(job_id, incarnation, earlier, path))
    except CheckpointUnreachable as error:
        return Adopted(None, str(error), again=True)
    except CheckpointError as error:
        return Adopted(None, str(error))
