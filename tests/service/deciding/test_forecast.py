"""The calendar of the service: next runs, what is kept free for them, forecasts, and verdicts without a submission."""

from __future__ import annotations

import re
import time

import httpx
import pytest
from support.service_parts import parts_of

from elasticflow_airflow.api import Command, DryRun, ForecastAnswer, JobIdentity, JobSubmission, Length, PlannedRun
from elasticflow_airflow.service.http.app import build_app
from elasticflow_airflow.service.refusal import Refusal
from elasticflow_airflow.service.requests.forecasting import ForecastService

HOUR_S = 3600.0
CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


def service_of(world) -> ForecastService:
    reconciler = world.reconciler
    return ForecastService(
        world.store, world.settings, reconciler.copy_scheduler, lambda: reconciler.device_type, clock=world.clock
    )


def submit_nightly(world, run: str, **given):
    """A run of a task that keeps four workers busy for about a minute, and says when the next is due."""
    values = {"steps": 2000, "within": 180.0, "scaling_curve": CURVE, "next_run_at": world.now_s + HOUR_S, **given}
    return world.submit(task="nightly", run=run, **values)


def expected(world) -> list[float]:
    scheduler = world.reconciler.copy_scheduler()
    assert scheduler is not None
    return [run.due_s for run in scheduler.expected_runs()]


def adhoc(world, **given):
    """A job that could take the whole cluster for as long as it is let."""
    return world.submit(**{"task": "adhoc", "scaling_curve": CURVE, **given})


def test_a_submit_says_when_the_next_run_is_due_and_slots_are_kept_free_for_it(world):
    due = world.now_s + HOUR_S
    first = submit_nightly(world, "r1", steps=8000, within=400.0)
    assert world.ended(first).state == "succeeded"
    assert expected(world) == [due]
    said = world.events(first, "run_expected")
    assert len(said) == 1
    assert said[0].data["due_at"] == [due]

    world.step(due - 600.0 - world.now_s)
    # 25 minutes of the whole cluster: with the expected run in between it cannot be done in 26, not even as told.
    greedy = adhoc(world, steps=32 * 60 * 22, within=26 * 60.0)
    verdict = greedy.job.verdict
    assert verdict.decision == "rejected"
    assert "1 expected run" in verdict.reason
    assert verdict.earliest_deadline_at is not None

    world.step(due - world.now_s)
    assert submit_nightly(world, "r2", steps=8000, within=400.0).job.verdict.decision == "admitted"


def test_without_a_next_run_nothing_is_kept_free(world):
    first = submit_nightly(world, "r1", next_run_at=None)
    assert world.ended(first).state == "succeeded"
    assert expected(world) == []
    assert adhoc(world, steps=32 * 60 * 22, within=30 * 60.0).job.verdict.decision == "admitted"


def test_a_run_that_does_not_come_releases_its_reservation_and_lowers_its_probability(world):
    due = world.now_s + HOUR_S
    submit_nightly(world, "r1", within=2000.0)
    world.step(due + 30.0 - world.now_s)
    assert expected(world) == [due]
    world.step(601.0)
    assert expected(world) == []
    missed = world.events(kind="run_missed")
    assert [event.data["due_at"] for event in missed] == [due]
    assert "daily.nightly" in missed[0].reason

    submit_nightly(world, "r3")
    scheduler = world.reconciler.copy_scheduler()
    assert [round(run.probability, 2) for run in scheduler.expected_runs()] == [0.75]


def test_the_calendar_survives_a_restart(world):
    due = world.now_s + HOUR_S
    submit_nightly(world, "r1", next_runs_at=(due + HOUR_S, due + 2 * HOUR_S))
    before = expected(world)
    assert before == [due, due + HOUR_S, due + 2 * HOUR_S]
    world.restart()
    world.step()
    assert expected(world) == before


def test_what_the_newest_run_says_of_the_future_holds(world):
    start = world.now_s
    submit_nightly(world, "r1", next_run_at=start + HOUR_S, next_runs_at=(start + 2 * HOUR_S,))
    world.step(HOUR_S)
    submit_nightly(world, "r2", next_run_at=start + 3 * HOUR_S)
    assert expected(world) == [start + 3 * HOUR_S]


def test_a_retry_and_a_run_by_hand_take_no_reservation(world):
    due = world.now_s + HOUR_S
    submit_nightly(world, "r1")
    world.step(10 * 60.0)
    submit_nightly(world, "by-hand", next_run_at=None)
    assert expected(world) == [due]


