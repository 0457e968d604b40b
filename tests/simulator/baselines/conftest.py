"""Shared means of the tests of policies: small jobs with round curves, one simulation, and its independent check."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.schedule_checker import CheckedJob, Report, check

from elasticflow_airflow.scheduler_core.model.values import Job, Node, OnReject, RescaleCosts, ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.outcome import Result, SimulatedOutcome
from elasticflow_airflow.scheduler_core.simulator.outputs.export import write_schedule
from elasticflow_airflow.scheduler_core.simulator.policies import Policy
from elasticflow_airflow.scheduler_core.simulator.prepare import cluster
from elasticflow_airflow.scheduler_core.simulator.run import Change, SimulatedJob, Simulation

LINEAR = {1: 1.0, 2: 2.0, 4: 4.0, 8: 8.0}
"""Twice the workers, twice the steps: what is easy to compute by hand."""


@dataclass
class Played:
    """One simulation: its records by job, and its schedule."""

    result: Result
    changes: list[Change]

    @property
    def jobs(self) -> dict[str, SimulatedOutcome]:
        return {record.job_id: record for record in self.result.records}

    def ends(self) -> dict[str, float | None]:
        """When each job finished."""
        return {job_id: record.finished_s for job_id, record in self.jobs.items()}

    def sizes(self, job_id: str) -> list[tuple[float, int]]:
        """From when on how many slots a job held; the end as 0."""
        return [(c.at_s, len(c.slots)) for c in self.changes if c.job_id == job_id and not c.event]


@pytest.fixture
def nodes() -> Callable[[int, int], tuple[Node, ...]]:
    return cluster


@pytest.fixture
def make() -> Callable[..., Job]:
    """A job: id, steps, and what differs from the plainest one."""

    def make_job(
        job_id: str,
        steps: float,
        *,
        at: float = 0.0,
        deadline: float | None = None,
        asks: int = 1,
        curve: Mapping[int, float] = LINEAR,
        pause: float = 0.0,
        tail: float = 0.0,
        **more: Any,
    ) -> Job:
        costs = RescaleCosts(startup_s=pause, pause_s=pause, tail_s=tail)
        return Job(
            job_id=job_id,
            submitted_s=at,
            deadline_s=deadline,
            total_steps=steps,
            curve=ScalingCurve(curve),
            costs=costs,
            requested_workers=asks,
            on_reject=more.pop("on_reject", OnReject.FAIL),
            **more,
        )

    return make_job


@pytest.fixture
def play(tmp_path: Path) -> Callable[..., Played]:
    """Simulate jobs under a policy; the schedule is checked by arithmetic apart from the simulator."""

    def run(policy: Policy, jobs: Sequence[Job], nodes: Sequence[Node], **options: Any) -> Played:
        changes: list[Change] = []
        simulated = []
        for job in jobs:
            assert job.curve is not None
            simulated.append(SimulatedJob(job=job, truth=dict(job.curve.steps_per_s), arrives_s=job.submitted_s))
        result = Simulation(
            name="test", policy=policy, nodes=nodes, jobs=simulated, on_change=changes.append, **options
        ).run()
        if not options:
            report = checked(changes, jobs, nodes, tmp_path / "schedule.jsonl")
            assert not report.violations, report.violations[:5]
        return Played(result, changes)

    return run


def checked(changes: Sequence[Change], jobs: Sequence[Job], nodes: Sequence[Node], path: Path) -> Report:
    """What the independent checker finds in an exported schedule; all jobs must have the same costs."""
    write_schedule(path, nodes, changes)
    known = {
        job.job_id: CheckedJob(
            job.submitted_s, job.deadline_s, job.total_steps or 0.0, job.curve.steps_per_s if job.curve else {}
        )
        for job in jobs
    }
    costs = {job.costs for job in jobs}
    assert len(costs) == 1
    cost = costs.pop()
    with path.open() as lines:
        listed = [line for line in lines if json.loads(line)]
    return check(listed, known, [node.slots for node in nodes], cost.pause_s, startup_s=cost.startup_s)
