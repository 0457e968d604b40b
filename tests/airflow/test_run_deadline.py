"""Deadlines and due times of one run: computed once and kept, and what each submission tells the calendar."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pendulum
import pytest
from airflow.sdk import DAG, CronDataIntervalTimetable
from airflow.sdk.bases.operator import ExecutorSafeguard

from elasticflow_airflow.api import JobIdentity, JobResult, State
from elasticflow_airflow.operators import ElasticTrainOperator
from elasticflow_airflow.task.run_deadline import ARITHMETIC_LABEL, DeadlinesOfRun, RunOfDag, due_times, ended_jobs
from elasticflow_airflow.waiting.task_memory import TaskMemory

BERLIN = pendulum.timezone("Europe/Berlin")
NEW_YORK = pendulum.timezone("America/New_York")
DAILY = DAG("timetable", schedule="0 5 * * *", start_date=pendulum.datetime(2026, 1, 1, tz=BERLIN)).timetable
MINE = JobIdentity(dag_id="daily", run_id="run1", task_id="train")


def at(text: str, zone=BERLIN) -> pendulum.DateTime:
    return pendulum.parse(text, tz=zone)


def the_run(due="2026-11-20T05:00", kind="scheduled", **changes) -> RunOfDag:
    return RunOfDag(run_type=kind, run_after=at(due), timetable=DAILY, **changes)


def the_task(**changes) -> SimpleNamespace:
    given = {"deadline": "07:30", "deadline_of": None, "latest_deadline": None}
    return SimpleNamespace(task_id="train", downstream_reserve=timedelta(minutes=5), **{**given, **changes})


def deadlines(task, run, memory=None, zone=BERLIN, now=None) -> DeadlinesOfRun:
    now = now or run.run_after.add(minutes=1)
    return DeadlinesOfRun(task, run, MINE, zone, memory or TaskMemory(), now=now)


def utc(seconds: float) -> str:
    return pendulum.from_timestamp(seconds).format("YYYY-MM-DD HH:mm")


@pytest.mark.parametrize(
    ("zone", "due", "given", "first"),
    [
        (BERLIN, "2026-03-29T00:10", "02:30", "2026-03-29 01:30"),  # spring: 02:30 is skipped, 03:30 it is
        (BERLIN, "2026-10-25T00:10", "02:30", "2026-10-25 00:30"),  # autumn: the first of the two
        (NEW_YORK, "2026-03-08T01:00", "02:30", "2026-03-08 07:30"),
        (NEW_YORK, "2026-11-01T00:10", "01:30", "2026-11-01 05:30"),
    ],
)
def test_a_time_of_day_is_kept_whatever_the_clocks_do(zone, due, given, first):
    """A retry, or a clear, at the second 02:30 of an autumn night finds the first one, as the run has always had."""
    memory = TaskMemory()
    task, run = the_task(deadline=given), RunOfDag(run_type="scheduled", run_after=at(due, zone), timetable=DAILY)
    computed = deadlines(task, run, memory, zone).compute("deadline")
    assert utc(computed) == first
    for later in (timedelta(hours=1), timedelta(days=40)):
        again = deadlines(task, run, memory, zone, now=run.run_after + later)
        assert again.compute("deadline") == computed
        assert again.notes == [memory.deadlines["deadline"]["arithmetic"]]


def test_another_deadline_in_an_edited_dag_is_computed_afresh():
    memory = TaskMemory()
    before = deadlines(the_task(), the_run(), memory).compute("deadline")
    after = deadlines(the_task(deadline="08:30"), the_run(), memory).compute("deadline")
    assert after - before == 3600
    with_target = deadlines(the_task(deadline="08:30", deadline_of="publish"), the_run(), memory).compute("deadline")
    assert after - with_target == 300


def test_the_next_run_is_the_deadline_of_a_dag_without_another():
    found = deadlines(the_task(deadline=None, deadline_of="dag_run"), the_run())
    assert utc(found.compute("deadline")) == "2026-11-21 03:55"
    assert "the next run of the DAG is due then" in found.notes[0]
    own = deadlines(the_task(deadline=None, deadline_of="train"), the_run())
    assert utc(own.compute("deadline")) == "2026-11-21 04:00"
    assert "minus" not in own.notes[0]


def test_where_the_timetable_cannot_be_read_airflow_is_asked():
    asked = at("2026-11-21T06:00")
    broken = replace(the_run(), timetable=object(), next_dagrun=lambda: asked)
    assert broken.next_due() == asked
    assert replace(broken, next_dagrun=lambda: at("2026-11-19T06:00")).next_due() is None


def test_a_manual_run_counts_from_its_own_time():
    by_hand = the_run(due="2026-11-20T11:00", kind="manual")
    assert utc(by_hand.next_due().timestamp()) == "2026-11-21 04:00"
    timetable = CronDataIntervalTimetable("0 5 * * *", timezone=BERLIN)
    whole = replace(by_hand, timetable=timetable)
    assert utc(whole.next_due().timestamp()) == "2026-11-21 04:00"


def test_a_scheduled_run_tells_when_the_next_are_due():
    said = due_times(the_run(), replays=False, now=at("2026-11-20T05:01"))
    assert utc(said["due_at"]) == "2026-11-20 04:00"
    assert utc(said["next_run_at"]) == "2026-11-21 04:00"
    assert [utc(due) for due in said["next_runs_at"]] == ["2026-11-21 04:00", "2026-11-22 04:00"]


def test_a_run_that_began_too_late_tells_only_what_comes_next():
    said = due_times(the_run(), replays=False, now=at("2026-11-20T05:01"), began_too_late=True)
    assert set(said) == {"next_run_at", "next_runs_at"}  # the calendar is not taught that it comes late


def test_a_weekly_run_tells_the_next_one_though_it_is_far():
    weekly = DAG("weekly", schedule="@weekly", start_date=at("2026-01-01")).timetable
    monday = replace(the_run(due="2026-11-16T05:00"), timetable=weekly)
    said = due_times(monday, replays=False, now=at("2026-11-16T05:01"))
    assert said["next_runs_at"] == ()
    assert said["next_run_at"] > said["due_at"] + 5 * 86400


def test_a_busy_schedule_tells_at_most_two_hundred():
    minutely = DAG("minutely", schedule="* * * * *", start_date=at("2026-01-01")).timetable
    said = due_times(replace(the_run(), timetable=minutely), replays=False, now=at("2026-11-20T05:00:30"))
    assert len(said["next_runs_at"]) == 200


@pytest.mark.parametrize(
    ("run", "replays"),
    [
        (the_run(kind="manual"), False),
        (the_run(kind="backfill"), True),
        (the_run(kind="asset_triggered"), False),
        (the_run(), True),  # cleared
        (replace(the_run(), timetable=DAG("none", schedule=None).timetable, run_type="manual"), False),
        (the_run(due="2026-11-01T05:00"), False),  # catches up: the next one is due already
        (replace(the_run(), timetable=object()), False),  # cannot be read
    ],
)
def test_what_comes_when_it_comes_tells_nothing(run, replays):
    assert due_times(run, replays=replays, now=at("2026-11-20T05:01")) == {}


def test_the_last_run_of_a_dag_tells_only_when_it_was_due():
    last = replace(the_run(), dag_end=at("2026-11-20T04:00"))
    assert set(due_times(last, replays=False, now=at("2026-11-20T05:01"))) == {"due_at"}


@pytest.fixture
def submitted(service, make_status, tmp_path, monkeypatch):
    """Execute a task of a daily DAG; what it submitted."""
    monkeypatch.setattr(ExecutorSafeguard, "test_mode", True)
    (tmp_path / "train.py").write_text("print('hello')")
    result = JobResult(steps=10, met=True, finished_at=1.0, checkpoint_path="/c")
    service.statuses = [make_status(State.SUCCEEDED, step=10, result=result)]

    def run(run_after=None, run_type="scheduled", **changes):
        with DAG("daily", schedule="@hourly", start_date=pendulum.datetime(2026, 1, 1)) as dag:
            dag.fileloc = str(tmp_path / "dag.py")
            arguments = {"deadline": timedelta(hours=1), **changes}
            task = ElasticTrainOperator(task_id="train", script="train.py", steps=10, global_batch_size=8, **arguments)
        due = run_after or pendulum.now("UTC").start_of("hour")
        dag_run = SimpleNamespace(
            run_after=due, run_type=run_type, logical_date=due, triggering_user_name=None, clear_number=0
        )
        names = {"dag_id": "daily", "run_id": "run1", "task_id": "train", "map_index": -1}
        ti = SimpleNamespace(**names, try_number=1, max_tries=0)

        class Store(dict):
            def set(self, key, value):
                self[key] = value

        task.execute({"ti": ti, "dag_run": dag_run, "dag": dag, "task_state_store": Store()})
        return service.did("submit")[-1]

    return run


def test_each_submission_tells_the_calendar_and_how_its_deadline_came_about(submitted):
    body = submitted()
    assert body["next_run_at"] == body["due_at"] + 3600
    assert len(body["next_runs_at"]) == 48
    assert body["labels"][ARITHMETIC_LABEL].startswith("Deadline:\n  the training must end by")
    by_hand = submitted(run_type="manual")
    assert (by_hand["due_at"], by_hand["next_run_at"], by_hand["next_runs_at"]) == (None, None, [])
    free = submitted(deadline=None, best_effort=True)
    assert ARITHMETIC_LABEL not in free["labels"]
    assert free["next_run_at"] is not None


def test_past_trainings_are_those_of_this_task_in_other_runs(service, make_status, monkeypatch):
    from elasticflow_airflow.client import ElasticFlowClient, ServiceUnavailable
    from elasticflow_airflow.hooks import ElasticFlowHook

    def job(run_id="run0", finished_at=5.0, **changes):
        identity = JobIdentity(dag_id="daily", run_id=run_id, task_id="train")
        return make_status(State.SUCCEEDED, identity=identity, result=JobResult(finished_at=finished_at), **changes)

    jobs, asked = [job(run_id="run1"), job(run_id="run0"), job(run_id="run-1", finished_at=None)], []

    def list_jobs(self, **given):
        asked.append(given)
        return jobs

    monkeypatch.setattr(ElasticFlowClient, "list_jobs", list_jobs)
    assert [(one.run_id, one.ended_at) for one in ended_jobs(ElasticFlowHook(), MINE)] == [("run0", 5.0)]
    whose = {"namespace": "default", "dag_id": "daily", "task_id": "train", "map_index": -1}
    assert asked == [{"state": "succeeded", "limit": 100, **whose}]  # others do not use up the limit

    def away(self, **_):
        raise ServiceUnavailable("nobody answers")

    monkeypatch.setattr(ElasticFlowClient, "list_jobs", away)
    assert ended_jobs(ElasticFlowHook(), MINE) == []
