"""The 200 published job sets: whatever the paper's Algorithm 1 can plan, ours admits; more only with a proof."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.model.decisions import Admit, Reject
from elasticflow_airflow.scheduler_core.model.events import JobSubmitted
from elasticflow_airflow.scheduler_core.model.values import Job, Node, ScalingCurve

Curves = dict[tuple[str, int], dict[int, float]]


def _submit_all(case: dict, curves: Curves) -> tuple[dict[str, Job], dict[str, Admit | Reject], Scheduler]:
    now = float(case["now"])
    scheduler = Scheduler(nodes=[Node(node_id=f"n{i:02}", slots=8) for i in range(case["num_gpu"] // 8)])
    jobs, verdicts = {}, {}
    by_index = {entry["idx"]: entry for entry in case["jobs"]}
    for index in case["edf_order"]:
        entry = by_index[index]
        job = Job(
            job_id=str(index),
            submitted_s=now,
            deadline_s=float(entry["ddl"]),
            total_steps=float(entry["iter_left"]),
            curve=ScalingCurve(curves[entry["model"], entry["batch"]]),
            max_workers=entry["max_gpu"],
        )
        jobs[job.job_id] = job
        decisions = scheduler.handle(JobSubmitted(job), now)
        verdicts[job.job_id] = next(d for d in decisions if isinstance(d, Admit | Reject))
    return jobs, verdicts, scheduler


@pytest.mark.parametrize("batch", range(8))
def test_feasible_sets_are_admitted_and_every_admission_is_proven(
    batch: int, data_dir: Path, a100_curves: Curves, plan_checker: ModuleType
) -> None:
    cases = json.loads((data_dir / "golden" / "admission_cases.json").read_text())
    assert len(cases) == 200
    for case in cases[batch::8]:
        jobs, verdicts, scheduler = _submit_all(case, a100_curves)
        refused = [i for i, verdict in verdicts.items() if isinstance(verdict, Reject)]
        if case["all_feasible"]:
            assert not refused, f"case {case['case']}: {verdicts[refused[0]]}"
        plans = {}
        for job_id, verdict in verdicts.items():
            if isinstance(verdict, Admit):
                plan = scheduler.plan_of(job_id)
                assert plan is not None
                plans[job_id] = (jobs[job_id], plan)
        problems = plan_checker.check_joint(plans, [8] * (case["num_gpu"] // 8), float(case["now"]))
        assert not problems, f"case {case['case']}: {problems}"
