"""What a viewer may not see is hidden by what a sentence is noted to mention."""

from __future__ import annotations

from elasticflow_airflow.api import Event
from elasticflow_airflow.api.status import Mention
from elasticflow_airflow.ui.visibility import VisibilityFilter

SEES = VisibilityFilter("default", frozenset({"mine"}), names={"mine-1": "mine.train"})


def said(reason: str, mentions: list[Mention] | None) -> str:
    known = {} if mentions is None else {"reason": mentions}
    event = Event(event_id=1, job_id="mine-1", at=1.0, kind="resized", reason=reason, mentions=known)
    shown = SEES.plain(event.model_dump(mode="json"))
    assert "mentions" not in shown
    return str(shown["reason"])


def test_jobs_and_tasks_are_named_to_those_who_may_see_them() -> None:
    mentions = [
        Mention(at=0, length=6, job_id="mine-1"),
        Mention(at=11, length=7, job_id="other-1"),
        Mention(at=20, length=10, namespace="default", dag_id="mine"),
        Mention(at=35, length=9, namespace="default", dag_id="secret"),
    ]
    text = "mine-1 and other-1, mine.train and secret.it"
    assert said(text, mentions) == "mine.train and another job, mine.train and another job"


def test_words_that_only_look_like_a_name_are_left_alone() -> None:
    looks = "a-0123456789abcdef is a slot, noted to be no job"
    assert said(looks, []) == looks


def test_foreign_words_and_sentences_of_older_services_are_searched_for_names() -> None:
    text = "held by etl-0123456789abcdef"
    assert said(text, [Mention(at=0, length=len(text))]) == said(text, None) == "held by another job"
