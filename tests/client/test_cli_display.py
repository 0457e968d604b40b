"""What the command line shows of a target loss and of slots that are avoided."""

from __future__ import annotations

import pytest

from elasticflow_airflow.api import Health, JobIdentity, JobStatus, SlotStatus, Verdict
from elasticflow_airflow.cli.terminal.display import health_lines, job_lines
from elasticflow_airflow.times import local_moment


def status(**given):
    values = {
        "job_id": "j",
        "identity": JobIdentity(dag_id="d", run_id="r", task_id="t"),
        "incarnation": 1,
        "generation": 1,
        "state": "running",
        "verdict": Verdict(decision="best_effort"),
        "claim": 1,
        "submitted_at": 0.0,
        "deadline_at": None,
        "best_effort": True,
        "value": 1.0,
        "total_steps": 2000,
    }
    return JobStatus(**{**values, **given})


@pytest.mark.parametrize(
    ("known", "line"),
    [
        ({"smoothed_loss": 1.2}, "loss 0.35, smoothed loss 1.2: not foreseeable yet, at most 2000 steps"),
        (
            {"smoothed_loss": 0.5, "expected_steps": 812, "expected_steps_at_most": 950},
            "loss 0.35, smoothed loss 0.5: expected at step 812, with its error 950, at most 2000",
        ),
        ({"smoothed_loss": 0.349, "target_reached": True}, "loss 0.35, smoothed loss 0.349: reached"),
        ({"smoothed_loss": 0.41, "target_reached": False}, "loss 0.35, smoothed loss 0.41: not reached"),
    ],
)
def test_a_job_with_a_target_says_how_it_stands(known, line):
    assert f"target      {line}" in job_lines(status(target_loss=0.35, **known))


def test_a_job_without_a_target_says_nothing_of_it():
    assert not [line for line in job_lines(status()) if line.startswith("target")]


@pytest.mark.parametrize(
    ("known", "shares", "seed"),
    [
        ({"logical_workers": 8, "seed": 0}, "8 logical workers", "0"),
        ({"logical_workers": 4}, "4 logical workers", "not known yet"),
        ({"consistency": "fast", "seed": 7}, "one for each worker (consistency fast)", "7"),
    ],
)
def test_what_decides_on_the_weights_has_fields_of_its_own(known, shares, seed):
    lines = job_lines(status(**known))
    assert f"shares      {shares}" in lines
    assert f"seed        {seed}" in lines


def test_an_avoided_slot_says_until_when():
    health = Health(
        status="ok",
        version="1",
        engine="fake",
        pid=1,
        started_at=0.0,
        state_dir="s",
        live_jobs=0,
        slots=[SlotStatus(node_id="n", index=0), SlotStatus(node_id="n", index=1, avoided_until=700.0)],
    )
    assert health_lines(health)[2:] == [
        "  n:0  free",
        f"  n:1  free; avoided until {local_moment(700.0)}: a worker was slow",
    ]
