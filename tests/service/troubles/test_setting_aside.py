"""A job that the service fails on is set aside: all others are decided on, and its own workers go on."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from support.cases import slow
from support.raw_columns import as_stored, holds_json
from support.service_parts import insight_of, parts_of

from elasticflow_airflow.api.insight import CalendarRequest, DueRuns
from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.decider import Decider
from elasticflow_airflow.service.decisions.fault_attribution import Faults, ServiceFaultError, find_culprits
from elasticflow_airflow.service.http.app import build_app
from elasticflow_airflow.service.http.parts import InsightServices
from elasticflow_airflow.service.loop import observing
from elasticflow_airflow.service.requests.forecasting import ForecastService
from elasticflow_airflow.service.requests.timetable_intake import CalendarService
from elasticflow_airflow.service.store.documents.columns import Unreadable
from elasticflow_airflow.service.store.tables import (
    AmendmentRow,
    CandidateRow,
    EventRow,
    GenerationRow,
    HistoryRow,
    IncarnationRow,
    JobRow,
    RecurringTaskRow,
    SampleRow,
    WorkerTimesRow,
)

pytestmark = pytest.mark.trouble

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
TRIED_AFTER_S = 21.0
"""After its start a service has tried again whom the one before it had set aside."""


@pytest.fixture
def pair(make_world):
    """A cluster of eight slots on which two jobs train, of which one will be in trouble."""
    world = make_world(nodes=2)
    bad = world.submit(task="bad", steps=4000, scaling_curve=CURVE, max_workers=2, lease_s=5000)
    good = world.submit(task="good", within=900, steps=300, scaling_curve=CURVE, lease_s=5000)
    world.until(lambda: all(world.status(job).step > 5 for job in (bad, good)), "both train")
    return world, bad, good


def break_for(monkeypatch, job, module, name):
    """Have a stage of the pass fail for one job, whatever else is asked of it."""
    real = getattr(module, name)

    def broken(context, *more, **named):
        if any(getattr(one, "job_id", None) == job.job.job_id for one in more):
            raise RuntimeError("cannot be done")
        return real(context, *more, **named)

    monkeypatch.setattr(module, name, broken)


def poison(world, job, table, **columns):
    """Write what nobody would into the rows of a job or its task, as an older version or a script may have."""
    its = sa.select(JobRow.recurring_key).where(JobRow.job_id == job.job.job_id).scalar_subquery()
    which = table.job_id == job.job.job_id if hasattr(table, "job_id") else table.recurring_key == its
    with world.store.engine.begin() as connection:
        connection.execute(sa.update(table).where(which).values(as_stored(table, columns)))


def set_aside(world, job):
    return world.status(job).set_aside


# -- whichever stage fails ---------------------------------------------------------------------------------------


def test_a_stage_that_fails_for_a_job_fails_for_no_other(pair, monkeypatch):
    """Any of them: see ``test_stages.py``."""
    world, bad, good = pair
    break_for(monkeypatch, bad, observing, "_fold_state")
    late = world.submit(task="late", within=900, steps=100, scaling_curve=CURVE)
    assert world.status(late).verdict.decision == "admitted"
    assert "cannot be done" in set_aside(world, bad)
    assert not world.reconciler.problem
    assert [bad.job.job_id in problem for problem in world.reconciler.problems] == [True]
    assert world.ended(good).state == world.ended(late).state == "succeeded"
    (said,) = world.events(bad, "set_aside")
    assert "Cancel it to end it" in said.reason


def test_the_workers_of_a_job_that_is_set_aside_go_on_and_keep_their_slots(pair, monkeypatch):
    world, bad, _ = pair
    held = world.status(bad).slots
    break_for(monkeypatch, bad, observing, "_fold_state")
    world.run(120, every=2.0)  # several times the lease that its supervisor has without a renewal
    assert set_aside(world, bad)
    assert world.engine.stacks(bad.job.job_id)
    others = [world.submit(task=f"other{n}", within=3600, steps=900, scaling_curve=CURVE) for n in range(3)]
    world.run(20)
    taken = [slot for job in others for slot in world.status(job).slots]
    assert taken
    assert not set(map(tuple, held)) & set(map(tuple, taken))


def test_a_job_that_is_set_aside_can_be_cancelled_and_submitted_anew(pair, monkeypatch):
    world, bad, _ = pair
    with monkeypatch.context() as broken:
        break_for(broken, bad, observing, "_fold_state")
        world.step(0.5)
        assert set_aside(world, bad)
        world.job_service.cancel(bad.job.job_id, bad.claim, "enough")
        assert world.ended(bad).state == "cancelled"
    assert not world.engine.stacks(bad.job.job_id)
    anew = world.submit(task="bad", steps=20, scaling_curve=CURVE)
    assert anew.created
    assert world.ended(anew).state == "succeeded"
    assert not world.reconciler.problems


def test_a_number_that_is_counted_a_second_time_is_the_trouble_of_that_job_alone(pair):
    """The database refuses the row that would be there twice, and everything else that was to be written with it."""
    world, bad, good = pair
    poison(world, bad, IncarnationRow, sampling={})
    late = world.submit(task="late", within=900, steps=100, scaling_curve=CURVE, max_workers=8)
    world.run(30)
    assert world.status(late).verdict.decision == "admitted"
    assert not world.reconciler.problem
    assert "sample" in set_aside(world, bad)
    assert world.ended(late).state == world.ended(good).state == "succeeded"


@pytest.mark.parametrize("ending", ["1e30", {"0": []}, -1, {"state": "running", "reason": "?"}])
def test_an_end_that_cannot_be_read_is_an_end_all_the_same(pair, ending):
    """Workers that are to leave are given nothing new to do, and nobody could tell them to leave a second time."""
    world, bad, good = pair
    poison(world, bad, IncarnationRow, ending=ending)
    assert "how cannot be read" in world.ended(bad, limit_s=60).state_reason
    assert not world.engine.stacks(bad.job.job_id)
    assert world.ended(good).state == "succeeded"


def test_a_job_that_is_set_aside_ends_when_nobody_wants_it_any_more(make_world, monkeypatch):
    world = make_world()
    bad = world.submit(steps=4000, scaling_curve=CURVE, lease_s=20, orphan_s=20)
    world.until(lambda: world.status(bad).step > 5, "it trains")
    break_for(monkeypatch, bad, observing, "_fold_state")
    assert world.ended(bad).state == "cancelled"
    assert not world.engine.stacks(bad.job.job_id)


def test_a_service_that_starts_anew_tries_the_job_again(pair, monkeypatch):
    world, bad, _ = pair
    with monkeypatch.context() as broken:
        break_for(broken, bad, observing, "_fold_state")
        world.run(3)
        before = set_aside(world, bad)
    assert before
    world.run(3)
    assert set_aside(world, bad) == before, "not by itself: what failed once would fail again in each pass"
    world.restart()
    world.step(0.5)
    assert set_aside(world, bad) == before, "first everybody else is served"
    assert before in str(world.reconciler.problems)
    world.run(TRIED_AFTER_S)
    assert set_aside(world, bad) is None
    assert world.events(bad, "tried_again")
    assert world.ended(bad, limit_s=900).state == "succeeded"


def test_a_service_that_starts_decides_first_and_fails_later_on_those_that_were_set_aside(pair, monkeypatch):
    world, bad, good = pair
    break_for(monkeypatch, bad, observing, "_fold_state")
    world.run(3)
    assert set_aside(world, bad)
    world.restart()
    passes = []
    real = type(world.reconciler)._pass
    monkeypatch.setattr(type(world.reconciler), "_pass", lambda self, *given: passes.append(1) or real(self, *given))
    world.step(0.5)
    assert len(passes) == 1, "the first pass is not begun again without it"
    world.run(TRIED_AFTER_S)
    assert set_aside(world, bad), "it has failed again"
    assert len(world.events(bad, "tried_again")) == 0, "nothing of a pass that failed is written"
    assert world.ended(good).state == "succeeded"


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"in_place": 5}, {"target": 7}, {"ending": [1]}])
@pytest.mark.parametrize("starts", [False, True])
def test_what_cannot_be_read_costs_the_others_no_second_pass(pair, monkeypatch, wrong, starts):
    world, bad, good = pair
    poison(world, bad, IncarnationRow, **wrong)
    if starts:
        world.restart()
    passes = []
    real = type(world.reconciler)._pass
    monkeypatch.setattr(type(world.reconciler), "_pass", lambda self, *given: passes.append(1) or real(self, *given))
    world.step(0.5)
    assert len(passes) == 1
    assert set_aside(world, bad)
    assert world.events(bad, "set_aside")
    assert world.ended(good).state == "succeeded"


def test_workers_that_came_up_while_their_job_was_set_aside_train_on_once_it_is_tried_again(make_world, monkeypatch):
    world = make_world()
    with monkeypatch.context() as broken:
        job = world.submit(task="bad", within=900, steps=3000, scaling_curve=CURVE, lease_s=5000)
        assert world.status(job).state == "admitted"
        break_for(broken, job, observing, "_fold_state")
        world.run(30)
        assert set_aside(world, job)
    world.restart()
    world.run(TRIED_AFTER_S)
    assert world.status(job).state == "running"
    assert len(world.events(job, "started")) == 1
    assert world.ended(job).state == "succeeded"


def test_what_fails_after_the_commit_is_the_trouble_of_that_job_alone(pair, monkeypatch):
    world, bad, good = pair
    actuator = world.reconciler._actuator
    real = type(actuator)._write_promotion

    def broken(self, row):
        if row.job_id == bad.job.job_id:
            raise RuntimeError("cannot be done")
        real(self, row)

    monkeypatch.setattr(type(actuator), "_write_promotion", broken)
    assert world.ended(good).state == "succeeded"
    assert set_aside(world, bad)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_job_whose_files_cannot_be_read_is_set_aside_and_can_be_cancelled(pair, restarts):
    """Its script has made a folder of its own reports, say."""
    world, bad, good = pair
    world.engine.spoil(bad.job.job_id, "status.json is no ordinary file")
    late = world.submit(task="late", within=900, steps=100, scaling_curve=CURVE)
    assert world.status(late).verdict.decision == "admitted"
    if restarts:
        world.restart()
    world.run(60, every=2.0)  # several times the lease that its supervisor has without a renewal
    assert "status.json is no ordinary file" in set_aside(world, bad)
    assert len(world.events(bad, "set_aside")) == 1
    assert not world.reconciler.problem
    assert world.engine.stacks(bad.job.job_id), "its workers go on"
    world.job_service.cancel(bad.job.job_id, bad.claim, "enough")
    assert world.ended(bad).state == "cancelled"
    assert world.ended(good).state == world.ended(late).state == "succeeded"


# -- planning, which is for all together -------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["trains", "comes"])
def test_a_job_with_which_planning_fails_is_found_by_leaving_jobs_out(pair, monkeypatch, who):
    world, bad, good = pair
    culprit = bad.job.job_id if who == "trains" else world.submission(task="new").identity.job_id
    real = Decider.replan

    def broken(self, now, *more, **named):
        if culprit in self.state.jobs:
            raise ZeroDivisionError("no plan with this job")
        return real(self, now, *more, **named)

    monkeypatch.setattr(Decider, "replan", broken)
    world.submit(task="new", steps=50, scaling_curve=CURVE)
    late = world.submit(task="late", within=900, steps=100, scaling_curve=CURVE)
    assert world.status(late).verdict.decision == "admitted"
    assert "no plan with this job" in set_aside(world, culprit)
    assert world.ended(good).state == world.ended(late).state == "succeeded"


def test_a_scheduler_that_fails_without_any_job_is_no_jobs_fault(pair, monkeypatch):
    world, bad, good = pair
    with monkeypatch.context() as broken:
        for name in ("handle", "submitted", "reported", "ended", "restore"):
            broken.setattr(Scheduler, name, lambda *_: 1 / 0)
        world.run(30)
        assert "ZeroDivisionError" in str(world.reconciler.problem) or "scheduler failed" in world.reconciler.problem
        assert not set_aside(world, bad)
    assert world.engine.stacks(bad.job.job_id), "its workers train on meanwhile"
    world.step(1)
    assert not world.reconciler.problem
    assert world.ended(good).state == "succeeded"


@pytest.mark.parametrize("wrong", [RuntimeError("broken"), OSError(28, "no space left")])
def test_a_line_that_fails_for_most_jobs_is_the_services_fault(wrong):
    faults = Faults()

    def fail():
        for number in range(12):
            try:
                raise wrong
            except type(wrong) as error:
                faults.note(f"job{number}", "planning", error)

    for moment in (0.0, 20.0):
        fail()
        with pytest.raises(ServiceFaultError, match="12 of 20 jobs"):
            faults.set_aside(20, moment)
    assert not faults.aside
    fail()
    if isinstance(wrong, OSError):  # it passes, some day
        with pytest.raises(ServiceFaultError, match="no space left"):
            faults.set_aside(20, 1000.0)
    else:
        assert len(faults.set_aside(20, 31.0)) == 12


def test_what_stays_wrong_with_many_stops_the_others_for_seconds_only(make_world, monkeypatch):
    """A mapped task of twenty, say: at first nobody can tell whether the service itself is in trouble."""
    world = make_world(nodes=8)
    many = [world.submit(task=f"bad{n}", steps=4000, scaling_curve=CURVE, max_workers=1) for n in range(20)]
    world.run(5)
    real = observing._fold_state
    ids = {job.job.job_id for job in many}

    def broken(context, row, *more, **named):
        if row.job_id in ids:
            raise RuntimeError("cannot be done")
        return real(context, row, *more, **named)

    monkeypatch.setattr(observing, "_fold_state", broken)
    world.run(2)
    assert "so it does with 20 of 20 jobs" in world.reconciler.problem
    assert not any(set_aside(world, job) for job in many)
    late = world.submit(task="late", within=900, steps=100, scaling_curve=CURVE)
    world.until(lambda: world.row(late, 1).introduced, "the late one is decided on", limit_s=60)
    assert world.status(late).verdict.decision == "admitted"
    assert all(set_aside(world, job) for job in many)
    for job in many:
        world.job_service.cancel(job.job.job_id, job.claim, "enough")
    world.until(lambda: all(world.row(job, 1).terminal for job in many), "they can be cancelled")
    assert world.ended(late).state == "succeeded"


@given(st.integers(0, 12), st.sets(st.integers(0, 11)), st.sets(st.integers(0, 11), min_size=2, max_size=3))
def test_those_are_left_out_without_whom_it_works(number, culprits, only_together):
    jobs = [f"job{n}" for n in range(number)]
    alone = {f"job{n}" for n in culprits} & set(jobs)
    group = {f"job{n}" for n in only_together}
    tries = 0

    def works(some):
        nonlocal tries
        tries += 1
        return not alone & set(some) and not group <= set(some)

    found = find_culprits(jobs, works)
    assert works([job for job in jobs if job not in found])
    assert alone <= set(found)
    assert len(found) <= len(alone) + 1
    assert tries <= 3 + 6 * (len(found) + 1)


# -- what no column holds ----------------------------------------------------------------------------------------


def test_a_value_that_no_column_holds_is_the_trouble_of_that_job_alone(pair, monkeypatch):
    world, bad, good = pair
    real = observing._fold_state

    def overflowing(context, row, *more):
        real(context, row, *more)
        if row.job_id == bad.job.job_id:
            row.step = 3_000_000_000  # SQLite would take it, and PostgreSQL refuse the whole transaction

    monkeypatch.setattr(observing, "_fold_state", overflowing)
    assert world.ended(good).state == "succeeded"
    assert "incarnation.step holds integers below 2**31" in set_aside(world, bad)


@pytest.mark.parametrize(
    "wrong",
    [
        {"placement": "node0"},
        {"placement": {}},
        {"placement": []},
        {"workers": 7},
        {"placement": [["node0", 0]] * 2},
        {"placement": [["node0", 2], ["node0", 3]]},
        {"placement": [["elsewhere", 0], ["elsewhere", 1]]},
    ],
    ids=str,
)
def test_nobody_is_sent_to_slots_whose_holder_cannot_be_read(make_world, wrong):
    world = make_world(nodes=1, slots=4)
    bad = world.submit(task="bad", within=3000, steps=4000, scaling_curve=CURVE, max_workers=2, lease_s=5000)
    world.until(lambda: world.status(bad).state == "running", "it trains")
    held = world.status(bad).slots
    poison(world, bad, GenerationRow, **wrong)
    many = [world.submit(task=f"t{n}", within=900, steps=100, scaling_curve=CURVE, max_workers=1) for n in range(4)]
    assert [world.ended(job).state for job in many] == ["succeeded"] * 4
    assert set_aside(world, bad)
    assert not [event for job in many for event in world.events(job, "not_started")]
    assert world.status(bad).slots == held


@pytest.mark.parametrize(
    "wrong", [{"past": 3}, {"past": [3]}, {"past": {}}, {"facts": 3}, {"facts": {"signature": 3}}], ids=str
)
def test_a_task_of_which_nobody_can_read_how_it_was_spoils_no_feed_and_no_forecast(make_world, wrong):
    world = make_world()
    due = world.now_s + 3600
    for task in ("bad", "good"):
        job = world.submit(task=task, within=900, steps=20, scaling_curve=CURVE, next_run_at=due)
        assert world.ended(job).state == "succeeded"
        if task == "bad":
            poison(world, job, RecurringTaskRow, **wrong)
    calendar = CalendarService(world.store, world.settings, world.reconciler.hear_of_runs, clock=world.clock)
    later = [DueRuns(dag_id="daily", task_id=task, due_at=[due, due + 3600]) for task in ("bad", "good")]
    answer = calendar.feed(CalendarRequest(tasks=later))
    assert answer.taken == 2
    assert not any("good" in name for name in answer.unknown)
    world.step()
    forecasts = ForecastService(
        world.store, world.settings, world.reconciler.copy_scheduler, lambda: "", clock=world.clock
    )
    assert "daily.good" in {item.task for item in forecasts.forecast(24.0).items}
    assert not world.reconciler.problem
    assert {json.loads(run.task)[2] for run in world.reconciler._scheduler.expected_runs()} >= {"good"}
    again = world.submit(task="bad", run="next", steps=20, scaling_curve=CURVE, next_run_at=due + 7200)
    assert world.ended(again).state == "succeeded"


PAGES = ("health", "doctor", "jobs", "jobs?live=true", "cluster", "cluster/history")
PAGES_OF_A_JOB = ("", "/story", "/runs", "/events")


@contextmanager
def served(world):
    """The routes, over HTTP; what they do not catch is raised."""
    insight = insight_of(world)
    with TestClient(build_app(parts_of(world, insight=InsightServices(insight, None, None)), None)) as client:
        yield client


def read_all_pages(world, *jobs):
    """Read what the service shows of all jobs, and of these ones: texts by path."""
    paths = ["/metrics", *(f"/v1/{page}" for page in PAGES)]
    paths += [f"/v1/jobs/{job.job.job_id}{page}" for job in jobs for page in PAGES_OF_A_JOB]
    texts = {}
    with served(world) as client:
        for path in paths:
            said = client.get(path)
            assert said.status_code == 200 or "cannot be told" in said.json()["message"], said.text
            texts[path] = said.text
    return texts


def ask_for_everything(world, *submissions):
    """Call each route that changes something about a job, with a claim that holds; statuses by what was asked."""
    statuses = {}
    with served(world) as client:

        def ask(method, what="", **body):
            path = f"/v1/jobs/{submissions[0].identity.job_id}{what}"
            said = client.request(method, path, json=body)
            statuses[f"{method} {what}"] = said.status_code
            assert said.status_code < 500 or said.json()["error"] == "no_answer_yet", said.text
            return said.json()

        claim = ask("POST", "/attach").get("claim")
        ask("POST", "/lease", claim=claim)
        ask("PATCH", claim=claim, deadline_at=world.now_s + 5000)
        ask("POST", "/acknowledge", claim=claim)
        for submission in submissions:
            claim = ask("PUT", **submission.model_dump(mode="json"))["claim"]
            ask("POST", "/cancel", claim=claim, reason="enough")
    return statuses


@pytest.mark.parametrize(
    ("table", "wrong"),
    [
        (IncarnationRow, {"verdict": [{}]}),
        (IncarnationRow, {"result": [1], "target": "none", "sampling": 3}),
        (IncarnationRow, {"state": "sleeping"}),
        (IncarnationRow, {"submission": {"command": 3}}),
        (GenerationRow, {"placement": {"node0": 1}, "notes": []}),
        (GenerationRow, {"notes": []}),
        (GenerationRow, {"notes": {"leaving_at": 1e300}}),
        (GenerationRow, {"window": 3}),
        (EventRow, {"data": "nothing"}),
    ],
    ids=lambda value: value.__tablename__ if isinstance(value, type) else ",".join(value),
)
def test_what_nobody_can_read_of_one_job_hides_no_other(pair, table, wrong):
    world, bad, good = pair
    poison(world, bad, table, **wrong)
    late = world.submit(task="late", within=900, steps=100, scaling_curve=CURVE)
    assert late.job.verdict.decision == "admitted"
    assert not world.reconciler.problem
    shown = read_all_pages(world, bad, good, late)
    assert all(job.job.job_id in shown["/v1/jobs?live=true"] for job in (bad, good, late))
    world.job_service.cancel(bad.job.job_id, bad.claim, "enough")
    world.until(lambda: world.row(bad, 1).terminal, "it can be cancelled")
    assert world.ended(good).state == world.ended(late).state == "succeeded"


@pytest.mark.parametrize("restarts", [False, *slow(True)])
@pytest.mark.parametrize("notes", [[], {"leaving_at": "soon"}, {"leaving_at": 1e300}, {"leaving_at": -1e300}])
def test_what_was_noted_of_a_gang_that_does_not_leave_stops_nobody(make_world, notes, restarts):
    """All are planned around such gangs, so what cannot be read of one would be in the way of all."""
    world = make_world(nodes=1, slots=2)
    one = {"scaling_curve": {1: 10.0}, "max_workers": 1, "lease_s": 5000}
    stubborn = {"steps": 10**6, "best_effort": True, "fake": {"ignores_leave": True}}
    whenever = [world.submit(task=f"bad{number}", **stubborn, **one) for number in range(2)]
    world.until(lambda: all(world.status(job).step > 5 for job in whenever), "both train")
    good = world.submit(task="good", within=300, steps=200, **one)
    world.run(5)
    (bad,) = [job for job in whenever if world.events(job, "suspended")]
    poison(world, bad, GenerationRow, notes=notes)
    if restarts:
        world.restart()
    late = world.submit(task="late", within=1500, steps=100, **one)
    assert late.job.verdict.decision == "admitted"
    assert not world.reconciler.problem
    assert world.ended(good).state == world.ended(late).state == "succeeded"


@pytest.mark.parametrize("stands", ["ended", *slow("lives", "to end")])
@pytest.mark.parametrize(
    "wrong",
    [
        {"submission": {"command": 3}},
        {"submission": [1]},
        {"ending": {"0": []}},
        {"ending": "1e30"},
        {"logical_workers": -1},
        {"renewals": 2**31 - 1},
        {"lease_s": -1e300},
        {"result": [1], "equality_key": ""},
        {"promoted": "é", "result": {}},
        {"promoted": {"path": "../../etc", "generation": 1, "step": 3, "digest": "a"}},
    ],
    ids=str,
)
def test_whatever_is_stored_of_a_job_can_be_asked_for_and_submitted_anew(pair, stands, wrong):
    world, bad, good = pair
    submission = world.submission(task="bad", steps=4000, scaling_curve=CURVE, max_workers=2, lease_s=5000)
    if stands != "lives":
        world.job_service.cancel(bad.job.job_id, bad.claim, "enough")
    if stands == "ended":
        assert world.ended(bad).state == "cancelled"
    poison(world, bad, IncarnationRow, **wrong)
    statuses = ask_for_everything(world, submission)
    assert statuses["PUT "] in (200, 201)
    anew = world.submit(task="bad", steps=50, scaling_curve=CURVE)
    assert anew.created
    assert world.ended(anew).state == world.ended(good).state == "succeeded"


@pytest.mark.parametrize("result", [[1], {"checkpoint_path": ["a"]}, "é", 3])
def test_the_weights_of_a_past_run_that_cannot_be_read_are_left_and_that_is_said(make_world, result):
    world = make_world()
    past = world.submit(task="train", run="run0", steps=20)
    world.until(lambda: world.status(past).state == "succeeded", "it has weights")
    poison(world, past, IncarnationRow, result=result)
    anew = world.submit(task="train", run="run1", steps=20, init_from="latest")
    assert world.ended(anew).state == "succeeded"
    assert "cannot be read, so it starts fresh" in world.events(anew, "initialised")[0].reason


# -- anything, anywhere ------------------------------------------------------------------------------------------

NUMBERS = st.one_of(
    st.sampled_from([0, -1, 10**19, 2**31, 1e30, -1e300, 1_800_000_000_000.0]),
    st.integers(),
    st.floats(allow_nan=False),
)
ANYTHING = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=4,
)
KEYS = {
    "job_id",
    "incarnation",
    "generation",
    "recurring_key",
    "path",
    "number",
    "worker_id",
    "amendment_id",
    "event_id",
}
UNTOUCHED = KEYS | {"terminal", "drained", "handled", "cancel_reason"}
"""Keys, and what decides whether the loop looks at the row at all."""
OF_JOBS = (IncarnationRow, GenerationRow, JobRow, CandidateRow, AmendmentRow, EventRow, SampleRow, WorkerTimesRow)
OF_TASKS = (HistoryRow, RecurringTaskRow)
COLUMNS = [
    (table, column)
    for table in (*OF_JOBS, *OF_TASKS)
    for column in table.__table__.columns
    if column.name not in UNTOUCHED and (table, column.name) != (HistoryRow, "signature")
]


def values_for(column):
    if holds_json(column):
        return ANYTHING.filter(lambda value: value is not None or column.nullable)
    if isinstance(column.type, sa.Boolean):
        return st.booleans()
    if isinstance(column.type, sa.Integer):
        return st.one_of(st.sampled_from([-1, 0, 2**31 - 1, 2**62]), st.integers(-(2**63), 2**63 - 1))
    if isinstance(column.type, sa.Float):
        return NUMBERS.filter(lambda value: isinstance(value, float))
    if isinstance(column.type, sa.LargeBinary):
        return st.binary(max_size=20)
    return st.text(max_size=12)


BAD = {"within": 3000, "steps": 4000, "scaling_curve": CURVE, "max_workers": 2, "lease_s": 5000}
CHANGES = st.sampled_from(COLUMNS).flatmap(lambda pair: st.tuples(st.just(pair), values_for(pair[1])))


def nasty_for(column, number):
    """A value that nobody stores in such a column; there are two for each."""
    if holds_json(column):
        return (3, {"0": [1e300]})[number]
    if isinstance(column.type, sa.Boolean):
        return bool(number)
    if isinstance(column.type, sa.Integer):
        return (-1, 2**31 - 1)[number]
    if isinstance(column.type, sa.Float):
        return (-1e300, 1e300)[number]
    return (b"\0", b"x")[number] if isinstance(column.type, sa.LargeBinary) else ("", "\u00e9")[number]


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    ("stand", "restarts"),
    [
        ("train", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("leave", False), ("wait", True))),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("train", False), ("leave", True), ("wait", False))),
    ],
)
def test_no_column_of_a_job_stops_the_others(make_world, stand, restarts, number):
    """A job for each column of what is stored of one; whatever these jobs are doing, all others are decided on."""
    columns = [(table, column) for table, column in COLUMNS if table in (JobRow, IncarnationRow, GenerationRow)]
    world = make_world(nodes=1, slots=128)
    one = {"scaling_curve": {1: 10.0}, "max_workers": 1, "lease_s": 5000}
    many = {"steps": 10**6, "best_effort": True, "fake": {"ignores_leave": stand == "leave"}}
    bad = [world.submit(task=f"{table.__tablename__}_{column.name}", **many, **one) for table, column in columns]
    world.until(lambda: world.status(bad[-1]).step > 5, "they train")
    if stand != "train":
        most = {"scaling_curve": {128: 80.0}, "min_workers": 128, "max_workers": 128, "lease_s": 5000}
        world.submit(task="big", within=400, steps=4000, global_batch_size=128, **most)
        world.run(5 if stand == "leave" else 40)
    for job, (table, column) in zip(bad, columns, strict=True):
        poison(world, job, table, **{column.name: nasty_for(column, number)})
    if restarts:
        world.restart()
    late = world.submit(task="late", within=3000, steps=100, **one)
    assert late.job.verdict.decision == "admitted"
    assert not world.reconciler.problem
    assert world.ended(late, limit_s=1500).state == "succeeded"


def inside(raw, path, value):
    """Put a value somewhere into a JSON value."""
    if not path or not isinstance(raw, dict) or not raw:
        return value
    key = sorted(raw)[path[0] % len(raw)]
    return {**raw, key: inside(raw[key], path[1:], value)}


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # to shrink one takes five minutes, and what is told last is the timeout
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(CHANGES, min_size=1, max_size=4),
    st.lists(st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=3), ANYTHING), max_size=3),
    st.booleans(),
    st.booleans(),
)
def test_whatever_is_stored_of_some_jobs_all_others_are_decided_on(make_world, changes, deeper, restarts, spoilt):
    stored = [(table.__tablename__, column.name, value) for (table, column), value in changes]
    note(f"{stored} {deeper} {restarts} {spoilt}")
    world = make_world(nodes=2)
    past = world.submit(task="bad", run="run0", steps=20, max_workers=2)
    world.until(lambda: world.status(past).state == "succeeded", "what is learned of the task is stored")
    bad = world.submit(task="bad", **BAD, next_run_at=world.now_s + 900)
    good = world.submit(task="good", within=900, steps=60, scaling_curve=CURVE, max_workers=2, lease_s=5000)
    world.until(lambda: all(world.status(job).step > 5 for job in (bad, good)), "both train")
    with world.store.write() as tx:
        tx.add(AmendmentRow(job_id=bad.job.job_id, incarnation=1, value=2.0, best_effort=False))
    for (table, column), value in changes:
        poison(world, bad, table, **{column.name: value})
    for path, value in deeper:
        stored = IncarnationRow.__table__.columns.submission.type.to_json(world.row(bad, 1).submission)
        submission = json.loads(json.dumps(inside(stored, path, value)))
        if submission is not None:  # no database takes that
            poison(world, bad, IncarnationRow, submission=submission)
    if spoilt:
        world.engine.spoil(bad.job.job_id)
    if restarts:
        world.restart()
    late = world.submit(task="late", within=900, steps=40, scaling_curve=CURVE)
    world.until(lambda: world.row(late, 1).introduced, "the late one is decided on", limit_s=10)
    assert world.row(late, 1).verdict.decision == "admitted"
    assert not world.reconciler.problem, world.reconciler.problem
    read_all_pages(world, bad, late)
    next_one = world.submission(task="bad", run="run2", **BAD)
    world.job_service.submit(next_one.identity.job_id, next_one)  # What was learned of its task may be what is wrong.
    ask_for_everything(world, world.submission(task="bad", **BAD), world.submission(task="bad", init_from="latest"))
    world.until(lambda: world.row(good, 1).terminal and world.row(late, 1).terminal, "both end")
    assert world.row(good, 1).state == world.row(late, 1).state == "succeeded"
    assert not world.reconciler.problem, world.reconciler.problem


@pytest.mark.parametrize("wrong", [True, {"scaling_curve": 3}, {"scaling_curve": {"1": 10.0}, "min_workers": "x"}])
def test_a_service_that_learns_prices_starts_whatever_is_stored_of_those_who_came_before(make_world, wrong):
    world = make_world(objective="value")
    job = world.submit(steps=20, scaling_curve=CURVE)
    assert world.ended(job).state == "succeeded"
    with world.store.write() as tx:
        row = tx.current(job.job.job_id)[1]
        row.submission, row.speeds = Unreadable(wrong, "nobody can read it"), {}
    world.restart()
    assert world.ended(world.submit(task="next", steps=20, scaling_curve=CURVE)).state == "succeeded"