def test_a_task_whose_speed_is_not_known_yet_is_expected_once_it_was_measured(world):
    due = world.now_s + HOUR_S
    first = world.submit(task="nightly", run="r1", steps=2000, within=1200.0, next_run_at=due)
    assert expected(world) == []
    items = service_of(world).forecast(2.0).items
    assert [(item.kind, item.outcome) for item in items if item.kind == "expected"] == [("expected", "unknown")]
    assert world.ended(first).state == "succeeded"
    assert expected(world) == [due]


def test_a_forecast_says_that_everything_will_be_kept(world):
    submit_nightly(world, "r1")
    answer = service_of(world).forecast(2.0)
    assert [(item.kind, item.outcome, item.task) for item in answer.items] == [
        ("job", "kept", "daily.nightly"),
        ("expected", "kept", "daily.nightly"),
    ]
    assert (answer.kept, answer.not_kept, answer.missing_slots) == (2, 0, 0)
    assert all(item.projected_at <= item.deadline_at for item in answer.items)
    assert answer.summary == "all 2 will be kept"
    assert service_of(world).forecast(0.5).kept == 1


def test_a_forecast_says_what_is_missing(world):
    due = world.now_s + HOUR_S
    for task in ("one", "two", "three"):
        job = world.submit(task=task, steps=2000, within=140.0, scaling_curve=CURVE, next_run_at=due)
        assert job.job.verdict.decision == "admitted"
        world.job_service.cancel(job.job.job_id, job.claim, "seen enough")
        world.ended(job)
    # Each needs the whole cluster for some 95 s; due together, two of them cannot be done within 140 s.
    answer = service_of(world).forecast(24.0)
    assert [item.outcome for item in answer.items] == ["kept", "missed", "missed"]
    for item in answer.items[1:]:
        assert item.deadline_at < item.earliest_deadline_at < item.deadline_at + 300.0
        assert "does not fit beside 0 promised jobs and 1 expected run" in item.reason
    assert (answer.kept, answer.not_kept, answer.missing_slots) == (1, 2, 8)
    assert answer.summary.startswith("2 of 3 will not be kept: 2 more nodes of 4 slots would keep them all")


def test_a_dry_run_says_what_a_submit_would_and_leaves_no_trace(world):
    service = service_of(world)
    submission = world.submission(task="new", steps=2000, within=600.0, scaling_curve=CURVE)
    world.step()
    events = len(world.events())
    said = service.dry_run(submission.identity.job_id, submission)
    assert said.verdict.decision == "admitted"
    assert said.verdict.plan
    assert said.projected_finish_at < submission.deadline_at
    world.step(5.0)
    assert len(world.events()) == events
    assert world.job_service.list_jobs(None, None, None, 10) == []

    hopeless = world.submission(task="new", steps=200_000, within=60.0, scaling_curve=CURVE)
    refused = service.dry_run(hopeless.identity.job_id, hopeless).verdict
    assert refused.decision == "rejected"
    assert "hopeless" in refused.reason
    real = world.submit(task="new", steps=200_000, within=60.0, scaling_curve=CURVE).job.verdict
    assert (real.decision, real.reason) == (refused.decision, refused.reason)
    assert real.earliest_deadline_at == refused.earliest_deadline_at


def test_a_dry_run_of_a_job_whose_speed_nobody_knows_says_that_it_would_be_measured(world):
    world.step()
    submission = world.submission(task="new", steps=2000, within=600.0)
    verdict = service_of(world).dry_run(submission.identity.job_id, submission).verdict
    assert verdict.decision == "undecided"
    assert "measured first" in verdict.reason


def test_a_dry_run_needs_no_uploaded_code_but_the_right_id(world):
    world.step()
    submission = world.submission(task="new", steps=2000, within=600.0, scaling_curve=CURVE, snapshot="0" * 64)
    assert service_of(world).dry_run(submission.identity.job_id, submission).verdict.decision == "admitted"
    with pytest.raises(Refusal, match="identity makes the id"):
        service_of(world).dry_run("another", submission)


def test_a_dry_run_of_a_live_job_asks_as_if_it_were_submitted_anew(world):
    job = world.submit(task="new", steps=20_000, within=2000.0, scaling_curve=CURVE)
    again = world.submission(task="new", steps=40_000, within=4000.0, scaling_curve=CURVE)
    assert service_of(world).dry_run(again.identity.job_id, again).verdict.decision == "admitted"
    assert world.status(job).total_steps == 20_000


