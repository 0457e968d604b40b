"""Attributes failures of a pass: to jobs that the service cannot handle, or to the service itself.

A failure in work for one job is recorded as that job's where it happens (``PassContext.on_behalf_of``). A failure in
work for all jobs together, planning, is attributed by leaving jobs out until it succeeds. Knows no rows.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

_MANY = 10
"""If the same line fails on this many jobs, and on half of all, the line is at fault."""
_PATIENCE_S = 30.0
"""Seconds for which such a fault is retried before its jobs are set aside, so that the others go on. Errors of the
system (a full disk) are temporary and are retried for ever."""
_MESSAGE_CHARACTERS = 500
_FAILED = "the service failed while "


class SchedulerFaultError(Exception):
    """The scheduler failed on an event (None: on restoring the live jobs). ``__cause__`` is the original error."""

    def __init__(self, event: object | None) -> None:
        super().__init__(f"the scheduler failed on {'taking over the jobs' if event is None else type(event).__name__}")


class ServiceFaultError(Exception):
    """A fault of the service: it belongs to no job, or hits too many jobs at once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure on a job: what was being done, the message, the line of code, and whether it is a system error."""

    doing: str
    message: str
    where: str
    of_the_system: bool = False

    @classmethod
    def of(cls, doing: str, error: BaseException) -> Fault:
        """Build a fault from an exception."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        plain = said.encode("ascii", "backslashreplace").decode()
        readable = "".join(letter if letter.isprintable() else " " for letter in plain)
        return cls(doing, readable[:_MESSAGE_CHARACTERS], where, isinstance(error, OSError))

    @classmethod
    def of_before(cls, reason: str) -> Fault:
        """Build the fault that an earlier process stored as this text."""
        doing, _, message = reason.removeprefix(_FAILED).partition(": ")
        return cls(doing, message, "")

    def __str__(self) -> str:
        return f"{_FAILED}{self.doing}" + (f": {self.message}" if self.message else "")


@dataclass(slots=True)
class Faults:
    """The jobs on which this process fails, and those on which the one before failed, until they are tried again."""

    aside: dict[str, Fault] = field(default_factory=dict)
    """Jobs that are set aside, by id."""
    inherited: set[str] = field(default_factory=set)
    """Jobs among them that this process has not tried yet."""
    new: dict[str, Fault] = field(default_factory=dict)
    """Jobs on which the current pass failed."""
    _many_since_s: dict[str, float] = field(default_factory=dict)
    """Lines that fail on many jobs, and since when (monotonic seconds)."""

    def __contains__(self, job_id: str) -> bool:
        return job_id in self.aside or job_id in self.new

    def note(self, job_id: str, doing: str, error: BaseException) -> None:
        """Record that the current pass failed on a job; the first fault counts."""
        self.new.setdefault(job_id, Fault.of(doing, error))

    def set_aside(self, jobs: int, monotonic_s: float) -> list[str]:
        """Set aside the jobs on which the last pass failed, of ``jobs`` in total; return their ids.

        Raises ServiceFaultError, and sets no job aside, if the same line failed on many jobs, and not for long yet. A
        fault in every task of a large DAG must not block all other jobs for good, nor the cancels of its own.
        """
        new, self.new = self.new, {}
        by_line: dict[str, list[str]] = {}
        for job_id, fault in new.items():
            by_line.setdefault(fault.where, []).append(job_id)
        many = {line: ids for line, ids in by_line.items() if len(ids) >= _MANY and 2 * len(ids) >= jobs}
        self._many_since_s = {line: self._many_since_s.get(line, monotonic_s) for line in many}
        for line, job_ids in many.items():
            fault = new[job_ids[0]]
            if fault.of_the_system or monotonic_s - self._many_since_s[line] < _PATIENCE_S:
                raise ServiceFaultError(f"{fault} (so it does with {len(job_ids)} of {jobs} jobs)")
        self.aside |= new
        return list(new)

    def inherit(self, reasons: Mapping[str, str]) -> None:
        """Leave out the jobs that an earlier process set aside, for these reasons, until :meth:`try_again`."""
        self.aside |= {job_id: Fault.of_before(reason) for job_id, reason in reasons.items()}
        self.inherited |= reasons.keys()

    def try_again(self) -> bool:
        """Take those jobs in again; return whether there were any."""
        for job_id in self.inherited:
            self.aside.pop(job_id, None)
        found = bool(self.inherited)
        self.inherited.clear()
        return found

    def nothing_failed(self) -> None:
        """Note that a pass succeeded: later failures on many jobs are retried again before any job is set aside."""
        self._many_since_s.clear()

    def lift(self, job_id: str) -> None:
        """Drop the fault of a job that is over."""
        self.aside.pop(job_id, None)
        self.inherited.discard(job_id)


def find_culprits(job_ids: Sequence[str], works: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return the jobs that must be left out for an operation on all jobs together to succeed.

    ``works`` tries the operation with some of the jobs, in their order. Of jobs that fail only together, the last is
    left out. Takes about log2(n) tries for each job found. Empty if it works with all jobs, or fails without any.
    """
    rest = list(job_ids)
    found: list[str] = []
    if works(rest) or not works([]):
        return []
    while True:
        good, bad = 0, len(rest)  # it works with the first ``good`` of the rest, and fails with the first ``bad``
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if works(rest[:middle]) else (good, middle)
        found.append(rest.pop(bad - 1))
        if works(rest):
            return found
