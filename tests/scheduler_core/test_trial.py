"""A job that is refused only because its curve is not sure enough is measured first, and then promised or refused."""

from __future__ import annotations

from typing import Any

import pytest

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import OnReject, Phase

SERVED = SchedulerConfig.served()
TIGHT = {"steps": 1000, "deadline": 1100, "curve": {1: 1.0}}
"""It takes 1000 s at the speed as told, and 1137 s at the speed that is promised with."""


def of(decisions: list[de.Decision], kind: type) -> list[Any]:
    return [decision for decision in decisions if isinstance(decision, kind)]


def submit(scheduler: Scheduler, job: Any, now: float = 0.0) -> list[de.Decision]:
    return scheduler.handle(ev.JobSubmitted(job), now)


def test_what_only_the_told_speed_keeps_is_measured_and_then_promised(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    (resize,) = of(submit(scheduler, make_job("a", **TIGHT)), de.Resize)
    assert resize.purpose is de.Purpose.PROFILE
    assert "not sure enough" in str(resize.reason)
    scheduler.handle(ev.GangStarted("a", resize.placement), 0.0)
    decided = scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0)
    assert [d.terms for d in of(decided, de.Admit)] == [de.Terms.DEADLINE]
    assert of(decided, de.Resize) == of(decided, de.Suspend) == []  # it goes on where it is


