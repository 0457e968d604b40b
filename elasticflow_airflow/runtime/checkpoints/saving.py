"""Decides when a session saves, without blocking it. May import torch and the standard library only."""

from __future__ import annotations

import contextlib
import fcntl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered, contents_of
from elasticflow_airflow.runtime.checkpoints.checkpointer import Checkpointer, Saved
from elasticflow_airflow.runtime.checkpoints.interval import SaveInterval
from elasticflow_airflow.runtime.checkpoints.state_copy import size_of
from elasticflow_airflow.runtime.protocol import candidate_name
from elasticflow_airflow.runtime.stores.manifest import MANIFEST, CheckpointError
from elasticflow_airflow.runtime.stores.store import Part

PARTS_LIMIT_S = 10.0
"""How long an urgent save waits for the parts of an earlier one: a worker may have died before writing its part."""
END_LIMIT_S = 30.0
"""How long an exiting process waits for its writes in progress."""
TURN_LIMIT_S = 60.0
"""How long a survivor waits for another one that is saving and that may itself be stopped."""
_TURN_POLL_S = 0.05
_PREPARED_AT = 0.5
"""Fraction of the first interval after which memory and writer are prepared; shorter runs need neither."""


class Saver:
    """Saves one session's state every ``interval`` seconds, or at the best interval. Zero: every step, synchronously.

    ``promotes`` and ``keep``: see Checkpointer. Nothing is started before it is needed. Only one worker saves, unless
    rank 0 decides that each worker writes a part (``Part``).
    """

    def __init__(
        self, where: str | Path, *, incarnation: int, promotes: bool, keep: int, interval: float | SaveInterval
    ) -> None:
        self._where, self._incarnation, self._promotes, self._keep = where, incarnation, promotes, keep
        self._interval = interval
        self._checkpointer: Checkpointer | None = None
        self._parts = 0
        self._began_s = self._saved_at_s = time.monotonic()

    @property
    def trained_s(self) -> float:
        """How long this job has trained, in this process and in the earlier processes that it continues."""
        return time.monotonic() - self._began_s

    def carry_on(self, trained_s: float) -> None:
        """Continue counting from the time trained so far, since failures are also counted from the job's start."""
        self._began_s = time.monotonic() - trained_s

    @property
    def interval_s(self) -> float:
        """Seconds from one save to the next."""
        return self._interval.seconds if isinstance(self._interval, SaveInterval) else self._interval

    @property
    def is_due(self) -> bool:
        """Whether the next save is due."""
        return time.monotonic() - self._saved_at_s >= self.interval_s

    def restart_clock(self) -> None:
        """Restart the interval now, after any worker's save, or after the state was received or loaded."""
        self._saved_at_s = time.monotonic()

    def expect(self, registered: Registered) -> None:
        """Estimate the cost of a save from the size of the state, once the optimizer has one."""
        if isinstance(self._interval, SaveInterval):
            with contextlib.suppress(CheckpointError):  # The save itself reports it.
                self._interval.expect(size_of(contents_of(registered)))

    def step_done(self, registered: Registered) -> None:
        """Prepare memory and writer ahead of time, in the background; the optimizer has a state by now."""
        if self._checkpointer is not None or self.interval_s == 0:
            return
        if self._is_time_to_prepare:
            self._open().prepare(registered)

    @property
    def can_write_parts(self) -> bool:
        """Whether saves are written in the background, as far as known: training must not wait for another's part."""
        return self.interval_s != 0 and (self._checkpointer is None or self._checkpointer.in_background)

    def must_prepare_parts(self, count: int) -> bool:
        """Whether it is time for each of ``count`` workers to prepare memory and writer for its part."""
        return self._parts != count and self._is_time_to_prepare

    def prepare_part(self, registered: Registered, part: Part) -> None:
        """Prepare memory and writer for this worker's part, in the background."""
        self._parts = part.size
        self._open().prepare(registered, part=part)

    @property
    def is_due_in_parts(self) -> bool:
        """Whether the next save is due and this worker's writer can start at once.

        A worker that waited for its writer might wait for a part of a worker that is gone.
        """
        return self.is_due and self._parts > 0 and self._checkpointer is not None and self._checkpointer.is_idle

    def end_parts(self, limit_s: float) -> list[Saved]:
        """Wait up to ``limit_s`` seconds for a save in parts, before an urgent save; then abandon it."""
        if not self._parts or self._checkpointer is None or not self._checkpointer.is_busy:
            return []
        saved = []
        with contextlib.suppress(CheckpointError):  # It no longer matters once the newer save is on disk.
            saved = self._checkpointer.flush(limit_s)
        if self._checkpointer.is_busy:
            self._checkpointer.drop()
            self.close()
        return saved

    @property
    def _is_time_to_prepare(self) -> bool:
        return time.monotonic() - self._saved_at_s >= _PREPARED_AT * self.interval_s

    def save(
        self,
        registered: Registered,
        *,
        generation: int,
        step: int,
        metadata: Mapping[str, Any],
        wait: bool,
        part: Part | None = None,
    ) -> Saved | None:
        """Save now; with ``wait`` the save is on disk when this returns. See Checkpointer. Raises CheckpointError."""
        self.restart_clock()
        saved = self._open().save(
            registered,
            generation=generation,
            step=step,
            metadata=metadata,
            wait=wait or self.interval_s == 0,
            part=part,
        )
        if saved is not None:
            self._learn(saved)
        return saved

    def poll(self) -> list[Saved]:
        """Return the saves that reached the disk since the last call. Raises CheckpointError if a write has failed."""
        saved = [] if self._checkpointer is None else self._checkpointer.poll()
        for one in saved:
            self._learn(one)
        return saved

    def take_warnings(self) -> list[str]:
        """Return what to tell of saves that were lost with their writer; the next step saves again."""
        warnings = [] if self._checkpointer is None else self._checkpointer.take_warnings()
        if warnings:
            self._saved_at_s = time.monotonic() - self.interval_s
        return warnings

    def flush(self) -> list[Saved]:
        """Wait up to END_LIMIT_S for the writes in progress. Raises CheckpointError if a write has failed."""
        return [] if self._checkpointer is None else self._checkpointer.flush(END_LIMIT_S)

    def drop(self) -> None:
        """Abandon the writes in progress, because their generation has ended."""
        if self._checkpointer is not None:
            if self._checkpointer.is_busy:
                self._saved_at_s = time.monotonic() - self.interval_s  # the next step saves
            self._checkpointer.drop()
            if self._parts:
                # Part sizes depend on the number of workers. In a thread: ``close`` waits for a writer that may hang.
                threading.Thread(target=self._checkpointer.close, name="elasticflow-parts-closed").start()
                self._checkpointer, self._parts = None, 0

    def close(self) -> None:
        """Release writer and memory."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
            self._parts = 0

    def _open(self) -> Checkpointer:
        if self._checkpointer is None:
            self._checkpointer = Checkpointer(
                self._where, incarnation=self._incarnation, promotes=self._promotes, keep=self._keep
            )
        return self._checkpointer

    def _learn(self, saved: Saved) -> None:
        if isinstance(self._interval, SaveInterval):
            self._interval.trained_s = self.trained_s
            self._interval.saved(stall_s=saved.stall_s, write_s=saved.write_s)


@contextmanager
def turn_of_survivors(checkpoints: Path, generation: int, step: int) -> Iterator[bool]:
    """Let survivors save one at a time; yields whether this one still needs to save its ``step``.

    Survivors cannot communicate, and each save removes unfinished saves of others. The lock is released if its holder
    dies.
    """
    folder = (checkpoints / candidate_name(generation, step)).parent
    folder.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + TURN_LIMIT_S
    with (checkpoints / "survivors.lock").open("w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    yield False
                    return
                time.sleep(_TURN_POLL_S)
        done = [manifest.parent.name for manifest in folder.glob(f"step-*/{MANIFEST}")]
        yield all(name < Path(candidate_name(generation, step)).name for name in done)
