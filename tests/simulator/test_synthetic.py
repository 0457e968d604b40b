"""Synthetic traces: seeded, what they promise to be, and a calendar fed in a simulation."""

from __future__ import annotations

from itertools import pairwise

import pytest
from typer.testing import CliRunner

from elasticflow_airflow.cli.main import app
from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.model.values import ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.expected_runs import CalendarFeed, Timetable, timetables
from elasticflow_airflow.scheduler_core.simulator.inputs import synthetic
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.inputs.synthetic import (
    DAY_S,
    RecurringDags,
    Shape,
    diurnal,
    poisson,
    recurring,
    short_jobs,
)
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import Trace, TraceJob, read_trace, write_trace
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster, prepare
from elasticflow_airflow.scheduler_core.simulator.run import Simulation

CURVES = {
    ("small", 32): ScalingCurve({1: 1.0, 2: 1.6, 4: 2.4}),
    ("large", 256): ScalingCurve({2: 1.0, 4: 1.9, 8: 3.5}),
}
SMALL = RecurringDags(slots=8, days=2, daily=2, hourly=1, now_and_then=1, ad_hoc_per_day=6)
MAKERS = {
    "poisson": lambda seed: poisson(CURVES, jobs=50, every_s=100.0, seed=seed),
    "diurnal": lambda seed: diurnal(CURVES, days=2, per_day=40, seed=seed),
    "short": lambda seed: short_jobs(CURVES, jobs=50, every_s=30.0, startup_s=20.0, seed=seed),
    "recurring": lambda seed: recurring(CURVES, SMALL, seed=seed),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_the_same_seed_makes_the_same_trace_that_can_be_read_again(kind, tmp_path):
    made = MAKERS[kind](3)
    assert made == MAKERS[kind](3)
    assert made != MAKERS[kind](4)
    assert [job.submitted_s for job in made] == sorted(job.submitted_s for job in made)
    path = tmp_path / "made.csv"
    write_trace(path, made)
    read = read_trace(path)
    assert read.ignored == ()
    for job, again in zip(made, read.jobs, strict=True):
        for name in ("job_id", "submitted_s", "steps", "model", "deadline_s", "task", "expected", "due_s"):
            assert getattr(job, name) == getattr(again, name)


@pytest.mark.parametrize("kind", MAKERS)
def test_each_job_could_keep_its_deadline_alone(kind):
    startup = {"short": 20.0}.get(kind, 30.0)
    for job in MAKERS[kind](0):
        seconds = job.steps / CURVES[job.model, job.batch_size].steps_per_s[job.workers]
        assert job.submitted_s + startup + seconds <= job.deadline_s + 1.0, job


def test_short_jobs_are_short_and_leave_time_to_start():
    for job in MAKERS["short"](1):
        assert 59.0 <= job.duration_s <= 601.0
        assert job.deadline_s - job.submitted_s >= 20.0 + job.duration_s


def test_by_day_more_come_than_by_night():
    made = diurnal(CURVES, days=20, per_day=100, seed=1)
    hours = [job.submitted_s % DAY_S / 3600.0 for job in made]
    by_day, by_night = sum(10 <= hour < 18 for hour in hours), sum(hour < 6 or hour >= 22 for hour in hours)
    assert by_day > 3 * by_night
    assert 1700 < len(made) < 2300


def test_recurring_runs_are_late_sometimes_missing_and_sometimes_tried_again():
    made = recurring(CURVES, RecurringDags(slots=8, days=6, retries=0.3), seed=2)
    runs = [job for job in made if job.expected]
    assert all(0.0 <= job.submitted_s - job.due_s <= 1500.0 for job in runs)
    assert any(job.submitted_s - job.due_s > 300.0 for job in runs)
    came = [job for job in runs if job.task == "sometimes0"]
    assert 0 < len(came) < 30
    retries = [job for job in made if job.job_id.endswith("-retry")]
    assert retries
    first = {job.job_id: job for job in runs}
    for retry in retries:
        run = first[retry.job_id.removesuffix("-retry")]
        assert (retry.deadline_s, retry.expected, retry.task) == (run.deadline_s, False, run.task)
        assert retry.submitted_s > run.submitted_s + run.duration_s
    assert sum(job.task == "" for job in made) == 180


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: poisson(CURVES, jobs=0, every_s=1.0), "jobs is 0"),
        (lambda: poisson(CURVES, jobs=1, every_s=float("nan")), "every_s is nan"),
        (lambda: poisson({}, jobs=1, every_s=1.0), "no curve has a size of at most 16 workers"),
        (lambda: Shape(slack=(0.5, 2.0)), "slack is 0.5 to 2"),
        (lambda: Shape(most_workers=0), "most_workers is 0"),
        (lambda: RecurringDags(come=1.5), "come is 1.5"),
        (lambda: RecurringDags(daily=-1), "daily is -1"),
    ],
)
def test_what_cannot_be_is_refused(make, problem):
    with pytest.raises(InputError, match=problem):
        make()


