"""What a result says, and how it shows."""

from __future__ import annotations

import pytest

from elasticflow_airflow.api import Event, JobIdentity, JobResult, JobStatus, State, Verdict
from elasticflow_airflow.testing import ByTask, DagResult, JobOutcome, TaskOutcome


def job(state: State = State.SUCCEEDED, **changes) -> JobOutcome:
    identity = JobIdentity(dag_id="daily", run_id="run1", task_id="train")
    values = {
        "job_id": identity.job_id,
        "identity": identity,
        "incarnation": 1,
        "generation": 2,
        "state": state,
        "verdict": Verdict(decision="admitted", reason="fits"),
        "claim": 1,
        "submitted_at": 1000.0,
        "deadline_at": 4600.0,
        "best_effort": False,
        "value": 1.0,
        "step": 100,
        "total_steps": 100,
        "slack_s": 60.0,
        "result": JobResult(met=True, slack_s=60.0, finished_at=4540.0, metrics={"f1": 0.5}, checkpoint_path="/c"),
    }
    events = [
        Event(event_id=1, job_id=identity.job_id, at=1000.0, kind="admitted", reason="fits"),
        Event(event_id=2, job_id=identity.job_id, at=1008.0, kind="started", reason="two", data={"workers": 2}),
        Event(event_id=3, job_id=identity.job_id, at=1500.0, kind="rescaled", reason="grew", data={"workers": 4}),
    ]
    return JobOutcome(JobStatus(**{**values, **changes}), tuple(events))


def result_of(state: str, outcome: JobOutcome, task: TaskOutcome) -> DagResult:
    tasks, jobs = ByTask("task instance", {task.key: task}), ByTask("job", {task.key: outcome})
    return DagResult(dag_id="daily", run_id="run1", state=state, tasks=tasks, jobs=jobs)


def test_a_job_answers_what_assertions_ask():
    one = job()
    assert (one.verdict, one.reason, one.met, one.slack_s) == ("admitted", "fits", True, 60.0)
    assert one.sizes == (2, 4)
    assert one.metrics == {"f1": 0.5}
    assert one.checkpoint_path == "/c"
    assert (one.deadline - one.finished).total_seconds() == 60
    assert one.kinds() == ["admitted", "started", "rescaled"]
    assert one.summary() == "admitted, succeeded at step 100 of 100, workers 2 → 4, 1 min before its deadline"


def test_a_good_run_is_short():
    task = TaskOutcome(task_id="train", map_index=-1, state="success", tries=1)
    assert repr(result_of("success", job(), task)).splitlines() == [
        "daily · run1: success",
        "  train  success",
        "         job: admitted, succeeded at step 100 of 100, workers 2 → 4, 1 min before its deadline",
    ]


def test_a_bad_run_tells_its_story():
    task = TaskOutcome(task_id="train", map_index=3, state="failed", tries=2, error="JobFailed: it broke")
    text = repr(result_of("failed", job(State.FAILED, result=None, step=40), task))
    assert "train[3]  failed, 2 tries" in text
    assert "JobFailed: it broke" in text
    assert "8.0 s  started: two" in text


def test_who_asks_for_what_is_not_there_hears_what_is():
    with pytest.raises(KeyError, match="no job of task 'trian'; there are: train, other"):
        ByTask("job", {"train": 1, "other": 2})["trian"]
    assert ByTask("job", {"train": 1}).get("trian") is None
