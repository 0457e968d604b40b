"""Values that client tests need, and a service made of a function."""

from __future__ import annotations

import time
from typing import Any

import pytest

from elasticflow_airflow.api import Attachment, Command, JobIdentity, JobStatus, JobSubmission, Length, State, Verdict

IDENTITY = JobIdentity(dag_id="daily", run_id="run1", task_id="train")


@pytest.fixture
def make_status():
    def make(state: State = State.RUNNING, **changes: Any) -> JobStatus:
        values: dict[str, Any] = {
            "job_id": IDENTITY.job_id,
            "identity": IDENTITY,
            "incarnation": 1,
            "generation": 1,
            "state": state,
            "verdict": Verdict(decision="admitted"),
            "claim": 1,
            "submitted_at": time.time(),
            "deadline_at": time.time() + 3600,
            "best_effort": False,
            "value": 1.0,
        }
        return JobStatus(**{**values, **changes})

    return make


@pytest.fixture
def attachment(make_status):
    return Attachment(job=make_status(), claim=3, created=True)


@pytest.fixture
def submission():
    return JobSubmission(
        identity=IDENTITY,
        command=Command(snapshot="0" * 64, script="train.py"),
        length=Length(steps=10),
        global_batch_size=8,
        best_effort=True,
        secret_env={"TOKEN": "hunter2"},
    )