def test_what_turns_out_too_slow_is_refused_and_makes_room(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    submit(scheduler, make_job("a", **TIGHT))
    (reject,) = of(scheduler.handle(ev.JobMeasured("a", 1, 0.85), 20.0), de.Reject)
    assert reject.earliest_deadline_s is not None
    assert scheduler.state("a") is None


def test_reports_measure_it_too(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    submit(scheduler, make_job("a", **TIGHT))
    told = [scheduler.handle(ev.JobProgressed("a", 1000 - t, steps_per_s=1.0), t) for t in (15.0, 30.0, 45.0)]
    assert [len(of(one, de.Admit)) for one in told] == [0, 0, 1]


def test_slots_that_others_hold_only_because_they_have_grown_are_enough(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(2))
    (grown,) = of(submit(scheduler, make_job("b", steps=500, deadline=2000, curve={1: 1.0, 2: 1.9})), de.Resize)
    assert len(grown.placement.slots) == 2
    scheduler.handle(ev.GangStarted("b", grown.placement), 0.0)
    decided = submit(scheduler, make_job("a", **TIGHT), 1.0)
    assert {(d.job_id, len(d.placement.slots), d.purpose) for d in of(decided, de.Resize)} == {
        ("a", 1, de.Purpose.PROFILE),
        ("b", 1, de.Purpose.TRAIN),
    }


def test_nobody_is_tried_who_could_not_make_it_as_told_or_not_begin_now(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    assert of(submit(scheduler, make_job("a", **(TIGHT | {"deadline": 990}))), de.Reject)
    submit(scheduler, make_job("b", steps=100, deadline=150, curve={1: 1.0}))
    assert of(submit(scheduler, make_job("c", **(TIGHT | {"deadline": 1200}))), de.Reject)


@pytest.mark.parametrize("config", [SchedulerConfig(), SchedulerConfig.served(speed_confidence=0.5)])
def test_where_no_margin_is_kept_there_is_nothing_to_try(make_job: Any, nodes: Any, config: SchedulerConfig) -> None:
    assert of(submit(Scheduler(config, nodes(1)), make_job("a", **TIGHT)), de.Admit)


def test_a_script_that_reports_nothing_is_refused_at_once(make_job: Any, nodes: Any) -> None:
    assert of(submit(Scheduler(SERVED, nodes(1)), make_job("a", **TIGHT, profile=False)), de.Reject)


def test_a_promise_that_needs_the_slots_ends_the_trial(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    submit(scheduler, make_job("a", **TIGHT))
    decided = submit(scheduler, make_job("b", steps=500, deadline=600, curve={1: 1.0}), 5.0)
    assert [d.job_id for d in of(decided, de.Admit)] == ["b"]
    later = scheduler.handle(ev.WakeUp(), of(decided, de.WakeMeAt)[0].at_s)
    assert [d.job_id for d in of(decided + later, de.Reject)] == ["a"]


def test_a_trial_outlives_a_restart(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    submit(scheduler, make_job("a", **TIGHT))
    again = Scheduler(SERVED, nodes(1))
    again.restore(scheduler.states(), 5.0)
    state = again.state("a")
    assert state is not None
    assert (state.phase, state.trial) == (Phase.PROFILING, 1)
    assert of(again.handle(ev.JobMeasured("a", 1, 1.0), 20.0), de.Admit)


def test_a_crowd_is_tried_on_the_slots_that_there_are(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(2))
    decided = scheduler.submitted([make_job(name, **TIGHT) for name in "abc"], 0.0)
    assert len(of(decided, de.Resize)) == 2
    assert len(of(decided, de.Reject)) == 1


@pytest.mark.parametrize("choice", [OnReject.BEST_EFFORT, OnReject.WAIT])
def test_what_the_submitter_wants_when_it_cannot_be_promised_follows_after_the_trial(
    make_job: Any, nodes: Any, choice: OnReject
) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    submit(scheduler, make_job("a", **TIGHT, on_reject=choice))
    decided = scheduler.handle(ev.JobMeasured("a", 1, 0.85), 20.0)
    if choice is OnReject.BEST_EFFORT:
        assert [d.terms for d in of(decided, de.Admit)] == [de.Terms.BEST_EFFORT]
    else:
        assert of(decided, de.Reject)  # nothing that it could wait for would help


@pytest.mark.parametrize("trouble", ["gang lost", "owner away", "restart"])
def test_a_trial_that_is_interrupted_is_begun_again(make_job: Any, nodes: Any, trouble: str) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    submit(scheduler, make_job("a", **(TIGHT | {"deadline": 1120})))
    if trouble == "gang lost":
        decided = scheduler.handle(ev.GangLost("a"), 10.0)
    elif trouble == "owner away":
        decided = scheduler.handle(ev.JobParked("a"), 10.0) + scheduler.handle(ev.JobUnparked("a"), 14.0)
    else:
        states = scheduler.states()
        scheduler = Scheduler(SERVED, nodes(1))
        decided = scheduler.restore(states, 10.0)
    assert of(decided, de.Reject) == []
    state = scheduler.state("a")
    assert state is not None
    assert (state.phase, state.placement.workers) == (Phase.PROFILING, 1)
    assert of(scheduler.handle(ev.JobMeasured("a", 1, 1.0), 30.0), de.Admit)


def test_who_is_amended_to_best_effort_is_tried_no_more(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    submit(scheduler, make_job("a", **TIGHT))
    scheduler.handle(ev.JobAmended("a", best_effort=True), 5.0)
    state = scheduler.state("a")
    assert state is not None
    assert (state.phase, state.trial) == (Phase.ADMITTED, 0)


WAITS = TIGHT | {"deadline": 1600, "on_reject": OnReject.WAIT}
"""Behind one that ends after 500 s it has time enough as told, not with a margin."""


def waits(scheduler: Scheduler, make_job: Any) -> None:
    """Submit one that takes 500 s, and one that has to wait for it."""
    (first,) = of(submit(scheduler, make_job("b", steps=500, deadline=600, curve={1: 1.0})), de.Resize)
    scheduler.handle(ev.GangStarted("b", first.placement), 0.0)
    assert of(submit(scheduler, make_job("a", **WAITS), 1.0), de.Wait)


@pytest.mark.parametrize(("speed", "verdict"), [(1.0, de.Admit), (0.85, de.Reject)])
def test_who_waits_is_measured_as_soon_as_there_are_slots(
    make_job: Any, nodes: Any, speed: float, verdict: type
) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    waits(scheduler, make_job)
    (resize,) = of(scheduler.handle(ev.JobFinished("b"), 500.0), de.Resize)
    assert (resize.job_id, resize.purpose) == ("a", de.Purpose.PROFILE)
    scheduler.handle(ev.GangStarted("a", resize.placement), 500.0)
    (decided,) = of(scheduler.handle(ev.JobMeasured("a", 1, speed), 520.0), verdict)
    assert decided.job_id == "a"


def test_who_waits_is_asked_about_until_its_curve_as_told_is_too_slow(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    waits(scheduler, make_job)
    now, asked = 1.0, []
    while scheduler.state("a") is not None:
        (wake,) = of(asked := scheduler.handle(ev.WakeUp(), now), de.WakeMeAt) or [None]
        now = now if wake is None else wake.at_s
        if of(asked, de.Reject):
            break
    assert 590.0 < now < 610.0


@pytest.mark.parametrize(("deadline", "is_taken"), [(1590.0, True), (1490.0, False)])
def test_a_deadline_that_the_told_speed_keeps_can_be_waited_for(
    make_job: Any, nodes: Any, deadline: float, is_taken: bool
) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    waits(scheduler, make_job)
    decided = scheduler.handle(ev.JobAmended("a", deadline_s=deadline), 495.0)
    assert bool(of(decided, de.Amended)) is is_taken


def test_who_was_measured_in_vain_gives_its_slots_up_and_waits_again(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(2))
    (first,) = of(submit(scheduler, make_job("b", steps=900, deadline=1050, curve={1: 1.0})), de.Resize)
    scheduler.handle(ev.GangStarted("b", first.placement), 0.0)
    told = {"steps": 1000, "deadline": 1050, "curve": {1: 1.0, 2: 1.5}, "on_reject": OnReject.WAIT}
    (resize,) = of(submit(scheduler, make_job("a", **told), 1.0), de.Resize)
    assert resize.purpose is de.Purpose.PROFILE
    decided = scheduler.handle(ev.JobMeasured("a", 1, 0.85), 20.0)
    assert [type(d) for d in decided if getattr(d, "job_id", "") == "a"] == [de.Suspend, de.Wait]
    state = scheduler.state("a")
    assert state is not None
    assert state.phase is Phase.WAITING


def run(scheduler: Scheduler, until: float, now: float) -> list[tuple[float, de.Decision]]:
    """Let time pass: wake when the plan asks for it."""
    told: list[tuple[float, de.Decision]] = []
    while now < until:
        decided = scheduler.handle(ev.WakeUp(), now)
        told += [(now, decision) for decision in decided]
        wakes = [wake.at_s for wake in of(decided, de.WakeMeAt)]
        now = min([until, *wakes])
    return told


def test_a_crowd_that_waits_is_tried_on_the_slots_that_there_are(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    waits(scheduler, make_job)
    for number in range(200):
        submit(scheduler, make_job(f"more{number}", **WAITS), 2.0)
    assert len(of(scheduler.handle(ev.JobFinished("b"), 500.0), de.Resize)) == 1
    told = [decision for _, decision in run(scheduler, 520.0, 500.0)]
    assert of(told, de.Resize) == of(told, de.Reject) == []
    assert sum(state.phase is Phase.PROFILING for state in scheduler.states()) == 1


@pytest.mark.parametrize("count", [3, 250])
def test_a_crowd_of_submissions_is_no_deeper_than_one(make_job: Any, nodes: Any, count: int) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    decided = scheduler.submitted([make_job(f"job{number}", **TIGHT) for number in range(count)], 0.0)
    told = decided + [decision for _, decision in run(scheduler, 30.0, 0.0)]
    assert len(of(told, de.Reject)) == count - 1


def test_who_waits_is_measured_once_best_effort_has_left(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    submit(scheduler, make_job("b", steps=500, deadline=600, curve={1: 1.0}))
    submit(scheduler, make_job("spare", steps=10_000, deadline=None, curve={1: 1.0}), 0.5)
    assert of(submit(scheduler, make_job("a", **WAITS), 1.0), de.Wait)
    scheduler.handle(ev.JobFinished("b"), 500.0)
    assert of([decision for _, decision in run(scheduler, 549.0, 500.0)], de.Resize) == []
    decided = scheduler.handle(ev.JobCancelled("spare"), 550.0)
    assert [(d.job_id, d.purpose) for d in of(decided, de.Resize)] == [("a", de.Purpose.PROFILE)]


def test_the_next_who_waits_is_measured_when_the_first_was_too_slow(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    waits(scheduler, make_job)
    submit(scheduler, make_job("next", **WAITS), 2.0)
    (resize,) = of(scheduler.handle(ev.JobFinished("b"), 500.0), de.Resize)
    first, other = resize.job_id, {"a": "next", "next": "a"}[resize.job_id]
    scheduler.handle(ev.GangStarted(first, resize.placement), 500.0)
    decided = scheduler.handle(ev.JobMeasured(first, 1, 0.85), 520.0)
    assert [d.job_id for d in of(decided, de.Reject)] == [first]
    (wake,) = of(decided, de.WakeMeAt)
    assert wake.at_s < 521.0
    assert [d.job_id for d in of(scheduler.handle(ev.WakeUp(), wake.at_s), de.Resize)] == [other]


def test_nobody_waits_to_be_measured_at_a_size_that_cannot_be(make_job: Any, nodes: Any) -> None:
    scheduler = Scheduler(SERVED, nodes(1))
    waits(scheduler, make_job)
    scheduler.handle(ev.JobFinished("b"), 480.0)
    decided = scheduler.handle(ev.JobMeasured("a", 1, None, failed=True), 490.0)
    assert of(decided, de.Reject)