# -- planned runs ------------------------------------------------------------------------------------------------


def planned(world, task: str, *, due: float, within: float = 140.0, **given) -> PlannedRun:
    submission = world.submission(task=task, run="planned", within=due - world.now_s + within, **given)
    return PlannedRun(submission=submission, due_at=due)


def test_planned_runs_are_forecast_beside_everything_else_that_is_due(world):
    """Each needs the whole cluster for some 95 s: two of them due together cannot be done within 140 s."""
    due = world.now_s + HOUR_S
    submit_nightly(world, "r1", within=140.0)
    new = planned(world, "new", due=due, steps=2000, scaling_curve=CURVE)
    later = planned(world, "later", due=due + 1800.0, steps=2000, scaling_curve=CURVE)
    answer = service_of(world).forecast(24.0, [new, later])
    assert {item.task: item.outcome for item in answer.items if item.planned} == {
        "daily.new": "missed",
        "daily.later": "kept",
    }
    missed = next(item for item in answer.items if item.outcome == "missed")
    assert missed.earliest_deadline_at > missed.deadline_at
    assert [item.outcome for item in answer.items if not item.planned] == ["kept", "kept"]
    assert service_of(world).forecast(24.0).not_kept == 0  # nothing stays of it


def test_a_planned_run_stands_instead_of_what_is_expected_of_its_task(world):
    due = world.now_s + HOUR_S
    submit_nightly(world, "r1", within=140.0)
    longer = planned(world, "nightly", due=due, steps=4000, scaling_curve=CURVE)
    answer = service_of(world).forecast(24.0, [longer])
    (item,) = [item for item in answer.items if item.kind == "expected"]
    assert (item.planned, item.outcome, item.due_at) == (True, "missed", due)


def test_a_planned_run_may_be_kept_by_a_later_deadline_as_it_allows(world):
    world.step()
    due = world.now_s + HOUR_S
    alone = planned(world, "alone", due=due, steps=2000, scaling_curve=CURVE)
    wants = {"within": 60.0, "steps": 2000, "scaling_curve": CURVE}
    for on_reject in ("renegotiate", "late"):
        for latest, outcome in ((due + 300.0, "kept"), (due + 65.0, "missed")):
            run = planned(world, "late", due=due, on_reject=on_reject, latest_deadline_at=latest, **wants)
            answer = service_of(world).forecast(2.0, [run])
            (item,) = answer.items
            assert (item.outcome, item.deadline_at) == (outcome, due + 60.0)
            if outcome == "kept":
                assert due + 60.0 < item.earliest_deadline_at <= latest
                assert "too long even with the cluster to itself" in item.reason
                assert item.reason.endswith("instead, as it allows")
                assert item.projected_at <= item.earliest_deadline_at
                assert answer.summary == "all 1 will be kept; 1 by a later deadline, as they allow"
            else:
                assert "nothing up to its latest_deadline can be promised either" in item.reason
    # What was agreed on is kept free, too: the next one has the less.
    both = planned(world, "late", due=due, on_reject="late", latest_deadline_at=due + 400.0, **wants)
    answer = service_of(world).forecast(2.0, [alone, both])
    assert {item.task: item.outcome for item in answer.items} == {"daily.alone": "kept", "daily.late": "kept"}
    answer = service_of(world).forecast(
        2.0, [alone, both, planned(world, "~third", due=due, **wants | {"within": 140.0})]
    )
    assert {item.task: item.outcome for item in answer.items}["daily.~third"] == "missed"


@pytest.mark.parametrize(("on_reject", "says"), [("best_effort", "as best effort"), ("wait", "wait for capacity")])
def test_a_planned_run_that_is_missed_says_what_becomes_of_it(world, on_reject, says):
    world.step()
    due = world.now_s + HOUR_S
    run = planned(world, "new", due=due, within=60.0, steps=2000, scaling_curve=CURVE, on_reject=on_reject)
    answer = service_of(world).forecast(2.0, [run])
    assert (answer.items[0].outcome, answer.not_kept) == ("missed", 1)
    assert f"it would {'train ' if on_reject == 'best_effort' else ''}{says} then" in answer.items[0].reason


