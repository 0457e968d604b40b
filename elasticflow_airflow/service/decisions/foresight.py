"""The scheduler's plan as plain values: which jobs hold slots until when, and for which runs room is kept.

Reads a scheduler at the end of a pass of the loop; changes nothing. Pure functions over values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.model.recurring_work import ExpectedRun
from elasticflow_airflow.scheduler_core.model.values import JobState, Reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class Foresight:
    """The stored plan of all live jobs. ``slots`` is the number usable now; times are UTC seconds."""

    states: Mapping[str, JobState]
    planned: Mapping[str, tuple[Reservation, ...]]
    """By job id, in order of time."""
    expected: tuple[tuple[ExpectedRun, tuple[Reservation, ...]], ...]
    slots: int

    def holds(self, job_id: str) -> int:
        """Return how many slots the scheduler gives a job now."""
        state = self.states.get(job_id)
        return 0 if state is None else state.placement.workers

    def between(self, job_id: str, from_s: float, until_s: float) -> int:
        """Return the most slots that a job holds at any moment between two times, according to the plan."""
        held = [one.placement.workers for one in self.planned.get(job_id, ()) if overlaps(one, from_s, until_s)]
        return max(held, default=0)


def overlaps(one: Reservation, from_s: float, until_s: float) -> bool:
    """Return whether slots are held at some moment between two times."""
    return one.start_s < until_s and one.end_s > from_s


def foresight_of(scheduler: Scheduler, states: Mapping[str, JobState]) -> Foresight:
    """Read the plan of a scheduler; ``states`` are the states of its jobs, by id."""
    return Foresight(
        states=dict(states),
        planned={job_id: state.reserved for job_id, state in states.items()},
        expected=scheduler.kept_free(),
        slots=sum(node.slots - len(node.busy) for node in scheduler.nodes()),
    )
