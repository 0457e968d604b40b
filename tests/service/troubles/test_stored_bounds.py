"""Rows that an older version took in, out of bounds: they are read, and told apart."""

from __future__ import annotations

import re

import pytest

from elasticflow_airflow.service.store.documents.submission import StoredSubmission
from elasticflow_airflow.service.store.stored_bounds import (
    amendment_out_of_bounds,
    course_out_of_bounds,
    submission_out_of_bounds,
    until_out_of_bounds,
)
from elasticflow_airflow.service.store.tables import AmendmentRow

MILLISECONDS = 1_800_000_000_000.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"deadline_at": MILLISECONDS}, "deadline_at: 1800000000000 .* look like milliseconds: divide them by 1000"),
        ({"next_run_at": MILLISECONDS}, "next_run_at"),
        ({"length": {"steps": 10**19, "epochs": None, "samples": None}}, "length.steps: .* at most 2147483647"),
        ({"length": {"steps": None, "epochs": 10**6, "samples": 10**12}}, "epochs=1000000 of samples="),
        ({"max_workers": 2**62}, "max_workers"),
        ({"init_from": "/" + "x" * 300}, "init_from: .* component of 300 bytes"),
        ({"lease_s": float("inf")}, "lease_s"),
        ({"identity": {"dag_id": "a\0", "run_id": "r", "task_id": "t"}}, "identity.dag_id"),
    ],
)
def test_a_stored_submission_out_of_bounds_is_told_by_field_limit_and_remedy(world, changes, named):
    stored = world.submission(within=600).model_dump(mode="json", exclude={"secret_env"})
    assert submission_out_of_bounds(StoredSubmission.as_stored(stored)) is None
    problem = submission_out_of_bounds(StoredSubmission.as_stored({**stored, **changes}))
    assert problem is not None
    assert re.search(named, problem)


def test_a_rule_that_is_no_bound_gives_no_stored_job_up(world):
    """A deadline that was amended to a later one than ``latest_deadline_at``, and what another version knows."""
    stored = world.submission(within=600).model_dump(mode="json", exclude={"secret_env"})
    later = {"on_reject": "renegotiate", "latest_deadline_at": stored["deadline_at"] - 5}
    other = {**stored, **later, "of_another_version": 1, "on_miss": "unheard of"}
    assert submission_out_of_bounds(StoredSubmission.as_stored(other)) is None


def test_what_a_job_became_is_looked_at_too(world):
    job = world.submit(within=600, scaling_curve={1: 10.0})
    row = world.row(job)
    assert submission_out_of_bounds(row.submission) is None
    assert course_out_of_bounds(row) is None
    row.step = 10**30
    assert course_out_of_bounds(row).startswith("step: about 1e30 must be at most")


def test_amendments_and_drains():
    fine = AmendmentRow(job_id="a", incarnation=1, deadline_at=None, value=2.0, best_effort=False)
    late = AmendmentRow(job_id="a", incarnation=1, deadline_at=MILLISECONDS, value=None, best_effort=False)
    assert amendment_out_of_bounds(fine) is None
    assert "deadline_at" in amendment_out_of_bounds(late)
    assert until_out_of_bounds(1.8e9) is None
    assert "milliseconds" in until_out_of_bounds(MILLISECONDS)
