"""Whose fault it is when a pass of the loop fails: jobs that the service cannot handle, told from trouble of its own.

A fault in what is done for one job is noted as that job's where it happens (``PassContext.on_behalf_of``). One in what
is done for all of them together, planning, is attributed by leaving jobs out until it works. Knows no rows.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_MANY = 10
"""So many jobs, and half of all, on which the very same line fails: then the line is at fault."""
_PATIENCE_S = 30.0
"""So long such a fault is tried again before the others count for more. What the system refuses, a full disk, passes:
it is tried again for ever."""
_MESSAGE_CHARACTERS = 500


class SchedulerFaultError(Exception):
    """The scheduler failed on an event (None: on taking over the jobs that live). ``__cause__`` says how."""

    def __init__(self, event: object | None) -> None:
        super().__init__(f"the scheduler failed on {'taking over the jobs' if event is None else type(event).__name__}")


class ServiceFaultError(Exception):
    """A fault that is no job's, or that hits so many jobs at once that it is the service's."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong with a job: while doing what, how, in which line of the code, and whether the system said so."""

    doing: str
    message: str
    where: str
    of_the_system: bool = False

    @classmethod
    def of(cls, doing: str, error: BaseException) -> Fault:
        """A fault out of what was raised."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        said = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        plain = said.encode("ascii", "backslashreplace").decode()
        readable = "".join(letter if letter.isprintable() else " " for letter in plain)
        return cls(doing, readable[:_MESSAGE_CHARACTERS], where, isinstance(error, OSError))

    def __str__(self) -> str:
        return f"the service failed while {self.doing}: {self.message}"


@dataclass(slots=True)
class Faults:
    """The jobs that this process fails on. A new process knows of none, and tries them all again."""

    aside: dict[str, Fault] = field(default_factory=dict)
    """Jobs that are set aside, by id."""
    new: dict[str, Fault] = field(default_factory=dict)
    """Jobs that the pass under way failed on."""
    _many_since_s: dict[str, float] = field(default_factory=dict)
    """Lines that fail on many jobs, and since when."""

    def __contains__(self, job_id: str) -> bool:
        return job_id in self.aside or job_id in self.new

    def note(self, job_id: str, doing: str, error: BaseException) -> None:
        """The pass under way failed on a job; the first fault counts."""
        self.new.setdefault(job_id, Fault.of(doing, error))

    def set_aside(self, jobs: int, monotonic_s: float) -> list[str]:
        """Set those aside that the last pass failed on, of so many jobs that it looked at; returns them.

        Raises ServiceFaultError, and sets nobody aside, when the same line failed on many jobs, and not for long yet:
        what is wrong with every task of a large DAG must not stop all others for good, nor the cancels of its own.
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

    def nothing_failed(self) -> None:
        """A pass went well: what fails on many jobs from now on is tried again before anybody is set aside."""
        self._many_since_s.clear()

    def lift(self, job_id: str) -> None:
        """A job is over, and with it what was wrong with it."""
        self.aside.pop(job_id, None)


def find_culprits(job_ids: Sequence[str], works: Callable[[Sequence[str]], bool]) -> list[str]:
    """The jobs that have to be left out for something to work that is done for all of them together.

    ``works`` tries it with some of the jobs, in their order. Of jobs that fail only together, the last is left out.
    Takes some log2(n) tries for each that is found. Empty when it works with all of them, or fails without any.
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
