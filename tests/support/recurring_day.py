"""A day of recurring trainings whose speeds are not as told: who is due when, and what became of their promises."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from elasticflow_airflow.api import JobStatus

OWN_SIGMA, RUN_SIGMA = 0.1, 0.03
"""How wrong the curve of a task is at each size, and how much its runs differ besides: sigmas of log-normal factors."""


@dataclass
class Task:
    """One that is due every hour."""

    name: str
    part: float
    """How much of the hour has passed then."""
    steps: int
    told: dict[int, float]
    """Steps/s by workers, as its owner says; ``speeds`` are the true ones."""
    speeds: dict[int, float]

    def within_s(self, chaos: random.Random, other_s: float) -> float:
        """A deadline from tight to easy, where start-up and tail together may take ``other_s``."""
        return (self.steps / max(self.told.values()) + other_s) * chaos.uniform(1.0, 3.0)

    def speeds_of_a_run(self, chaos: random.Random) -> dict[int, float]:
        off = chaos.lognormvariate(0.0, RUN_SIGMA)
        return {size: speed * off for size, speed in self.speeds.items()}


def make_tasks(chaos: random.Random, count: int, told: Mapping[int, float], steps: range) -> list[Task]:
    """So many, each off by an error of its own at each size."""
    return [
        Task(
            name=f"task{number}",
            part=chaos.random(),
            steps=chaos.choice(steps),
            told=dict(told),
            speeds={size: speed * chaos.lognormvariate(0.0, OWN_SIGMA) for size, speed in told.items()},
        )
        for number in range(count)
    ]


def all_due(tasks: Iterable[Task], hours: int) -> list[tuple[float, Task]]:
    """All runs in order, each with the hours until it is due."""
    runs = [(hour + task.part, task) for hour in range(hours) for task in tasks]
    return sorted(runs, key=lambda run: run[0])


@dataclass
class Tally:
    """What became of the runs of a day."""

    counts: Counter[str] = field(default_factory=Counter)
    unannounced: list[str] = field(default_factory=list)
    """Jobs that were late, and had never been said to be at risk."""

    def add(self, job: JobStatus, *, announced: bool) -> None:
        """Count one that has ended; ``announced``: it was said to be at risk."""
        if job.verdict is None or job.verdict.decision != "admitted":
            self.counts["refused"] += 1
            return
        assert job.result is not None, f"{job.job_id} was promised, and ended as {job.state}: {job.state_reason}"
        self.counts["promised"] += 1
        self.counts["kept" if job.result.met else "late"] += 1
        if not job.result.met and not announced:
            self.unannounced.append(job.job_id)

    @property
    def late(self) -> float:
        """The part of the promised that was late."""
        return self.counts["late"] / max(1, self.counts["promised"])