# -- the calendar in a simulation --------------------------------------------------------------------------------


def test_a_timetable_is_told_by_the_smallest_distance_and_not_by_who_comes():
    def run(due: float, task: str = "t", expected: bool = True) -> TraceJob:
        return TraceJob(
            job_id=f"{task}{due}",
            submitted_s=due + 5.0,
            steps=1.0,
            model="small",
            batch_size=32,
            deadline_s=due + 100.0,
            task=task,
            expected=expected,
            due_s=due,
        )

    found = timetables([run(1000.0), run(100.0), run(400.0), run(700.0, "once"), run(0.0, "unknown", expected=False)])
    assert found == {"t": Timetable(100.0, 300.0, 1005.0)}
    assert found["t"].due(100.0, 900.0) == [400.0, 700.0]
    assert found["t"].due(-500.0, 1e9) == [100.0, 400.0, 700.0, 1000.0]


def simulate(rows: list[TraceJob], *, calendar: bool, nodes: int = 2) -> tuple[dict[str, bool], int]:
    machines = cluster(nodes, 4)
    jobs = prepare(Trace(None, tuple(rows)), CURVES, machines, Conditions(pause_s=10.0))
    scheduler = Scheduler(nodes=machines)
    policy = CalendarFeed(scheduler, rows) if calendar else scheduler
    result = Simulation(name="calendar", policy=policy, nodes=machines, jobs=jobs).run()
    return {record.job_id: record.met for record in result.records}, int(result.summary()["late_though_admitted"])


def test_the_calendar_keeps_the_night_free_for_the_task_of_every_night():
    nightly = [
        TraceJob(
            job_id=f"nightly{day}",
            submitted_s=day * DAY_S + 60.0,
            steps=6.0 * 3600.0,
            model="large",
            batch_size=256,
            deadline_s=day * DAY_S + 2 * 3600.0,
            workers=8,
            task="nightly",
            expected=True,
            due_s=day * DAY_S,
        )
        for day in range(4)
    ]
    evening = [
        TraceJob(
            job_id=f"evening{day}",
            submitted_s=day * DAY_S - 3600.0,
            steps=3.5 * 3600.0 * 2.5,
            model="large",
            batch_size=256,
            deadline_s=day * DAY_S + 1.6 * 3600.0,
            workers=8,
        )
        for day in (2, 3)
    ]
    rows = sorted([*nightly, *evening], key=lambda row: row.submitted_s)
    plain, late = simulate(rows, calendar=False)
    assert late == 0
    assert [plain[f"nightly{day}"] for day in range(4)] == [True, True, False, False]
    kept, late = simulate(rows, calendar=True)
    assert late == 0
    assert all(kept[f"nightly{day}"] for day in range(4))
    assert not kept["evening2"]


def test_with_a_calendar_nothing_that_was_admitted_is_late():
    rows = recurring(CURVES, SMALL, seed=5)
    kept, late = simulate(rows, calendar=True, nodes=1)
    assert late == 0
    assert len(kept) == len(rows)
    assert [row.job_id for row in rows if row.task and row.expected and kept[row.job_id]]


