"""Which jobs need somebody's attention, and which do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from elasticflow_airflow.api import JobIdentity, JobStatus, State, Verdict
from elasticflow_airflow.api.owners import UnownedJob
from elasticflow_airflow.client.attention import RECENT_S, needing_attention

NOW = 1_700_000_000.0


def job(
    task_id: str, state: State = State.RUNNING, *, run_id: str = "run0", ago_s: float = 600.0, **given: Any
) -> JobStatus:
    who = JobIdentity(dag_id="nightly", run_id=run_id, task_id=task_id)
    status = JobStatus(
        job_id=who.job_id,
        identity=who,
        incarnation=1,
        generation=1,
        state=state,
        verdict=Verdict(decision="admitted"),
        claim=1,
        submitted_at=NOW - ago_s,
        deadline_at=NOW + 3600.0,
        best_effort=False,
        value=1.0,
    )
    return status.model_copy(update=given)


def found(
    live: Sequence[JobStatus], ended: Sequence[JobStatus] = (), unowned: Sequence[UnownedJob] = ()
) -> list[tuple[str, str]]:
    return [(one.trouble, one.job.identity.task_id) for one in needing_attention(live, unowned, ended, NOW)]


def test_a_job_that_was_just_rejected_needs_attention_before_it_has_ended() -> None:
    ending = job("train", State.SUBMITTED, verdict=Verdict(decision="rejected", reason="too late"))
    assert found([ending]) == [("rejected", "train")]
    assert found([ending, job("train", run_id="later", ago_s=60.0)]) == []


@pytest.mark.parametrize(
    ("given", "trouble"),
    [
        ({"slack_s": 60.0}, None),
        ({"slack_s": None}, None),
        ({"slack_s": -60.0}, "late"),
        ({"slack_s": -60.0, "at_risk": True}, "late"),
        ({"slack_s": 60.0, "at_risk": True}, "at_risk"),
        ({"at_risk": True}, "at_risk"),
        ({"set_aside": "KeyError"}, "set_aside"),
        ({"state": State.SUCCEEDED, "slack_s": -60.0}, None),
    ],
)
def test_a_live_job_needs_attention_when_its_deadline_is_in_doubt_or_the_service_failed_on_it(
    given: dict[str, Any], trouble: str | None
) -> None:
    assert found([job("train", **given)]) == ([] if trouble is None else [(trouble, "train")])


def test_a_job_without_an_owner_is_named_once_by_what_is_worse() -> None:
    lost = [
        UnownedJob(job=job("a"), since_at=NOW - 90.0, why="nobody has asked for it for 1 min 30 s"),
        UnownedJob(job=job("b"), since_at=NOW - 90.0, why="its task was deleted", owner_gone=True),
    ]
    live = [job("a"), job("b", slack_s=-1.0)]
    assert found(live, [], lost) == [("late", "b"), ("unowned", "a")]
    sentence = needing_attention(live, lost, [], NOW)[1].sentence
    assert sentence == "has had no owner for 1 min 30 s: nobody has asked for it"
    assert needing_attention([job("b")], lost[1:], [], NOW)[0].sentence.endswith("1 min 30 s: its task was deleted")


@pytest.mark.parametrize("state", [State.REJECTED, State.FAILED])
def test_what_ended_badly_is_named_until_a_later_run_does_better_or_a_day_has_passed(state: State) -> None:
    bad = job("train", state)
    named = [(state.value, "train")]
    assert found([], [bad]) == named
    assert found([], [job("train", state, ago_s=RECENT_S + 1)]) == []
    assert found([job("train", run_id="run1", ago_s=60.0)], [bad]) == []
    assert found([], [bad, job("train", State.SUCCEEDED, run_id="run1", ago_s=60.0)]) == []
    again = job("train", State.FAILED, run_id="run1", ago_s=60.0)
    assert sorted(found([], [bad, again])) == sorted([*named, ("failed", "train")]), "a run that failed is no better"
    assert found([job("other", run_id="run1", ago_s=60.0)], [bad]) == named, "another task"
    assert found([job("train", run_id="run1", ago_s=6000.0)], [bad]) == named, "an earlier run"
    assert found([], [job("train", State.CANCELLED)]) == [], "somebody wanted that"


def test_the_most_urgent_comes_first() -> None:
    live = [
        job("later", slack_s=-9.0, deadline_at=NOW + 99),
        job("sooner", slack_s=-1.0, deadline_at=NOW + 9),
        job("risk", at_risk=True),
    ]
    ended = [job("failed", State.FAILED), job("rejected", State.REJECTED)]
    assert [name for _, name in found(live, ended)] == ["sooner", "later", "risk", "rejected", "failed"]
