"""What is stored of a job of which a test only wants that it is there."""

from __future__ import annotations

from typing import Any

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.service.store.documents.submission import StoredSubmission


def incarnation_columns(identity: JobIdentity) -> dict[str, Any]:
    """Columns of an incarnation that trains ten steps as best effort, but for its key and when it was submitted."""
    submission = JobSubmission(
        identity=identity,
        command=Command(snapshot="0" * 64, script="train.py"),
        length=Length(steps=10),
        global_batch_size=8,
        best_effort=True,
    )
    return {
        "submission": StoredSubmission.of(submission),
        "equality_key": "fade" * 16,
        "lease_s": 60.0,
        "orphan_s": 60.0,
        "deadline_at": None,
        "best_effort": True,
        "value": 1.0,
    }
