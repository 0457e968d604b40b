"""Each event by example: given these events, expect these decisions. Numbers are computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.decider import Decider
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Node, OnReject, Phase, Placement, RescaleCosts, Slot


def of(decisions: list, kind: type) -> list:
    return [d for d in decisions if isinstance(d, kind)]


def only(decisions: list, kind: type):
    (found,) = of(decisions, kind) or [None]
    assert found is not None, decisions
    return found


def sizes(decisions: list) -> dict[str, int]:
    return {d.job_id: d.placement.workers for d in of(decisions, de.Resize)}


# -- submission -----------------------------------------------------------------------------------------------------


def test_the_plan_of_an_admission_pays_start_up_and_tail(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    admitted = only(
        scheduler.handle(ev.JobSubmitted(make_job(steps=100, deadline=160, startup=13, tail=7)), 10.0), de.Admit
    )
    (segment,) = admitted.plan.segments
    assert (segment.start_s, segment.end_s, segment.workers, segment.lost_s) == (10.0, 123.0, 1, 13.0)
    assert (admitted.plan.finish_s, admitted.plan.promised_s) == (123.0, 130.0)
    assert admitted.deadline_s == 160


def test_a_deadline_that_only_start_up_and_tail_break_is_rejected_with_an_offer(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    job = make_job(steps=100, deadline=119, startup=13, tail=7)
    rejected = only(scheduler.handle(ev.JobSubmitted(job), 0.0), de.Reject)
    assert rejected.earliest_deadline_s == 120.0
    assert "hopeless" in str(rejected.reason)
    assert scheduler.states() == ()
    only(scheduler.handle(ev.JobSubmitted(replace(job, deadline_s=120.0)), 0.0), de.Admit)


def test_a_rejection_names_what_is_missing_and_when(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    scheduler.handle(ev.JobSubmitted(make_job("first", steps=240, deadline=110)), 0.0)
    rejected = only(scheduler.handle(ev.JobSubmitted(make_job("second", steps=150, deadline=110)), 0.0), de.Reject)
    assert "needs 2 workers for 1 min 34 s" in str(rejected.reason)
    assert "before 1970-01-01 00:01:50 UTC" in str(rejected.reason)
    assert "beside the 1 promised jobs" in str(rejected.reason)
    assert rejected.earliest_deadline_s is not None


def test_alone_on_the_cluster_a_job_gets_all_of_it_at_once(make_job, nodes) -> None:
    decisions = Scheduler(nodes=nodes(4)).handle(ev.JobSubmitted(make_job(pause=13)), 0.0)
    assert sizes(decisions) == {"a": 4}


def test_a_job_grows_only_when_that_repays_its_pause(make_job, nodes) -> None:
    for remaining, grows in [(90, True), (40, False)]:
        scheduler = Scheduler(nodes=nodes(2))
        curve = {1: 1.0, 2: 1.6}
        scheduler.handle(ev.JobSubmitted(make_job("short", steps=50, deadline=60, max_workers=1)), 0.0)
        job = make_job("long", steps=50 + remaining, deadline=400, curve=curve, pause=13)
        decisions = scheduler.handle(ev.JobSubmitted(job), 0.0)
        assert scheduler.states()[1].placement.workers == 1, decisions
        decisions = scheduler.handle(ev.JobFinished("short"), 50.0)
        if grows:  # 90 s become 13 + 90 / 1.6 = 69 s
            assert sizes(decisions) == {"long": 2}
            assert "saves 21 s beyond the pause of 13 s" in str(only(decisions, de.Resize).reason)
            assert scheduler.projected_finish_s("long") == pytest.approx(119.25)
        else:  # 40 s become 38 s: not worth it
            assert sizes(decisions) == {}


def test_growth_is_weighed_by_a_prediction_and_the_plan_is_not(make_job, nodes) -> None:
    for expected, grows in [(None, True), (80, True), (40, False)]:
        scheduler = Scheduler(nodes=nodes(2))
        scheduler.handle(ev.JobSubmitted(make_job("short", steps=50, deadline=60, max_workers=1)), 0.0)
        job = make_job("long", steps=140, deadline=400, curve={1: 1.0, 2: 1.6}, pause=13)
        scheduler.handle(ev.JobSubmitted(job), 0.0)
        told = ev.JobProgressed("long", remaining_steps=91, expected_steps=expected and expected + 1)
        assert sizes(scheduler.handle(told, 49.0)) == {}
        assert scheduler.projected_finish_s("long") == pytest.approx(50 + (expected or 90))
        assert scheduler.plan_of("long").finish_s == pytest.approx(140.0), "what is booked is the upper bound"
        decisions = scheduler.handle(ev.JobFinished("short"), 50.0)
        assert sizes(decisions) == ({"long": 2} if grows else {})


def test_a_prediction_that_has_come_true_does_not_shrink_the_job_before_it_says_so(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(2))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=300, curve={1: 1.0, 2: 1.6}, deadline=400, pause=5)), 0.0)
    assert scheduler.states()[0].placement.workers == 2
    told = ev.JobProgressed("a", remaining_steps=200, expected_steps=1)
    assert sizes(scheduler.handle(told, 60.0)) == {}
    assert sizes(scheduler.handle(ev.WakeUp(), 70.0)) == {}
    assert scheduler.states()[0].expected_steps == pytest.approx(1.0)
    assert scheduler.plan_of("a").finish_s == pytest.approx(60 + 200 / 1.6)


def test_a_restored_scheduler_knows_the_prediction(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=300, deadline=400)), 0.0)
    scheduler.handle(ev.JobProgressed("a", remaining_steps=250, expected_steps=100), 50.0)
    again = Scheduler(nodes=nodes(1))
    again.restore(scheduler.states(), 60.0)
    assert again.projected_finish_s("a") == pytest.approx(150.0)


def test_a_gang_leaves_a_slow_slot_and_its_curve_is_what_it_would_be_without(make_job, nodes) -> None:
    scheduler = Scheduler(SchedulerConfig(), nodes(4))
    job = make_job("a", steps=300, curve={1: 1.0, 2: 1.6}, deadline=400, pause=5, max_workers=2)
    scheduler.handle(ev.JobSubmitted(job), 0.0)
    slow, _ = scheduler.states()[0].placement.slots
    scheduler.handle(ev.JobProgressed("a", remaining_steps=270, steps_per_s=0.8), 40.0)
    decisions = scheduler.handle(ev.SlotSlow("a", slow, until_s=700.0, gain=2.0), 50.0)
    moved = only(decisions, de.Resize).placement
    assert moved.workers == 2
    assert slow not in moved.slots
    (state,) = scheduler.states()
    assert dict(state.job.curve.steps_per_s) == pytest.approx({1: 1.0, 2: 1.6})
    assert scheduler.nodes()[0].avoided == {slow.index: 700.0}


def test_an_avoided_slot_is_planned_on_again_from_its_time_on(make_job, nodes) -> None:
    (node,) = nodes(2)
    scheduler = Scheduler(nodes=[replace(node, avoided={0: 100.0})])
    soon = make_job("soon", steps=100, curve={2: 1.0}, min_workers=2, deadline=190)
    rejected = only(scheduler.handle(ev.JobSubmitted(soon), 0.0), de.Reject)
    assert rejected.earliest_deadline_s == 200.0
    assert only(scheduler.handle(ev.JobSubmitted(replace(soon, deadline_s=200.0)), 0.0), de.Admit).plan is not None
    assert sizes(scheduler.handle(ev.WakeUp(), 100.0)) == {"soon": 2}


def test_a_newcomer_gets_a_worker_before_others_have_luxury(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(2))
    curve = {1: 1.0, 2: 1.6}
    assert sizes(scheduler.handle(ev.JobSubmitted(make_job("a", steps=300, curve=curve, pause=5)), 0.0)) == {"a": 2}
    decisions = scheduler.handle(ev.JobSubmitted(make_job("b", steps=300, curve=curve, pause=5)), 10.0)
    assert sizes(decisions) == {"a": 1, "b": 1}
    assert decisions.index(of(decisions, de.Resize)[0]) < decisions.index(of(decisions, de.Resize)[1])
    assert of(decisions, de.Resize)[0].job_id == "a"  # slots are given up before they are taken


def test_growth_gives_way_to_a_promise(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    assert sizes(scheduler.handle(ev.JobSubmitted(make_job("a", steps=300, deadline=600, pause=5)), 0.0)) == {"a": 4}
    decisions = scheduler.handle(ev.JobSubmitted(make_job("b", steps=150, deadline=110, pause=5)), 10.0)
    only(decisions, de.Admit)
    assert sizes(decisions)["b"] >= 2
    assert scheduler.plan_of("a").promised_s <= 600
    assert scheduler.plan_of("b").promised_s <= 110


def test_one_id_lives_once(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job()), 0.0)
    with pytest.raises(ValueError, match="'a' is live already"):
        scheduler.handle(ev.JobSubmitted(make_job()), 1.0)


def test_on_reject_best_effort_wait_and_renegotiate(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("first", steps=100, deadline=110)), 0.0)
    best = only(
        scheduler.handle(ev.JobSubmitted(make_job("b", deadline=150, on_reject=OnReject.BEST_EFFORT)), 0.0), de.Admit
    )
    assert best.terms is de.Terms.BEST_EFFORT
    assert best.deadline_s is None
    terms = make_job("r", steps=50, deadline=120, on_reject=OnReject.RENEGOTIATE, latest_deadline_s=200.0)
    renegotiated = only(scheduler.handle(ev.JobSubmitted(terms), 0.0), de.Admit)
    assert renegotiated.terms is de.Terms.RENEGOTIATED
    assert renegotiated.deadline_s == 150.0
    decisions = scheduler.handle(ev.JobSubmitted(make_job("w", steps=30, deadline=100, on_reject=OnReject.WAIT)), 1.0)
    assert only(decisions, de.Wait).until_s == 70.0
    assert scheduler.states()[-1].phase is Phase.WAITING
    assert only(decisions, de.WakeMeAt).at_s == 70.0
    admitted = only(scheduler.handle(ev.JobCancelled("first"), 20.0), de.Admit)
    assert admitted.job_id == "w"


def test_a_soft_deadline_is_promised_late_for_what_is_left_of_its_value(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("first", steps=100, deadline=110)), 0.0)
    soft = make_job("soft", steps=50, deadline=120, on_reject=OnReject.LATE, latest_deadline_s=200.0, value=4.0)
    assert [soft.value_at(end) for end in (0.0, 120.0, 160.0, 200.0, 300.0)] == [4.0, 4.0, 2.0, 0.0, 0.0]
    admitted = only(scheduler.handle(ev.JobSubmitted(soft), 0.0), de.Admit)
    assert (admitted.terms, admitted.deadline_s) == (de.Terms.RENEGOTIATED, 150.0)
    assert " instead, for 62% of its value: " in str(admitted.reason)
    (_, state) = scheduler.states()
    assert (state.job.deadline_s, state.job.asked_deadline_s, state.job.value_at(150.0)) == (150.0, 120.0, 2.5)
    scheduler.handle(ev.JobAmended("soft", deadline_s=170.0), 1.0)
    assert scheduler.states()[1].job.asked_deadline_s is None, "what its author asks for now"
    never = make_job("never", steps=50, deadline=120, on_reject=OnReject.LATE, latest_deadline_s=149.0)
    assert only(scheduler.handle(ev.JobSubmitted(never), 2.0), de.Reject).earliest_deadline_s > 149.0


def test_who_waited_in_vain_is_rejected_when_it_is_hopeless(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("first", steps=100, deadline=110)), 0.0)
    scheduler.handle(ev.JobSubmitted(make_job("w", steps=30, deadline=100, on_reject=OnReject.WAIT)), 0.0)
    assert only(scheduler.handle(ev.WakeUp(), 70.0), de.Reject).job_id == "w"


def test_a_past_deadline_and_an_impossible_size_are_refused_in_words(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(3, 3))
    past = only(scheduler.handle(ev.JobSubmitted(make_job(deadline=5.0)), 10.0), de.Reject)
    assert "is past" in str(past.reason)
    big = only(scheduler.handle(ev.JobSubmitted(make_job(min_workers=4)), 10.0), de.Reject)
    assert "largest block of the cluster is 2 slots" in str(big.reason)  # 3 + 3 slots hold no gang of 4
    assert big.earliest_deadline_s is None


# -- progress and reality -------------------------------------------------------------------------------------------


def test_a_slower_job_that_no_longer_fits_is_reported_once_and_vetoes_nobody(make_job, nodes) -> None:
    scheduler = Scheduler(SchedulerConfig(), nodes(2))
    curve = {1: 1.0}
    scheduler.handle(ev.JobSubmitted(make_job("slow", steps=100, deadline=110, curve=curve)), 0.0)
    decisions = scheduler.handle(ev.JobProgressed("slow", 75.0, steps_per_s=0.5), 50.0)
    risk = only(decisions, de.AtRisk)
    assert risk.projected_s == pytest.approx(200.0)
    assert "after the deadline" in str(risk.reason)
    assert of(scheduler.handle(ev.JobProgressed("slow", 70.0, steps_per_s=0.5), 60.0), de.AtRisk) == []
    only(scheduler.handle(ev.JobSubmitted(make_job("new", steps=50, deadline=120, curve=curve)), 60.0), de.Admit)
    only(scheduler.handle(ev.JobProgressed("slow", 20.0, steps_per_s=1.0), 70.0), de.OnTrack)


def test_small_deviations_change_nothing(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(2))
    scheduler.handle(ev.JobSubmitted(make_job(steps=160, curve={1: 1.0, 2: 1.6})), 0.0)
    decisions = scheduler.handle(ev.JobProgressed("a", 80.5), 50.0)
    assert [type(d) for d in decisions] == [de.WakeMeAt]
    assert scheduler.projected_finish_s("a") == pytest.approx(100.3125)


def test_a_gang_that_starts_early_is_believed(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    resize = only(scheduler.handle(ev.JobSubmitted(make_job(steps=100, startup=30)), 0.0), de.Resize)
    assert scheduler.projected_finish_s("a") == 130.0
    scheduler.handle(ev.GangStarted("a", resize.placement), 12.0)
    assert scheduler.projected_finish_s("a") == 112.0


@pytest.mark.parametrize("starts_reported", [False, True])
def test_a_start_under_way_is_not_begun_anew_whenever_slots_become_free(make_job, nodes, starts_reported) -> None:
    """Jobs that come and go more often than a start takes would keep this one from ever training."""
    scheduler = Scheduler(SchedulerConfig(starts_reported=starts_reported), nodes(2))
    long = make_job("long", steps=10_000, deadline=None, startup=30, curve={1: 1.0, 2: 2.0})
    begun = scheduler.handle(ev.JobSubmitted(long), 0.0)
    assert sizes(begun) == {"long": 2}
    told: list[de.Decision] = []
    for visit in range(5):
        now = 5.0 * visit
        brief = make_job(f"brief{visit}", steps=1000, deadline=None)
        told += scheduler.handle(ev.JobSubmitted(brief), now + 1.0)
        told += scheduler.handle(ev.JobCancelled(brief.job_id), now + 4.0)
    changes = [change for change in of(told, de.Resize) if change.job_id == "long"]
    assert [change.placement.workers for change in changes] == [1], "it makes room once, and its start goes on"
    wakes = [decision.at_s for decision in told if isinstance(decision, de.WakeMeAt)]
    if not starts_reported:
        assert wakes[-1] == 31.0, "it started at 1.0, with one worker"
        assert sizes(scheduler.handle(ev.WakeUp(), 31.0)) == {"long": 2}
        return
    assert sizes(scheduler.handle(ev.WakeUp(), 90.0)) == {}, "it takes longer than planned"
    assert sizes(scheduler.handle(ev.GangStarted("long", changes[0].placement), 95.0)) == {"long": 2}


def test_a_change_under_way_is_not_known_to_be_done_after_a_restart_of_the_service(make_job, nodes) -> None:
    config = SchedulerConfig(starts_reported=True)
    first = Scheduler(config, nodes(2))
    first.handle(ev.JobSubmitted(make_job("other", steps=1000, deadline=2000, max_workers=1)), 0.0)
    long = make_job("long", steps=10_000, deadline=None, startup=30, curve={1: 1.0, 2: 2.0})
    begun = first.handle(ev.JobSubmitted(long), 0.0)
    placement = only(begun, de.Resize).placement
    first.handle(ev.JobCancelled("other"), 1.0)
    (state,) = first.states()
    then = Scheduler(config, nodes(2))
    assert sizes(then.restore([state], 10.0)) == {}
    assert sizes(then.handle(ev.GangStarted("long", placement), 11.0)) == {"long": 2}
    then = Scheduler(config, nodes(2))
    assert sizes(then.restore([replace(state, started=True, no_progress_until_s=9.0)], 10.0)) == {"long": 2}


def test_what_is_heard_late_counts_from_when_it_was_true(make_job, nodes) -> None:
    """A service that is busy reads reports that are seconds old: nobody is late for that."""
    scheduler = Scheduler(nodes=nodes(1))
    resize = only(scheduler.handle(ev.JobSubmitted(make_job(steps=100, startup=30, deadline=131)), 0.0), de.Resize)
    decisions = scheduler.handle(ev.GangStarted("a", resize.placement, at_s=30.0), 38.0)
    decisions += scheduler.handle(ev.JobProgressed("a", 90.0, at_s=40.0), 47.0)
    assert [type(d) for d in decisions] == [de.WakeMeAt] * 2
    assert scheduler.projected_finish_s("a") == 130.0
    scheduler.handle(ev.JobProgressed("a", 85.0, at_s=47.0), 50.0)  # two steps behind
    assert scheduler.projected_finish_s("a") == 132.0


@pytest.mark.parametrize("at_s", [-1e9, 1e9])
def test_no_time_in_a_report_moves_a_job_beyond_what_is_possible(make_job, nodes, at_s) -> None:
    """Steps are made between the start of the gang and now, whatever a clock elsewhere says."""
    scheduler = Scheduler(nodes=nodes(1))
    resize = only(scheduler.handle(ev.JobSubmitted(make_job(steps=100, startup=30)), 0.0), de.Resize)
    scheduler.handle(ev.GangStarted("a", resize.placement, at_s=at_s), 20.0)
    assert scheduler.projected_finish_s("a") == (100.0 if at_s < 0 else 120.0)
    scheduler.handle(ev.JobProgressed("a", 60.0, at_s=at_s), 50.0)
    assert scheduler.projected_finish_s("a") == (60.0 if at_s < 0 else 110.0)


def test_a_lost_gang_starts_again_and_keeps_its_promise(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job(steps=100, deadline=300, startup=10)), 0.0)
    decisions = scheduler.handle(ev.GangLost("a"), 60.0)
    assert sizes(decisions) == {"a": 1}
    assert scheduler.projected_finish_s("a") == pytest.approx(120.0)  # 50 done, start-up again
    assert of(decisions, de.AtRisk) == []


def test_those_that_end_together_leave_room_that_is_planned_once(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    for name in ("a", "b", "c"):
        scheduler.handle(ev.JobSubmitted(make_job(name, deadline=None)), 0.0)
    assert sum(state.placement.workers for state in scheduler.states()) == 4
    decisions = scheduler.ended([ev.JobFinished("a"), ev.JobCancelled("gone"), ev.JobFailed("b")], 5.0)
    assert [state.job.job_id for state in scheduler.states()] == ["c"]
    assert sizes(decisions) == {"c": 4}
    assert "a has left, and 1 more" in str(only(decisions, de.Resize).reason)
    assert of(scheduler.ended([ev.JobFinished("a")], 6.0), de.Resize) == []


def test_who_starts_and_whose_start_cost_more_than_planned_is_planned_once(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(2))
    curve, costs = {1: 1.0}, RescaleCosts(startup_s=20.0)
    starts = [
        only(scheduler.handle(ev.JobSubmitted(make_job(name, deadline=900, curve=curve, startup=10)), 0.0), de.Resize)
        for name in ("a", "b")
    ]
    reports: list[ev.Reported] = [ev.GangStarted(one.job_id, one.placement) for one in starts]
    reports += [ev.JobMeasured(one.job_id, 1, None, costs) for one in starts]
    decisions = scheduler.reported(reports, 20.0)
    assert len(of(decisions, de.WakeMeAt)) == 1
    for state in scheduler.states():
        assert state.job.costs == costs
        assert scheduler.projected_finish_s(state.job.job_id) == pytest.approx(120.0)  # none of 100 steps done at 20 s


def test_owners_that_leave_and_come_back_together_are_planned_with_once(make_job, nodes, monkeypatch) -> None:
    """When Airflow is away, nobody asks for any job: with 500, a plan for each took a quarter of a minute."""
    scheduler, plans = Scheduler(nodes=nodes(8)), []
    names = [f"j{number}" for number in range(20)]
    for number, name in enumerate(names):
        only(scheduler.handle(ev.JobSubmitted(make_job(name, deadline=500.0 + 10 * number)), 0.0), de.Admit)
    held = {state.job.job_id: state.placement.workers for state in scheduler.states()}
    real = Decider._plan_again
    monkeypatch.setattr(
        Decider, "_plan_again", lambda self, *given, **more: plans.append(1) or real(self, *given, **more)
    )
    gone = scheduler.owners_changed([ev.JobParked(name) for name in names], 10.0)
    assert {decision.job_id for decision in of(gone, de.Suspend)} == {name for name, size in held.items() if size}
    assert scheduler.owners_changed([ev.JobParked(name) for name in names], 11.0) == []
    scheduler.owners_changed([ev.JobUnparked(name) for name in [*names, "of nobody"]], 12.0)
    assert len(plans) == 2
    states = scheduler.states()
    assert sum(state.placement.workers for state in states) == 8
    assert all(state.phase is Phase.ADMITTED and not state.at_risk and state.reserved for state in states)


def test_nodes_that_change_together_are_planned_with_together(make_job, nodes) -> None:
    """One by one, a job was put onto a node whose slot was still said to be free, and taken off it again."""
    avoided = [replace(node, avoided={0: 10.0}) for node in nodes(1, 1)]
    later = [ev.NodeJoined(replace(node, avoided={0: 70.0})) for node in avoided]
    one_by_one, together = Scheduler(nodes=avoided), Scheduler(nodes=avoided)
    for scheduler in (one_by_one, together):
        scheduler.handle(ev.JobSubmitted(make_job(deadline=None)), 0.0)
    told = [decision for change in later for decision in one_by_one.handle(change, 10.5)]
    assert [type(one) for one in told if isinstance(one, de.Resize | de.Suspend)] == [de.Resize, de.Suspend]
    assert not [one for one in together.nodes_changed(later, 10.5) if isinstance(one, de.Resize | de.Suspend)]
    assert together.states()[0].placement == one_by_one.states()[0].placement == Placement()


def test_survivors_go_on_and_the_plan_makes_the_gang_whole_again(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    curve = {1: 1.0, 2: 1.6, 4: 2.5}
    job = make_job(steps=500, deadline=400, curve=curve, pause=2)
    whole = only(scheduler.handle(ev.JobSubmitted(job), 0.0), de.Resize).placement
    scheduler.handle(ev.GangStarted("a", whole), 0.0)
    survivors = Placement(whole.slots[2:])
    decisions = scheduler.handle(ev.GangReformed("a", survivors), 20.0)
    again = only(decisions, de.Resize)
    assert set(again.placement.slots) == set(whole.slots)
    (state,) = scheduler.states()
    assert state.remaining_steps == pytest.approx(450)
    assert state.no_progress_until_s == 22.0, "a pause, no start-up"
    assert scheduler.projected_finish_s("a") == pytest.approx(20 + 2 + 450 / 2.5)


def test_survivors_go_on_as_they_are_where_growing_does_not_repay_its_pause(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(2))
    job = make_job(steps=160, deadline=None, curve={1: 1.0, 2: 1.6}, pause=40)
    whole = only(scheduler.handle(ev.JobSubmitted(job), 0.0), de.Resize).placement
    survivor = Placement(whole.slots[1:])
    assert sizes(scheduler.handle(ev.GangReformed("a", survivor), 60.0)) == {}
    assert scheduler.states()[0].placement == survivor
    assert scheduler.projected_finish_s("a") == pytest.approx(60 + (160 - 60 * 1.6))


def test_slots_that_another_job_has_got_are_not_given_back(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(2))
    curve = {1: 1.0, 2: 1.6}
    whole = only(scheduler.handle(ev.JobSubmitted(make_job("a", curve=curve, pause=5)), 0.0), de.Resize).placement
    scheduler.handle(ev.JobSubmitted(make_job("b", curve=curve, pause=5)), 10.0)
    before = scheduler.states()
    assert [state.placement.workers for state in before] == [1, 1]
    assert sizes(scheduler.handle(ev.GangReformed("a", whole), 12.0)) == {}
    assert scheduler.states() == before


def test_a_measurement_that_lost_a_worker_is_begun_again(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(2))
    first = only(scheduler.handle(ev.JobSubmitted(make_job(curve=None, deadline=900)), 0.0), de.Resize)
    assert (first.purpose, first.placement.workers) == (de.Purpose.PROFILE, 1)
    second = only(scheduler.handle(ev.JobMeasured("a", 1, 1.0), 10.0), de.Resize)
    assert second.placement.workers == 2
    again = only(scheduler.handle(ev.GangReformed("a", Placement(second.placement.slots[1:])), 12.0), de.Resize)
    assert (again.purpose, again.placement.workers) == (de.Purpose.PROFILE, 2)


# -- amendments, parking, ending ------------------------------------------------------------------------------------


def test_an_earlier_deadline_is_verified_and_the_old_one_holds_otherwise(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job(steps=100, deadline=300)), 0.0)
    refused = only(scheduler.handle(ev.JobAmended("a", deadline_s=90.0), 10.0), de.AmendRejected)
    assert refused.earliest_deadline_s == pytest.approx(100.0)
    assert scheduler.states()[0].job.deadline_s == 300
    amended = only(scheduler.handle(ev.JobAmended("a", deadline_s=120.0, value=3.0), 10.0), de.Amended)
    assert (amended.deadline_s, amended.value) == (120.0, 3.0)
    assert amended.plan.promised_s == pytest.approx(100.0)
    assert only(scheduler.handle(ev.JobAmended("a", deadline_s=500.0), 20.0), de.Amended).deadline_s == 500.0
    assert only(scheduler.handle(ev.JobAmended("a", best_effort=True), 20.0), de.Amended).deadline_s is None


@pytest.fixture
def beside_who_waits(make_job, nodes) -> Scheduler:
    """One slot, promised until 100; and "w", which would need 30 of the 100 seconds until its deadline."""
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("first", steps=100, deadline=110)), 0.0)
    waits = make_job("w", steps=30, deadline=100, on_reject=OnReject.WAIT)
    only(scheduler.handle(ev.JobSubmitted(waits), 0.0), de.Wait)
    return scheduler


def test_who_waits_and_has_another_deadline_is_answered_anew(beside_who_waits) -> None:
    decisions = beside_who_waits.handle(ev.JobAmended("w", deadline_s=120.0), 10.0)
    assert only(decisions, de.Amended).deadline_s == 120.0
    wait = only(decisions, de.Wait)
    assert wait.until_s == 90.0
    assert "before 1970-01-01 00:02 UTC" in str(wait.reason)
    decisions = beside_who_waits.handle(ev.JobAmended("w", deadline_s=131.0), 10.0)
    assert only(decisions, de.Admit).deadline_s == 131.0


def test_who_waits_is_not_rejected_for_an_amendment_that_is_hopeless(beside_who_waits) -> None:
    decisions = beside_who_waits.handle(ev.JobAmended("w", deadline_s=35.0), 10.0)
    assert only(decisions, de.AmendRejected).earliest_deadline_s is not None
    assert of(decisions, de.Reject) == []
    assert beside_who_waits.states()[1].job.deadline_s == 100.0
    assert only(beside_who_waits.handle(ev.JobCancelled("first"), 20.0), de.Admit).deadline_s == 100.0


def test_who_waits_is_asked_for_again_however_often_others_report(make_job, nodes) -> None:
    scheduler = Scheduler(SchedulerConfig(waiting_retry_s=60.0), nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("first", steps=1000, deadline=1010)), 0.0)
    scheduler.handle(ev.JobSubmitted(make_job("w", steps=30, deadline=1000, on_reject=OnReject.WAIT)), 0.0)
    for now in range(7, 70, 7):
        wake = only(scheduler.handle(ev.JobProgressed("first", 1000.0 - now, steps_per_s=1.0), float(now)), de.WakeMeAt)
        assert wake.at_s == (60.0 if now < 60 else pytest.approx(now, abs=0.001))
    assert only(scheduler.handle(ev.WakeUp(), 64.0), de.WakeMeAt).at_s == 124.0


def test_a_deadline_within_the_margin_is_not_called_past(make_job, nodes) -> None:
    scheduler = Scheduler(SchedulerConfig(deadline_margin_s=20.0), nodes(1))
    refused = only(scheduler.handle(ev.JobSubmitted(make_job(steps=1, deadline=25.0)), 10.0), de.Reject)
    assert str(refused.reason).startswith("hopeless: promises are kept 20 s early, and 15 s are left before 1970-")


def test_a_parked_job_may_give_up_the_deadline_that_was_never_decided_on(make_job, nodes, beside_who_waits) -> None:
    beside_who_waits.handle(ev.JobParked("w"), 5.0)
    assert only(beside_who_waits.handle(ev.JobAmended("w", best_effort=True), 10.0), de.Amended).deadline_s is None
    beside_who_waits.handle(ev.JobUnparked("w"), 20.0)
    assert sizes(beside_who_waits.handle(ev.JobCancelled("first"), 30.0)) == {"w": 1}
    measured = Scheduler(nodes=nodes(1))
    measured.handle(ev.JobSubmitted(make_job(curve=None, deadline=900)), 0.0)
    measured.handle(ev.JobParked("a"), 5.0)
    measured.handle(ev.JobAmended("a", best_effort=True), 10.0)
    resize = only(measured.handle(ev.JobUnparked("a"), 20.0), de.Resize)
    assert resize.purpose is de.Purpose.TRAIN


def test_a_parked_job_holds_nothing_and_competes_again(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job(steps=100, deadline=300)), 0.0)
    assert only(scheduler.handle(ev.JobParked("a"), 40.0), de.Suspend).job_id == "a"
    assert scheduler.states()[0].phase is Phase.PARKED
    assert sizes(scheduler.handle(ev.JobUnparked("a"), 100.0)) == {"a": 1}
    assert scheduler.projected_finish_s("a") == pytest.approx(160.0)
    scheduler.handle(ev.JobParked("a"), 110.0)
    only(scheduler.handle(ev.JobUnparked("a"), 280.0), de.AtRisk)


def test_unknown_jobs_are_ignored(nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    for event in (ev.JobFinished("x"), ev.JobCancelled("x"), ev.GangLost("x"), ev.JobProgressed("x", 1.0)):
        assert scheduler.handle(event, 0.0) == []
    with pytest.raises(KeyError, match="no live job 'x'"):
        scheduler.plan_of("x")


# -- nodes ----------------------------------------------------------------------------------------------------------


def test_a_lost_node_moves_its_job_elsewhere(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(2, 2))
    scheduler.handle(ev.JobSubmitted(make_job(steps=100, deadline=400, curve={1: 1.0, 2: 1.5}, startup=10)), 0.0)
    before = scheduler.states()[0].placement.slots[0].node_id
    decisions = scheduler.handle(ev.NodeLost(before), 30.0)
    after = only(decisions, de.Resize).placement
    assert {slot.node_id for slot in after.slots} == {"n000", "n001"} - {before}


def test_a_draining_node_is_left_before_it_goes(make_job) -> None:
    scheduler = Scheduler(nodes=[Node(node_id="a", slots=1), Node(node_id="b", slots=1)])
    resize = only(
        scheduler.handle(ev.JobSubmitted(make_job(steps=100, deadline=400, curve={1: 1.0}, pause=5)), 0.0), de.Resize
    )
    home = resize.placement.slots[0].node_id
    decisions = scheduler.handle(ev.NodeDraining(home, 60.0), 10.0)
    while not of(decisions, de.Resize):
        decisions = scheduler.handle(ev.WakeUp(), only(decisions, de.WakeMeAt).at_s)
    moved = only(decisions, de.Resize)
    assert moved.placement.slots[0].node_id != home
    assert scheduler.projected_finish_s("a") == pytest.approx(105.0)


def test_busy_slots_are_never_given(make_job) -> None:
    scheduler = Scheduler(nodes=[Node(node_id="a", slots=4, busy=frozenset({0}))])
    placed = only(scheduler.handle(ev.JobSubmitted(make_job(pause=1)), 0.0), de.Resize).placement
    assert set(placed.slots) == {Slot("a", 2), Slot("a", 3)}  # the only block of two that is whole
    decisions = scheduler.handle(ev.NodeJoined(Node(node_id="a", slots=4)), 5.0)
    assert only(decisions, de.Resize).placement.workers == 4


def test_capacity_that_joins_serves_who_waits(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("first", steps=100, deadline=110)), 0.0)
    scheduler.handle(ev.JobSubmitted(make_job("w", steps=80, deadline=100, on_reject=OnReject.WAIT)), 0.0)
    decisions = scheduler.handle(ev.NodeJoined(Node(node_id="more", slots=1)), 10.0)
    assert only(decisions, de.Admit).job_id == "w"


def test_without_nodes_nothing_runs_and_nothing_breaks(make_job) -> None:
    scheduler = Scheduler()
    assert "0 slots" in str(only(scheduler.handle(ev.JobSubmitted(make_job()), 0.0), de.Reject).reason)
    only(scheduler.handle(ev.JobSubmitted(make_job(deadline=None)), 0.0), de.Admit)
    assert sizes(scheduler.handle(ev.NodeJoined(Node(node_id="a", slots=2)), 5.0)) == {"a": 2}


# -- best effort ----------------------------------------------------------------------------------------------------


def test_best_effort_takes_turns_so_that_nobody_starves(make_job, nodes) -> None:
    scheduler = Scheduler(SchedulerConfig(ageing_s=100.0), nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("a", steps=1e6, deadline=None)), 0.0)
    decisions = scheduler.handle(ev.JobSubmitted(make_job("b", steps=1e6, deadline=None)), 0.0)
    holders, now = [], 0.0
    for _ in range(6):
        now = only(decisions, de.WakeMeAt).at_s
        decisions = scheduler.handle(ev.WakeUp(), now)
        holders += sizes(decisions)
    assert now <= 700.0
    assert {"a", "b"} <= set(holders)


def test_newcomers_do_not_push_away_the_turn_of_who_waited_too_long(make_job, nodes) -> None:
    scheduler = Scheduler(SchedulerConfig(ageing_s=100.0), nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("first", steps=150, deadline=160)), 0.0)
    scheduler.handle(ev.JobSubmitted(make_job("b", steps=80, deadline=None)), 0.0)
    decisions = scheduler.handle(ev.JobSubmitted(make_job("c", steps=50, deadline=220)), 120.0)
    only(decisions, de.Reject)  # b has waited 120 s and has the slot from 150 to 230
    only(scheduler.handle(ev.JobSubmitted(make_job("d", steps=50, deadline=300)), 120.0), de.Admit)


# -- restart --------------------------------------------------------------------------------------------------------


def test_restore_takes_the_stored_plan_over(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    for name in "abc":
        scheduler.handle(ev.JobSubmitted(make_job(name, steps=200, deadline=260, startup=10, pause=5, tail=2)), 0.0)
    again = Scheduler(nodes=nodes(4))
    decisions = again.restore(scheduler.states(), 50.0)
    assert sizes(decisions) == {}
    for name in "abc":
        assert again.projected_finish_s(name) == pytest.approx(scheduler.projected_finish_s(name))
    with pytest.raises(ValueError, match="no jobs yet"):
        again.restore(scheduler.states(), 50.0)


def test_a_twin_decides_what_the_scheduler_would_and_changes_nothing(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(2, 4))
    curve = {1: 1.0, 2: 1.8, 4: 3.0}
    for number, name in enumerate("abc"):
        scheduler.handle(ev.JobSubmitted(make_job(name, steps=300.0, deadline=260.0, curve=curve)), float(number))
    scheduler.handle(ev.JobProgressed("a", 250.0, steps_per_s=1.1), 20.0)
    before, twin = scheduler.states(), scheduler.twin()
    assert twin.states() == before
    events = [ev.JobFinished("b"), ev.NodeLost("n000"), ev.JobSubmitted(make_job("d", steps=50.0, deadline=900.0))]
    tried = [twin.handle(event, 30.0 + i) for i, event in enumerate(events)]
    assert scheduler.states() == before
    assert [scheduler.handle(event, 30.0 + i) for i, event in enumerate(events)] == tried
    assert scheduler.states() == twin.states()


def test_a_pause_that_is_under_way_at_a_restart_is_no_start(make_job, nodes) -> None:
    """Though nobody has said yet that its gang makes steps: another change now would make it pay the pause again."""
    scheduler = Scheduler(nodes=nodes(4))
    curve = {1: 1.0, 2: 2.0, 4: 4.0}
    first = make_job("first", steps=60.0, deadline=40.0, curve=curve, max_workers=2)
    second = make_job("second", steps=900.0, deadline=3000.0, curve=curve, pause=30.0)
    for job in (first, second):
        scheduler.handle(ev.JobSubmitted(job), 0.0)
    scheduler.handle(ev.JobFinished("first"), 30.0)
    (before,) = scheduler.states()
    assert (before.placement.workers, before.no_progress_until_s) == (4, 60.0)
    again = Scheduler(nodes=nodes(4))
    again.restore([before], 31.0)
    (after,) = again.states()
    assert (before.starting, after.starting) == (False, False)
    assert (after.placement, after.no_progress_until_s) == (before.placement, 60.0)


def test_restore_without_the_stored_plan_finds_one(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    for name in "abc":
        scheduler.handle(ev.JobSubmitted(make_job(name, steps=200, deadline=260, startup=10, pause=5, tail=2)), 0.0)
    again = Scheduler(nodes=nodes(4))
    decisions = again.restore([replace(state, reserved=()) for state in scheduler.states()], 50.0)
    assert of(decisions, de.AtRisk) == []
    assert all(again.plan_of(name).promised_s <= 260 for name in "abc")


@pytest.mark.parametrize(
    ("given", "largest"),
    [
        ({"curve": None, "min_workers": 4}, 2),
        ({"curve": {1: 1.0, 4: 2.0}, "min_workers": 3}, 2),
        ({"curve": {4: 2.0}, "explore": False}, 2),
    ],
)
def test_best_effort_that_fits_no_block_says_so_once_and_goes_on_when_the_cluster_grows(
    make_job, nodes, given, largest
) -> None:
    scheduler = Scheduler(nodes=nodes(2))
    decisions = scheduler.handle(ev.JobSubmitted(make_job(deadline=None, **given)), 0.0)
    waits = only(decisions, de.Wait)
    assert "waits for a larger cluster: no usable number of workers: it needs at least" in str(waits.reason)
    assert f"the largest block of the cluster is {largest} slots" in str(waits.reason)
    assert waits.until_s is None
    assert not of(scheduler.handle(ev.WakeUp(), 10.0), de.Wait)
    grown = scheduler.handle(ev.NodeJoined(Node(node_id="big", slots=4)), 20.0)
    assert only(grown, de.Resize).placement.workers == 4
    lost = scheduler.handle(ev.NodeLost("big"), 30.0)
    assert only(lost, de.Wait).job_id == "a"


def test_a_deadline_given_up_for_best_effort_that_fits_no_block_is_said(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=[*nodes(2), Node(node_id="big", slots=4)])
    only(scheduler.handle(ev.JobSubmitted(make_job(curve={4: 2.0}, explore=False)), 0.0), de.Admit)
    scheduler.handle(ev.NodeLost("big"), 10.0)
    assert "larger cluster" in str(only(scheduler.handle(ev.JobAmended("a", best_effort=True), 20.0), de.Wait).reason)


def test_slots_that_are_taken_from_outside_make_no_block(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=[Node(node_id="n", slots=2, busy=frozenset({1}))])
    decisions = scheduler.handle(ev.JobSubmitted(make_job(curve={2: 2.0}, deadline=None)), 0.0)
    assert "the largest block of the cluster is 1 slot" in str(only(decisions, de.Wait).reason)
    only(scheduler.handle(ev.NodeJoined(Node(node_id="n", slots=2)), 20.0), de.Resize)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_node_that_comes_back_smaller_shrinks_the_gang(make_job, nodes, slots) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    decisions = scheduler.handle(ev.JobSubmitted(make_job(steps=1000, deadline=None)), 0.0)
    assert only(decisions, de.Resize).placement.workers == 4
    shrunk = scheduler.handle(ev.NodeJoined(*nodes(slots)), 100.0)
    assert "gone: the node is smaller now" in str(only(shrunk, de.Suspend).reason)
    assert only(shrunk, de.Resize).placement.workers == min(2, slots)
    assert all(slot.index < slots for slot in scheduler.states()[0].placement.slots)


def test_a_node_that_comes_back_smaller_moves_the_gang_where_that_keeps_its_promise(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4, 4))
    job = make_job(steps=1000, deadline=450, curve={4: 2.4})
    before = only(scheduler.handle(ev.JobSubmitted(job), 0.0), de.Resize).placement
    (node_id,) = {slot.node_id for slot in before.slots}
    decisions = scheduler.handle(ev.NodeJoined(Node(node_id=node_id, slots=2)), 20.0)
    moved = only(decisions, de.Resize).placement
    assert moved.workers == 4
    assert node_id not in {slot.node_id for slot in moved.slots}
    assert not of(decisions, de.AtRisk)


def test_a_node_that_comes_back_too_small_suspends_the_gang(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    scheduler.handle(ev.JobSubmitted(make_job(steps=1000, curve={4: 2.4}, deadline=500)), 0.0)
    decisions = scheduler.handle(ev.NodeJoined(*nodes(2)), 20.0)
    only(decisions, de.Suspend)
    only(decisions, de.AtRisk)
    assert scheduler.states()[0].placement.workers == 0


def test_a_plan_that_holds_slots_which_came_back_no_more_is_made_anew(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    scheduler.handle(ev.JobSubmitted(make_job("now", steps=200, deadline=101, curve={4: 2.0})), 0.0)
    for name in ("one", "two"):
        only(scheduler.handle(ev.JobSubmitted(make_job(name, deadline=300, curve={2: 1.0})), 0.0), de.Admit)
    decisions = scheduler.handle(ev.NodeJoined(*nodes(2)), 10.0)
    assert [d.job_id for d in of(decisions, de.AtRisk)] == ["now"]
    assert sizes(decisions) == {"one": 2}
    assert scheduler.plan_of("two").promised_s <= 300.0


def test_a_node_that_is_smaller_after_a_restart_suspends_or_shrinks_the_gang(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    scheduler.handle(ev.JobSubmitted(make_job("shrinks", steps=1000, deadline=None)), 0.0)
    again = Scheduler(nodes=nodes(2))
    decisions = again.restore(scheduler.states(), 100.0)
    only(decisions, de.Suspend)
    assert only(decisions, de.Resize).placement.workers == 2


def test_who_grows_lacks_what_it_would_gain_until_its_workers_have_joined_and_who_shrinks_only_stands_still(
    make_job, nodes
) -> None:
    def grown(join_s: float) -> tuple[float, float]:
        scheduler = Scheduler(nodes=nodes(4))
        blocker = make_job("blocker", steps=100, deadline=101, curve={2: 1.0})
        scheduler.handle(ev.JobSubmitted(blocker), 0.0)
        job = make_job(steps=1000, deadline=None, curve={2: 1.0, 4: 2.0}, pause=0.05)
        job = replace(job, costs=replace(job.costs, join_s=join_s))
        scheduler.handle(ev.JobSubmitted(job), 0.0)
        grows = only(scheduler.handle(ev.JobFinished("blocker"), 100.0), de.Resize)
        assert "beyond the pause of 0.1 s" in str(grows.reason)
        finish = scheduler.plan_of("a").finish_s
        scheduler.handle(ev.JobProgressed("a", 800.0), 150.0)
        shrinks = scheduler.handle(ev.JobSubmitted(make_job("new", steps=100, deadline=301, curve={2: 1.0})), 150.0)
        (shrunk,) = [d for d in of(shrinks, de.Resize) if d.job_id == "a"]
        assert "(pause of 0.1 s)" in str(shrunk.reason)
        return finish, scheduler.state("a").no_progress_until_s

    assert grown(0.0) == pytest.approx((550.05, 150.05))
    assert grown(12.0) == pytest.approx((556.05, 150.05))


def test_who_waits_is_asked_for_with_all_orders_after_a_restart(make_job, nodes, monkeypatch) -> None:
    asked, ask = [], Decider.ask

    def noted(self, live, now, *, thorough=True):
        asked.append((live.job_id, thorough))
        return ask(self, live, now, thorough=thorough)

    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("now", steps=300, deadline=300, curve={1: 1.0})), 0.0)
    waits = make_job("later", steps=100, deadline=390, curve={1: 1.0}, on_reject=OnReject.WAIT)
    only(scheduler.handle(ev.JobSubmitted(waits), 0.0), de.Wait)
    monkeypatch.setattr(Decider, "ask", noted)
    Scheduler(nodes=nodes(1)).restore(scheduler.states(), 10.0)
    assert asked[0] == ("later", True)
