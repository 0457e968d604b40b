"""Reasons: rendered with what they mention, and stored as JSON."""

from __future__ import annotations

import json

import pytest

from elasticflow_airflow.scheduler_core.model.reason import Part, Reason


def test_numbers_are_shown_by_their_form() -> None:
    reason = Reason(
        "needs {size:#worker} for {need:duration} before {deadline:moment}, at {speed:.3g} steps/s",
        size=1,
        need=94.0,
        deadline=120.0,
        speed=1 / 3,
    )
    assert str(reason) == "needs 1 worker for 1 min 34 s before 1970-01-01 00:02 UTC, at 0.333 steps/s"


def test_what_it_mentions_is_found_at_any_depth() -> None:
    left = Reason("{job:job} has left", job="etl-1")
    text, parts = Reason("grows: {why}, as {said:text}", why=left, said="job etl-2 says").rendered(str)
    assert text == "grows: etl-1 has left, as job etl-2 says"
    assert parts == [Part(7, 5, "job", "etl-1"), Part(26, 14, "text", "job etl-2 says")]
    assert [text[one.at : one.at + one.length] for one in parts] == ["etl-1", "job etl-2 says"]


def test_tasks_get_their_names_and_of_many_the_rest_is_counted() -> None:
    runs = [Reason("the run of {task:task}", task=key) for key in ("a", "b", "c")]
    text, parts = Reason("kept free for {runs}", runs=runs).rendered(str.upper)
    assert text == "kept free for the run of A, the run of B and 1 more"
    assert [(one.what, one.of) for one in parts] == [("task", "a"), ("task", "b")]


def test_braces_in_values_and_unknown_places_stand_for_themselves() -> None:
    assert str(Reason("{said:text} and {other}", said="{secret}", secret="x")) == "{secret} and {other}"


@pytest.mark.parametrize("value", [float("inf"), "ü“{x}", 3, [Reason("{job:job}", job="a"), "b"]])
def test_it_is_stored_and_comes_back(value: object) -> None:
    reason = Reason("because of {value}", value=value)  # type: ignore[arg-type]
    assert Reason.from_json(json.loads(json.dumps(reason.as_json()))) == reason


@pytest.mark.parametrize(
    "stored", [{}, [1], {"kind": 1}, {"kind": "x", "parameters": [1]}, {"kind": "x", "parameters": {"a": None}}]
)
def test_what_is_no_reason_is_refused(stored: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="reason"):
        Reason.from_json(stored)


def test_a_form_that_nobody_knows_hides_no_number() -> None:
    assert str(Reason("{a:of the future} {b:moment}", a=1.5, b="soon")) == "1.5 soon"