@pytest.mark.parametrize("on_reject", ["fail", "best_effort", "wait"])
def test_a_planned_run_that_never_fits_would_be_refused(world, on_reject):
    world.step()
    wants = {"min_workers": 64, "steps": 2000, "scaling_curve": {64: 100.0}, "global_batch_size": 64}
    run = planned(world, "large", due=world.now_s + HOUR_S, on_reject=on_reject, **wants)
    (item,) = service_of(world).forecast(2.0, [run]).items
    assert item.outcome == "missed"
    assert re.fullmatch(r"min_workers=64 never fits: the cluster has \d+ slots: it would be refused then", item.reason)


def test_of_a_planned_run_that_says_too_little_nobody_can_say(world):
    due = world.now_s + HOUR_S
    world.step()
    unknown = planned(world, "unknown", due=due, steps=2000)
    endless = planned(world, "endless", due=due, steps=None, scaling_curve=CURVE)
    before = planned(world, "before", due=due, within=-60.0, steps=2000, scaling_curve=CURVE)
    answer = service_of(world).forecast(24.0, [unknown, endless, before])
    said = {item.task: (item.outcome, item.reason) for item in answer.items}
    assert said["daily.unknown"] == ("unknown", "its speed is not known: let it run once, or give scaling_curve=")
    assert said["daily.endless"][0] == "unknown"
    assert "its length is not known" in said["daily.endless"][1]
    assert said["daily.before"] == ("missed", "its deadline is not later than it is due")
    assert (answer.kept, answer.not_kept) == (0, 1)
    with pytest.raises(ValueError, match="a planned run needs a deadline"):
        PlannedRun(submission=world.submission(task="free", steps=10), due_at=due)


# -- over HTTP ---------------------------------------------------------------------------------------------------


def app_of(world, token=None):
    parts = parts_of(
        world,
        forecasts=service_of(world),
    )
    return build_app(parts, token)


async def test_the_routes_answer_and_ask_for_the_token(world):
    submit_nightly(world, "r1")
    submission = world.submission(task="new", steps=2000, within=600.0, scaling_curve=CURVE)
    path = f"/v1/jobs/{submission.identity.job_id}"
    body = submission.model_dump_json(exclude={"secret_env"})
    transport = httpx.ASGITransport(app_of(world, "secret"), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://service") as http:
        assert (await http.post("/v1/forecast", json={})).status_code == 401
        assert (await http.put(path, params={"dry_run": "true"}, content=body)).status_code == 401
        http.headers["Authorization"] = "Bearer secret"
        answer = ForecastAnswer.model_validate_json((await http.post("/v1/forecast", json={"hours": 3})).content)
        assert answer.kept == 2
        for hours in (0, -1, 1e9, "soon"):
            assert (await http.post("/v1/forecast", json={"hours": hours})).status_code == 422
        headers = {"Content-Type": "application/json"}
        said = await http.put(path, params={"dry_run": "true"}, content=body, headers=headers)
        assert said.status_code == 200
        assert DryRun.model_validate_json(said.content).verdict.decision == "admitted"
        assert (await http.get(path)).status_code == 404


def test_before_the_first_pass_nobody_can_say(make_world):
    world = make_world()
    with pytest.raises(Refusal) as refused:
        service_of(world).forecast(1.0)
    assert refused.value.status == 503


def test_the_client_asks_a_real_service_and_leaves_no_trace(daemons, open_client):
    client = open_client(daemons.embedded())
    submission = JobSubmission(
        identity=JobIdentity(dag_id="daily", run_id="r1", task_id="train"),
        command=Command(snapshot="0" * 64, script="train.py"),
        length=Length(steps=2000),
        global_batch_size=32,
        deadline_at=time.time() + 600.0,
        scaling_curve=CURVE,
    )
    limit = time.monotonic() + 30.0
    while not client.health().slots:
        assert time.monotonic() < limit, "the service has not looked at its nodes"
    said = client.dry_run(submission)
    assert (said.job_id, said.verdict.decision) == (submission.identity.job_id, "admitted")
    (planned,) = client.forecast(2.0, [PlannedRun(submission=submission, due_at=time.time() + 60.0)]).items
    assert (planned.planned, planned.outcome, planned.task) == (True, "kept", "daily.train")
    answer = client.forecast(2.0)
    assert (answer.items, answer.summary) == ([], "nothing with a deadline is due")
    assert client.list_jobs() == []