def test_announcements_use_only_what_has_happened():
    rows = recurring(CURVES, SMALL, seed=6)
    machines = cluster(2, 4)
    told: list[tuple[float, float, float]] = []

    class Watching(Scheduler):
        def handle(self, event, now):
            if hasattr(event, "run"):
                seen = [r for r in rows if r.task == event.run.task and r.expected and r.submitted_s <= now]
                assert event.run.due_s > now
                assert set(event.run.steps.values) <= {row.steps for row in seen}
                told.append((now, event.run.due_s, event.run.probability))
            return super().handle(event, now)

    jobs = prepare(Trace(None, tuple(rows)), CURVES, machines, Conditions(pause_s=10.0))
    policy = CalendarFeed(Watching(nodes=machines), rows)
    Simulation(name="watched", policy=policy, nodes=machines, jobs=jobs).run()
    assert told
    assert all(0.0 < probability <= 1.0 for _, _, probability in told)
    assert all(a <= b for (a, _, _), (b, _, _) in pairwise(told))


# -- the command -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAKERS)
def test_the_command_writes_a_trace(kind, tmp_path, curves_folder):
    curves = curves_folder("global_batch_size,1,2,4\n32,1.0,1.8,3.0\n")
    out = tmp_path / "made.csv"
    options = ["--curves", str(curves), "--out", str(out), "--days", "1", "--jobs", "10", "--slots", "8"]
    done = CliRunner().invoke(app, ["synthesize", kind, *options])
    assert done.exit_code == 0, done.output
    assert len(read_trace(out).jobs) >= 10
    assert "jobs" in done.output


def test_the_command_refuses_what_cannot_be_and_writes_nothing(tmp_path):
    out = tmp_path / "made.csv"
    done = CliRunner().invoke(app, ["synthesize", "poisson", "--curves", str(tmp_path), "--out", str(out)])
    assert done.exit_code == 2
    assert "no table" in done.stderr
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("curves/net.csv", "is read by this very command"),
        ("curves/made.csv", "is in the folder of scaling curves"),
        ("curves", "is no regular file"),
        ("nowhere/made.csv", "cannot be written"),
    ],
)
def test_the_command_writes_over_no_curve_and_into_no_folder_of_them(name, said, tmp_path, curves_folder):
    table = "global_batch_size,1,2,4\n32,1.0,1.8,3.0\n"
    curves = curves_folder(table)
    done = CliRunner().invoke(app, ["synthesize", "poisson", "--curves", str(curves), "--out", str(tmp_path / name)])
    assert (done.exit_code, said in done.stderr) == (2, True), done.output
    assert [path.name for path in curves.iterdir()] == ["net.csv"]
    assert (curves / "net.csv").read_text() == table


def test_the_command_leaves_nothing_when_it_is_interrupted(tmp_path, curves_folder, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    curves = curves_folder("global_batch_size,1,2,4\n32,1.0,1.8,3.0\n")
    monkeypatch.setattr(synthetic, "poisson", interrupted)
    out = tmp_path / "made.csv"
    done = CliRunner().invoke(app, ["synthesize", "poisson", "--curves", str(curves), "--out", str(out)])
    assert (done.exit_code, "interrupted, nothing was written" in done.stderr) == (2, True), done.output
    assert [path.name for path in tmp_path.iterdir()] == ["curves"]


@pytest.mark.parametrize("option", ["--every-s", "--startup-s", "--per-day"])
def test_the_command_refuses_numbers_without_end(option, tmp_path, curves_folder):
    curves = curves_folder("global_batch_size,1,2,4\n32,1.0,1.8,3.0\n")
    options = ["--curves", str(curves), "--out", str(tmp_path / "made.csv"), option, "inf"]
    done = CliRunner().invoke(app, ["synthesize", "poisson", *options])
    assert (done.exit_code, f"{option} is inf" in done.stderr) == (2, True), done.output
