"""Jobs of unknown speed: measured on slots that no promise needs, then decided on."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.decider import Decider
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import OnReject, Phase


def only(decisions: list, kind: type):
    found = [d for d in decisions if isinstance(d, kind)]
    assert len(found) == 1, decisions
    return found[0]


def none_of(decisions: list, *kinds: type) -> None:
    assert not [d for d in decisions if isinstance(d, kinds)], decisions


def test_sizes_are_measured_one_after_another_and_then_the_job_is_admitted(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    first = only(scheduler.handle(ev.JobSubmitted(make_job(curve=None, steps=1000, deadline=2000)), 0.0), de.Resize)
    assert first.purpose is de.Purpose.PROFILE
    assert first.placement.workers == 1
    assert "no promise needs" in str(first.reason)
    assert scheduler.states()[0].phase is Phase.PROFILING

    second = only(scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0), de.Resize)
    assert (second.placement.workers, second.purpose) == (2, de.Purpose.PROFILE)
    scheduler.handle(ev.JobProgressed("a", 960.0), 40.0)
    third = only(scheduler.handle(ev.JobMeasured("a", 2, 1.8), 40.0), de.Resize)
    assert third.placement.workers == 4
    decisions = scheduler.handle(ev.JobMeasured("a", 4, 3.0), 60.0)
    admitted = only(decisions, de.Admit)
    assert admitted.terms is de.Terms.DEADLINE
    assert scheduler.states()[0].job.curve.steps_per_s == {1: 1.0, 2: 1.8, 4: 3.0}
    assert scheduler.states()[0].remaining_steps < 960.0  # its steps counted as training
    assert scheduler.states()[0].placement.workers == 4  # it goes on where it is: nobody else wants the slots


def test_profiling_stops_when_more_workers_are_not_faster(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(8))
    scheduler.handle(ev.JobSubmitted(make_job(curve=None, steps=100)), 0.0)
    scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0)
    only(scheduler.handle(ev.JobMeasured("a", 2, 1.0), 40.0), de.Admit)


def test_a_size_that_fails_is_left_out_and_all_failing_is_a_rejection_that_says_what_to_give(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(2))
    scheduler.handle(ev.JobSubmitted(make_job(curve=None)), 0.0)
    assert only(scheduler.handle(ev.JobMeasured("a", 1, None, failed=True), 5.0), de.Resize).placement.workers == 2
    rejected = only(scheduler.handle(ev.JobMeasured("a", 2, None, failed=True), 9.0), de.Reject)
    assert "scaling_curve=" in str(rejected.reason)
    assert scheduler.states() == ()


def test_too_slow_a_measurement_counts_as_failed(make_job, nodes) -> None:
    config = SchedulerConfig(profile_budget_s=30.0, profile_startup_s=10.0)
    scheduler = Scheduler(config, nodes(1))
    decisions = scheduler.handle(ev.JobSubmitted(make_job(curve=None)), 0.0)
    assert only(decisions, de.WakeMeAt).at_s == 40.0
    assert "could be measured" in str(only(scheduler.handle(ev.WakeUp(), 40.0), de.Reject).reason)


def test_on_a_full_cluster_profiling_waits_and_is_rejected_in_time(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    only(scheduler.handle(ev.JobSubmitted(make_job("full", steps=1900, deadline=1905)), 0.0), de.Admit)
    job = make_job("b", curve=None, deadline=2000, startup=150, tail=50)
    decisions = scheduler.handle(ev.JobSubmitted(job), 0.0)
    waits = only(decisions, de.Wait)
    assert waits.until_s == 1800.0  # however fast it is: it has to start, and to save
    none_of(decisions, de.Resize, de.Suspend)
    assert only(decisions, de.WakeMeAt).at_s == 1800.0
    assert "scaling_curve=" in str(only(scheduler.handle(ev.WakeUp(), 1800.0), de.Reject).reason)


def test_a_job_of_unknown_speed_waits_for_slots_for_as_long_as_its_deadline_bears_it(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("full", steps=900, deadline=905)), 0.0)
    scheduler.handle(ev.JobSubmitted(make_job("b", curve=None, deadline=1500)), 0.0)
    assert only(scheduler.handle(ev.JobFinished("full"), 900.0), de.Resize).job_id == "b"
    only(scheduler.handle(ev.JobMeasured("b", 1, 1.0), 920.0), de.Admit)


def busy(make_job, nodes, *, until: float, free: int = 1, **given: object) -> Scheduler:
    """Four slots, of which a promise needs all but ``free`` until then, and a job of 2,000 steps of unknown speed."""
    scheduler = Scheduler(nodes=nodes(4))
    for number in range(4 - free):
        full = make_job(f"full{number}", steps=until - 2.0, deadline=until, curve={1: 1.0})
        only(scheduler.handle(ev.JobSubmitted(full), 0.0), de.Admit)
    job = make_job("a", **{"curve": None, "steps": 2000, "deadline": 1000, **given})
    assert only(scheduler.handle(ev.JobSubmitted(job), 0.0), de.Resize).placement.workers == 1
    return scheduler


def test_what_one_worker_could_do_refuses_nobody_while_four_may_be_enough(make_job, nodes) -> None:
    scheduler = busy(make_job, nodes, until=300.0)
    decisions = scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0)
    none_of(decisions, de.Reject, de.Admit, de.Suspend, de.Resize)  # it trains on meanwhile
    waits = only(decisions, de.Wait)
    assert str(waits.reason) == (
        "its deadline cannot be promised with 1 worker: waits for slots that no promise needs, to measure its speed "
        "with 2 workers"
    )
    assert waits.until_s == 500.0  # from then on not even four, four times as fast, would be in time
    assert scheduler.states()[-1].phase is Phase.PROFILING
    assert scheduler.states()[-1].placement.workers == 1
    scheduler.handle(ev.JobProgressed("a", 1702.0), 298.0)
    first = [scheduler.handle(ev.JobFinished(f"full{n}"), 298.0) for n in range(3)][-1]
    assert [d.placement.workers for d in first if isinstance(d, de.Resize)] == [2]
    second = scheduler.handle(ev.JobMeasured("a", 2, 2.0), 320.0)
    assert only(second, de.Resize).placement.workers == 4
    only(scheduler.handle(ev.JobMeasured("a", 4, 4.0), 340.0), de.Admit)


def test_it_is_refused_once_nothing_that_might_be_measured_could_help(make_job, nodes) -> None:
    scheduler = busy(make_job, nodes, until=900.0)
    decisions = scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0)
    now = 20.0
    while not (rejected := [d for d in decisions if isinstance(d, de.Reject)]):
        now = only(decisions, de.WakeMeAt).at_s
        decisions = scheduler.handle(ev.WakeUp(), now)
        none_of(decisions, de.Wait)
    assert 650 < now < 670  # it trained meanwhile, and so was refused later than had it held nothing
    assert "could not be measured in time" in str(rejected[0].reason)
    assert "2 or 4 workers" in str(rejected[0].reason)


def test_a_job_in_a_hurry_is_measured_only_with_sizes_that_could_keep_its_deadline(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(8))
    scheduler.handle(ev.JobSubmitted(make_job(curve=None, steps=800, deadline=235)), 0.0)
    assert only(scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0), de.Resize).placement.workers == 4
    only(scheduler.handle(ev.JobMeasured("a", 4, 4.0), 25.0), de.Admit)


def test_on_an_idle_cluster_all_sizes_are_measured_before_a_no(make_job, nodes) -> None:
    """Measuring another size was said to cost the deadline, which one worker did not keep anyhow."""
    scheduler = Scheduler(nodes=nodes(4))
    scheduler.handle(ev.JobSubmitted(make_job(curve=None, steps=1000, deadline=600)), 0.0)
    only(scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0), de.Resize)
    only(scheduler.handle(ev.JobMeasured("a", 2, 2.0), 30.0), de.Admit)


def test_nobody_goes_without_for_a_job_that_only_waits_to_be_measured_with_more(make_job, nodes) -> None:
    scheduler = busy(make_job, nodes, until=900.0)
    scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0)
    decisions = scheduler.handle(ev.JobSubmitted(make_job("other", deadline=None, curve={1: 1.0})), 30.0)
    assert only(decisions, de.Suspend).job_id == "a"
    assert only(decisions, de.Resize).job_id == "other"


def test_what_earlier_runs_measured_is_not_measured_again_and_admits_at_once_where_it_can(make_job, nodes) -> None:
    known = {"curve": {1: 1.0}, "partial": True}
    scheduler = Scheduler(nodes=nodes(4))
    only(scheduler.handle(ev.JobSubmitted(make_job("easy", steps=500, **known)), 0.0), de.Admit)
    scheduler = Scheduler(nodes=nodes(4))
    decisions = scheduler.handle(ev.JobSubmitted(make_job("hard", steps=2000, **known)), 0.0)
    none_of(decisions, de.Reject)
    assert only(decisions, de.Resize).placement.workers == 2
    only(scheduler.handle(ev.JobMeasured("hard", 2, 1.9), 20.0), de.Resize)
    only(scheduler.handle(ev.JobMeasured("hard", 4, 3.6), 40.0), de.Admit)
    assert scheduler.states()[0].job.curve.steps_per_s == {1: 1.0, 2: 1.9, 4: 3.6}
    assert scheduler.knows_curve("hard")


def test_a_whole_curve_of_earlier_runs_refuses_at_once(make_job, nodes) -> None:
    for curve in ({1: 1.0, 2: 1.5, 4: 1.9}, {1: 1.0, 2: 1.001}):
        scheduler = Scheduler(nodes=nodes(4))
        decisions = scheduler.handle(ev.JobSubmitted(make_job(steps=4000, curve=curve, partial=True)), 0.0)
        assert "hopeless" in str(only(decisions, de.Reject).reason)


def test_a_job_that_takes_a_later_deadline_waits_for_its_own_first(make_job, nodes) -> None:
    scheduler = busy(make_job, nodes, until=2500.0, on_reject=OnReject.RENEGOTIATE, latest_deadline_s=2600.0)
    decisions = scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0)
    only(decisions, de.Wait)
    now = 20.0
    while not (admitted := [d for d in decisions if isinstance(d, de.Admit)]):
        now = only(decisions, de.WakeMeAt).at_s
        decisions = scheduler.handle(ev.WakeUp(), now)
    assert admitted[0].terms is de.Terms.RENEGOTIATED
    assert now < 1000.0


def test_a_state_that_an_older_version_stored_is_measured_on(make_job, nodes) -> None:
    scheduler = busy(make_job, nodes, until=300.0)
    scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0)
    states = [
        replace(s, job=replace(s.job, curve=None, partial=False)) if s.job.job_id == "a" else s
        for s in scheduler.states()
    ]
    again = Scheduler(nodes=nodes(4))
    decisions = again.restore(states, 30.0)
    none_of(decisions, de.Reject)
    assert only(decisions, de.Wait).job_id == "a"


def test_profiling_takes_the_slots_of_luxury_but_never_of_a_promise(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    grown = only(scheduler.handle(ev.JobSubmitted(make_job("rich", steps=500, deadline=1000)), 0.0), de.Resize)
    assert grown.placement.workers == 4
    decisions = scheduler.handle(ev.JobSubmitted(make_job("new", curve=None, deadline=5000)), 0.0)
    sizes = {d.job_id: d.placement.workers for d in decisions if isinstance(d, de.Resize)}
    assert sizes["new"] == 1
    assert sizes["rich"] < 4
    assert scheduler.plan_of("rich").promised_s <= 1000.0


def test_a_promise_that_needs_the_slots_interrupts_profiling(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job("new", curve=None, deadline=5000)), 0.0)
    decisions = scheduler.handle(ev.JobSubmitted(make_job("urgent", steps=50, deadline=60)), 5.0)
    only(decisions, de.Admit)
    assert only(decisions, de.Suspend).job_id == "new"


def test_a_hopeless_measured_job_follows_its_submitters_choice(make_job, nodes) -> None:
    for choice, expected in [(OnReject.FAIL, de.Reject), (OnReject.BEST_EFFORT, de.Admit)]:
        scheduler = Scheduler(nodes=nodes(1))
        scheduler.handle(ev.JobSubmitted(make_job(curve=None, steps=1e6, on_reject=choice)), 0.0)
        verdict = only(scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0), expected)
        if isinstance(verdict, de.Admit):
            assert verdict.terms is de.Terms.BEST_EFFORT
        else:
            assert "hopeless" in str(verdict.reason)
            assert verdict.earliest_deadline_s is not None


def test_a_script_that_reports_nothing_runs_as_best_effort(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    decisions = scheduler.handle(ev.JobSubmitted(make_job(curve=None, profile=False, steps=None)), 0.0)
    assert only(decisions, de.Admit).terms is de.Terms.BEST_EFFORT
    assert only(decisions, de.Resize).placement.workers == 1


def test_the_length_may_come_while_profiling(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1))
    scheduler.handle(ev.JobSubmitted(make_job(curve=None, steps=None)), 0.0)
    none_of(scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0), de.Admit, de.Reject)
    only(scheduler.handle(ev.JobProgressed("a", 90.0, total_steps=100.0), 21.0), de.Admit)


def test_a_cluster_of_unknown_jobs_comes_to_its_end_with_all_promises_kept(world: ModuleType, make_job, nodes) -> None:
    play = world.World(Scheduler(nodes=nodes(4, 4)), gang_started=True)
    truth = {1: 1.0, 2: 1.7, 4: 2.6, 8: 3.0}
    for number in range(6):
        job = make_job(f"j{number}", curve=None, steps=300, deadline=900 + 200 * number, startup=10, pause=5, tail=2)
        play.submit(10.0 * number, job, truth)
    play.run()
    assert not play.late()
    assert all(run.ended_s is not None for run in play.runs.values())
    assert sum(run.outcome == "finished" for run in play.runs.values()) >= 4


def test_all_reports_that_come_together_are_heard_before_it_is_decided_on_who_is_measured(
    make_job, nodes, monkeypatch
) -> None:
    scheduler = Scheduler(nodes=nodes(4))
    scheduler.handle(ev.JobSubmitted(make_job("b", steps=900, deadline=2000)), 0.0)
    scheduler.handle(ev.JobSubmitted(make_job("a", curve=None, steps=None, deadline=4000, max_workers=1)), 0.0)
    scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0)
    known = []
    monkeypatch.setattr(
        Decider, "decide_measured", lambda self, job, now: known.append((job.job.job_id, scheduler.state("b"))) or []
    )
    both = [ev.JobProgressed("a", 980.0, total_steps=1000.0), ev.JobProgressed("b", 1.0), ev.JobProgressed("a", 970.0)]
    scheduler.reported(both, 30.0)
    assert (known[0][0], known[0][1].remaining_steps) == ("a", 1.0)


def test_who_is_decided_on_by_its_report_asks_to_be_woken_once(make_job, nodes) -> None:
    scheduler = Scheduler(nodes=nodes(1, 1))
    scheduler.handle(ev.JobSubmitted(make_job("b", steps=900, deadline=2000, curve={1: 1.0})), 0.0)
    scheduler.handle(ev.JobSubmitted(make_job("a", curve=None, steps=None, max_workers=1)), 0.0)
    scheduler.handle(ev.JobMeasured("a", 1, 1.0), 20.0)
    decisions = scheduler.handle(ev.JobProgressed("a", 90.0, total_steps=100.0), 21.0)
    only(decisions, de.Admit)
    only(decisions, de.WakeMeAt)
