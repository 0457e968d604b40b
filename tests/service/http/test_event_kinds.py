"""The kinds of event are one list: what the service emits is in it, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

import elasticflow_airflow.service
from elasticflow_airflow.api import Event, EventKind, JobResult, State
from elasticflow_airflow.api.event_data import (
    EVENT_DATA,
    StartedData,
    WaitingData,
    WarningData,
    end_data,
    kind_and_data,
)
from elasticflow_airflow.api.event_kinds import Tone

SOURCES = "\n".join(path.read_text() for path in Path(elasticflow_airflow.service.__path__[0]).rglob("*.py"))


@pytest.mark.parametrize("kind", list(EventKind))
def test_each_kind_is_emitted(kind: EventKind) -> None:
    ends = {state.name for state in State if state.terminal}
    made = f"{EVENT_DATA[kind].__name__}(" if kind in EVENT_DATA else f"EventKind.{kind.name}"
    assert made in SOURCES or kind.name in ends
    assert kind.meaning.endswith(".")


def test_what_an_event_carries_cannot_be_forgotten() -> None:
    assert kind_and_data(StartedData(generation=2, workers=4, step=7)) == (
        EventKind.STARTED,
        {"generation": 2, "workers": 4, "step": 7},
    )
    assert kind_and_data(EventKind.SUSPENDED) == (EventKind.SUSPENDED, {})
    with pytest.raises(TypeError, match="an event 'started' carries StartedData"):
        kind_and_data(EventKind.STARTED)


@pytest.mark.parametrize("state", [state for state in State if state.terminal])
def test_every_end_carries_what_is_known_of_the_result(state: State) -> None:
    kind, data = kind_and_data(end_data(state, JobResult(met=True, steps=5)))
    assert kind == EventKind[state.name]
    assert state is State.REJECTED or (data["met"], data["steps"], data["slack_s"]) == (True, 5, None)
    assert kind_and_data(end_data(state, None)) == (kind, {})


def test_what_an_event_need_not_carry_is_left_out() -> None:
    assert kind_and_data(WarningData(field="loss")) == (EventKind.WARNING, {"field": "loss"})
    assert kind_and_data(WaitingData(until=None)) == (EventKind.WAITING, {"until": None})


def test_a_state_in_which_jobs_end_is_a_kind_of_event() -> None:
    assert {EventKind[state.name].value for state in State if state.terminal} == {s.value for s in State if s.terminal}


def test_what_alarms_its_reader_does_not_look_quiet() -> None:
    for kind in (EventKind.DEADLINE_MISSED, EventKind.AT_RISK, EventKind.HANG, EventKind.FAILED):
        assert kind.tone is Tone.BAD
    assert EventKind.WORKER_LOST.tone is Tone.WARNING


def test_a_client_reads_kinds_that_it_does_not_know() -> None:
    assert Event(event_id=1, job_id=None, at=0.0, kind="of a newer service", reason="").kind == "of a newer service"
