"""What past runs tell the next one: its length, and of costs and speeds only what can be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from elasticflow_airflow.api import Length
from elasticflow_airflow.runtime.protocol import Report, ReportKind
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.service.decisions.task_history import Past, length_of, past_of, sigmas_of, speeds_to_plan_with
from elasticflow_airflow.service.store.documents.columns import Document
from elasticflow_airflow.service.store.documents.job_documents import MeasuredCosts
from elasticflow_airflow.service.store.tables import HistoryRow

PAST = Past(total_steps=760, epochs=20)


@pytest.mark.parametrize(
    ("length", "past", "steps"),
    [
        (Length(steps=5), PAST, 5),
        (Length(epochs=2, samples=33), PAST, 4),
        (Length(epochs=20), PAST, 760),
        (Length(epochs=200_000), PAST, 7_600_000),
        (Length(epochs=3), Past(total_steps=100, epochs=7), 43),
        (Length(epochs=3), Past(), None),
        (Length(epochs=200_000_000), PAST, 2**31 - 1),
        (Length(), Past(total_steps=100), 100),
        (Length(), PAST, None),
        (Length(epochs=3), Past(total_steps=100), None),
    ],
)
def test_a_run_that_does_not_say_is_as_long_an_epoch_as_the_one_before(length, past, steps):
    assert length_of(length, 32, past) == steps


def test_nothing_is_learned_of_a_task_without_past_runs():
    assert past_of(None) == Past()


def test_how_long_the_script_was_that_said_so_itself_is_known_the_next_time(world):
    first = world.submit(run="run0", steps=None, fake={"samples": 640}, max_workers=2)
    assert world.ended(first).state == "succeeded"
    steps = world.status(first).total_steps
    again = world.submit(run="run1", steps=None, fake={"samples": 640}, max_workers=2)
    assert steps
    assert world.row(again).total_steps == steps


def test_how_long_a_script_says_it_is_counts_once_it_has_succeeded(world):
    """Two thousand million steps, by mistake: the run of the mended script is not refused for it."""
    first = world.submit(
        run="run0", within=900, steps=None, fake={"samples": 64 * 10**9}, max_workers=2, on_reject="best_effort"
    )
    world.reach(first, "running")
    assert (world.row(first).total_steps, world.row(first).best_effort) == (2 * 10**9, True)
    world.job_service.cancel(first.job.job_id, first.claim, "so long?")
    again = world.submit(run="run1", within=900, steps=None, fake={"samples": 6400}, max_workers=2)
    assert world.ended(again).state == "succeeded"
    assert world.status(again).verdict.decision == "admitted"


def stored_history(**raw):
    """A row as it is loaded if this is stored."""
    types = {name: HistoryRow.__table__.columns[name].type for name in raw}
    return HistoryRow(
        **{
            name: types[name].from_json(value) if isinstance(types[name], Document) else value
            for name, value in raw.items()
        }
    )


@pytest.mark.parametrize("wrong", [-1.0, 1e30])
def test_a_stored_number_that_is_out_of_bounds_is_as_if_it_were_not_there(wrong):
    known = {
        "speeds": {"1": 10.0, "2": 18.0},
        "complete": True,
        "costs": {"startup_s": 3.0, "tail_s": wrong},
        "total_steps": wrong,
        "epochs": 2,
        "errors": {"1": [0.1, wrong], "2": [wrong]},
        "loss_curve": {"width": 1.0, "losses": [wrong * 1e300]},
    }
    speeds, costs = {1: 10.0, 2: 18.0}, MeasuredCosts(startup_s=3.0)
    past = Past(speeds=speeds, measured=speeds, costs=costs, epochs=2, errors={1: (0.1,)})
    assert past_of(stored_history(**known)) == past
    known["speeds"] = {"1": 10.0, "2": wrong}
    assert past_of(stored_history(**known)) == replace(past, speeds=None, measured={1: 10.0})


@pytest.mark.parametrize(
    "rubbish", [-1.0, "x", [], {"x": "y"}, {"1": {}}, {"width": -1, "losses": 3, "startup_s": "x"}]
)
def test_stored_history_that_cannot_be_read_is_as_if_it_were_not_there(rubbish):
    row = stored_history(
        speeds=rubbish, errors=rubbish, costs=rubbish, loss_curve=rubbish, total_steps=rubbish, epochs=2
    )
    assert past_of(row) == Past(epochs=2)


def test_a_run_that_reports_rubbish_does_not_spoil_the_next_ones(world):
    """Ten years of a pause and of a window, steps of the years 2096 and 1970: the next run is promised all the same."""
    first = world.submit(run="run0", within=900, steps=60, max_workers=2)
    world.reach(first, "running")
    generation = world.generations(first)[-1]
    waiting = world.reconciler._inbox._waiting
    for number, at_s in enumerate([4_000_000_000.0, 1.0, 4_000_000_000.0, 1.0]):
        step = world.status(first).step
        report = Report(
            kind=ReportKind.PROGRESS,
            generation=generation.generation,
            worker_id="another",
            rank=0,
            step=step,
            at_s=at_s,
            data={"window_s": 3e8, "window_steps": 3, "pause_s": 3e8} if number < 2 else {},
        )
        waiting.setdefault((first.job.job_id, generation.generation), []).append((number, report))
        world.step(0.5)
    assert world.ended(first).state == "succeeded"
    with world.store.read() as reader:
        learned = past_of(reader.history(reader.job(first.job.job_id).recurring_key, world.row(first).signature))
    assert learned.costs.known()
    assert max(learned.costs.known().values()) < 60
    assert min(world.row(first).speeds.values()) > 1.0
    after = world.submit(run="run1", within=300, steps=60, max_workers=2)
    assert world.ended(after).result.met


def test_a_job_that_one_worker_cannot_keep_is_measured_with_more_before_it_is_refused(world):
    """Three of four slots are promised to others: with one worker it takes its 200 s, with four 62 s."""
    for number in range(3):
        world.submit(task=f"full{number}", steps=600, within=100, scaling_curve={1: 10.0}, max_workers=1)
    job = world.submit(steps=2000, within=200)
    told = world.until(lambda: world.events(job, "waiting"), "it says what it waits for")[-1]
    assert "to measure its speed with 2 workers" in told.reason
    assert "until" in told.data
    status = world.status(job)
    assert (status.state, status.verdict.decision, status.state_reason) == ("profiling", "undecided", told.reason)
    ended = world.ended(job)
    assert (ended.state, ended.verdict.decision, ended.result.met) == ("succeeded", "admitted", True)


@pytest.mark.slow
def test_what_was_measured_of_a_job_that_is_refused_is_known_to_its_next_run(world):
    for number in range(3):
        world.submit(task=f"full{number}", steps=2000, within=255, scaling_curve={1: 10.0}, max_workers=1)
    first = world.submit(run="run0", steps=3000, within=150)
    refused = world.ended(first)
    assert refused.state == "rejected"
    assert "its speed with 2 or 4 workers could not be measured in time" in refused.verdict.reason
    with world.store.read() as reader:
        row = reader.history(reader.job(first.job.job_id).recurring_key, world.row(first).signature)
        assert (set(row.speeds), row.complete) == ({1}, False)
    easy = world.submit(run="run1", steps=200, within=200)
    assert world.status(easy).verdict.decision == "admitted"
    assert not world.events(easy, "measured")
    assert "its speed with 1 worker is known from earlier runs" in world.events(easy, "submitted")[0].reason
    world.job_service.cancel(easy.job.job_id, easy.claim, "enough seen")
    world.until(lambda: world.status(easy).state.terminal, "it is cancelled")
    world.run(240)
    hard = world.submit(run="run2", steps=8000, within=420)
    world.until(lambda: world.status(hard).verdict.decision != "undecided", "it is decided on")
    assert world.status(hard).verdict.decision == "admitted"
    assert [event.data["workers"] for event in world.events(hard, "measured")] == [2, 4]
    with world.store.read() as reader:
        row = reader.history(reader.job(first.job.job_id).recurring_key, world.row(first).signature)
        assert (set(row.speeds), row.complete) == ({1, 2, 4}, True)


def errors_of(world, job):
    with world.store.read() as reader:
        return past_of(reader.history(reader.job(job.job.job_id).recurring_key, world.row(job).signature)).errors


def test_a_task_whose_speeds_have_held_is_promised_without_a_margin(world):
    """200 s at the speed as told, 227 s at the one that the first run is promised with."""
    curve = {1: 10.0}
    first = world.submit(run="run0", steps=2000, within=400, scaling_curve=curve, max_workers=1)
    assert errors_of(world, first) == {}
    assert world.ended(first).result.met
    (error,) = errors_of(world, first)[1]
    assert error == pytest.approx(0.0, abs=0.01)
    again = world.submit(run="run1", steps=2000, within=240, scaling_curve=curve, max_workers=1)
    assert world.status(again).verdict.decision == "admitted"
    assert "measures its speed" not in " ".join(event.reason for event in world.events(again))


def test_what_a_run_has_measured_counts_more_than_the_curve_that_was_given(world):
    told = {1: 20.0}  # twice as fast as it is
    first = world.submit(run="run0", steps=600, within=400, scaling_curve=told, max_workers=1)
    assert world.ended(first).state == "succeeded"
    assert errors_of(world, first) == {1: (0.1,)}  # of a guess that has been replaced, no more than of any
    again = world.submit(run="run1", steps=600, within=400, scaling_curve=told, max_workers=1)
    assert world.row(again).told_speeds[1] == pytest.approx(10.0, rel=0.05)


def test_the_last_errors_of_a_task_are_kept_and_runs_that_measured_nothing_add_none(world):
    for number in range(25):
        job = world.submit(run=f"run{number}", steps=60, within=400, scaling_curve={1: 10.0}, max_workers=1)
        assert world.ended(job).state == "succeeded"
    assert len(errors_of(world, job)[1]) == 20
    short = world.submit(run="short", steps=2, within=400, scaling_curve={1: 10.0}, max_workers=1)
    assert world.ended(short).state == "succeeded"
    assert len(errors_of(world, job)[1]) == 20


def test_a_size_that_no_run_has_measured_keeps_its_margin_and_follows_those_that_were():
    given, config = {1: 2.0, 2: 3.8, 4: 7.2}, SchedulerConfig.served()
    speeds = speeds_to_plan_with(given, {4: 3.6})
    assert speeds[4] == 3.6
    assert 1.0 < speeds[1] < 2.0
    assert sigmas_of(Past(measured={4: 3.6}, errors={4: (0.0,)}), given, config) == (
        pytest.approx(math.log(2.0)),
        {4: 0.0},
    )
    assert sigmas_of(Past(measured={4: 7.2}, errors={4: (0.0,)}), given, config) == (None, {4: 0.0})
    assert speeds_to_plan_with(None, {1: 3.0}) == {1: 3.0}
    assert speeds_to_plan_with(None, None) is None


def test_a_slow_start_counts_at_once_and_is_forgotten_slowly(world):
    """As on a machine that is busy now and then: the next promise relies on what a start may take."""
    planned = []
    for number, startup_s in enumerate([2.0, 12.0, 2.0, 2.0]):
        run = world.submit(run=f"run{number}", fake={"startup_s": startup_s}, scaling_curve={1: 10.0}, max_workers=1)
        assert world.ended(run).state == "succeeded"
        planned.append(world.row(run).costs.startup_s)
    first, slow, third, fourth = planned
    assert first < 4.0
    assert slow >= 12.0
    assert third == pytest.approx((slow + first) / 2, abs=1.0)
    assert fourth == pytest.approx((third + first) / 2, abs=1.0)


def test_one_start_that_hung_does_not_keep_the_next_runs_out(world):
    for number, startup_s in enumerate([2.0, 2000.0]):
        run = world.submit(run=f"run{number}", fake={"startup_s": startup_s}, scaling_curve={1: 10.0}, lease_s=1e5)
        world.until(lambda run=run: world.status(run).state.terminal, "it ends", limit_s=3000.0, every=5.0)
    assert world.row(run).costs.startup_s < 120.0


def test_a_start_that_takes_longer_than_planned_counts_before_the_speed_is_known(world):
    """Also for the plans of its own run: who is stopped and started in turn loses as much each time."""
    job = world.submit(fake={"startup_s": 40.0}, scaling_curve={1: 0.2}, max_workers=1, within=4000.0, steps=100)
    world.until(lambda: world.status(job).state == "running", "it trains")
    assert not world.row(job).speeds
    planned_s = world.reconciler.copy_scheduler().state(job.job.job_id).job.costs.startup_s
    assert world.row(job).costs.startup_s == planned_s
    assert 40.0 <= planned_s < 45.0
    assert world.ended(job).state == "succeeded"


def test_a_start_that_is_quicker_than_planned_waits_for_its_measurement(world):
    job = world.submit(fake={"startup_s": 2.0}, scaling_curve={1: 0.2}, max_workers=1, within=4000.0, steps=100)
    world.until(lambda: world.status(job).state == "running", "it trains")
    assert world.row(job).costs.startup_s is None
