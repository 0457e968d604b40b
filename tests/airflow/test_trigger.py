"""The trigger: waits, renews, says what happens, cancels only when a user kills, and survives its own service."""

from __future__ import annotations

import json

import pytest
from airflow.sdk.exceptions import AirflowNotFoundException

from elasticflow_airflow.api import Event, State
from elasticflow_airflow.hooks import ElasticFlowHook
from elasticflow_airflow.triggers import ElasticFlowJobTrigger


def trigger(**changes):
    arguments = {"job_id": "j", "claim": 1, "poll_interval_s": 0.01, "min_deferral_s": 0.0}
    return ElasticFlowJobTrigger(**{**arguments, **changes})


async def fired(waiting) -> dict:
    event = await anext(waiting.run())
    return event.payload


def test_serializes_to_plain_json():
    path, arguments = trigger(state_dir="/x", last_event_id=7).serialize()
    assert path == "elasticflow_airflow.triggers.ElasticFlowJobTrigger"
    again = ElasticFlowJobTrigger(**json.loads(json.dumps(arguments)))
    assert again.serialize() == (path, arguments)


async def test_fires_when_the_job_has_ended(service, make_status, capsys):
    service.claim = 1
    service.events = [Event(event_id=5, job_id="j", at=1.0, kind="resized", reason="2 to 4 workers: a slot came free")]
    service.statuses = [
        make_status(),
        make_status(step=3, last_event_id=5, loss=0.5, workers=4, steps_per_s=2.0),
        make_status(State.SUCCEEDED, step=9, last_event_id=5),
    ]
    assert await fired(trigger()) == {"job_id": "j", "claim": 1, "outcome": "ended", "event_id": 5}
    said = capsys.readouterr().out
    assert said.count("event 5 · resized: 2 to 4 workers: a slot came free") == 1
    assert "step 3 · loss 0.5 · 4 workers · 2 steps/s" in said
    assert all(body["claim"] == 1 for body in service.did("lease"))
    assert not service.did("cancel")


async def test_logs_every_event_of_a_job_with_more_than_a_page_of_them(service, make_status, capsys):
    service.claim = 1
    service.events = [Event(event_id=i, job_id="j", at=1.0, kind="resized", reason="why") for i in range(1, 602)]
    service.statuses = [
        make_status(),
        make_status(last_event_id=601),
        make_status(last_event_id=601),
        make_status(State.SUCCEEDED, last_event_id=601),
    ]
    assert (await fired(trigger()))["event_id"] == 601
    assert capsys.readouterr().out.count("· resized: why") == 601


async def test_waits_for_a_service_that_is_away(service, make_status, monkeypatch):
    service.claim, service.away = 1, 3
    service.statuses = [make_status(State.SUCCEEDED)]
    assert (await fired(trigger()))["outcome"] == "ended"


async def test_gives_up_on_a_service_that_stays_away(service):
    service.away = 10**6
    assert (await fired(trigger(service_away_s=0.0)))["outcome"] == "away"


async def test_waits_for_a_connection_that_cannot_be_read_now(service, make_status, monkeypatch):
    service.claim, service.statuses = 1, [make_status(State.SUCCEEDED)]
    open_client, unreadable = ElasticFlowHook.async_client, iter([True, True])

    async def open_or_fail(self, **given):
        if next(unreadable, False):
            raise AirflowNotFoundException("The conn_id `elasticflow_default` isn't defined")
        return await open_client(self, **given)

    monkeypatch.setattr(ElasticFlowHook, "async_client", open_or_fail)
    assert (await fired(trigger()))["outcome"] == "ended"


async def test_a_newer_attempt_ends_it(service):
    service.claim = 2
    assert (await fired(trigger()))["outcome"] == "stale"
    await trigger().on_kill()  # and its kill changes nothing
    assert len(service.did("cancel")) == 1  # answered by 409


@pytest.mark.parametrize("away", [0, 1])
async def test_a_killed_task_cancels_its_job(service, away):
    service.claim, service.away = 1, away
    await trigger().on_kill()
    assert [body["claim"] for body in service.did("cancel")] == [1]


async def test_cleanup_never_touches_the_job(service):
    await trigger().cleanup()
    assert service.calls == []
