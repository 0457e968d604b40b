"""The loop itself, with policies that follow a script: small schedules whose every second is counted by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from elasticflow_airflow.scheduler_core import Scheduler
from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Node, Placement, Slot
from elasticflow_airflow.scheduler_core.simulator.outcome import Result
from elasticflow_airflow.scheduler_core.simulator.run import (
    Change,
    Disturbance,
    SimulatedJob,
    Simulation,
    SimulationError,
)

Make = Callable[..., SimulatedJob]
NODE = Node(node_id="n0", slots=4)
OTHER = Node(node_id="n1", slots=4)


def slots(*places: int | tuple[str, int]) -> Placement:
    """Slots by index on the first node, or by node and index."""
    return Placement(tuple(Slot("n0", p) if isinstance(p, int) else Slot(*p) for p in places))


def resize(job_id: str, *places: int | tuple[str, int]) -> de.Resize:
    return de.Resize(job_id, slots(*places), de.Purpose.TRAIN, "as the script says")


class Scripted:
    """Answers an event as the script has it: by its kind and job, or WakeUp by its time; else nothing."""

    def __init__(self, script: Mapping[object, Sequence[de.Decision]]) -> None:
        self.script = script
        self.heard: list[tuple[float, ev.Event]] = []

    def handle(self, event: ev.Event, now: float) -> list[de.Decision]:
        self.heard.append((now, event))
        match event:
            case ev.WakeUp():
                return list(self.script.get(now, ()))
            case ev.JobSubmitted():
                return list(self.script.get(("submitted", event.job.job_id), ()))
            case ev.JobFinished():
                return list(self.script.get(("finished", event.job_id), ()))
            case ev.NodeLost() | ev.NodeDraining() | ev.SlotSlow():
                return list(self.script.get(type(event), ()))
            case _:  # progress and the like: the next time in the script still holds
                later = [when for when in self.script if isinstance(when, float) and when > now]
                return [de.WakeMeAt(min(later))] if later else []


def run(
    script: Mapping[object, Sequence[de.Decision]],
    jobs: Sequence[SimulatedJob],
    nodes: Sequence[Node] = (NODE,),
    **options: object,
) -> tuple[Result, list[Change], Scripted]:
    policy, log = Scripted(script), list[Change]()
    simulation = Simulation(name="script", policy=policy, nodes=nodes, jobs=jobs, on_change=log.append, **options)  # type: ignore[arg-type]  # options by name
    return simulation.run(), log, policy


def heard(policy: Scripted, *kinds: type) -> list[tuple[float, ev.Event]]:
    return [(now, event) for now, event in policy.heard if isinstance(event, kinds)]


def test_a_start_costs_its_start_up_and_the_end_its_tail(simulated: Make) -> None:
    job = simulated("a", at_s=5.0, steps=100, startup_s=30, pause_s=7, tail_s=4, deadline_s=200)
    result, log, policy = run({("submitted", "a"): [resize("a", 0, 1)]}, [job])
    (record,) = result.records
    assert record.finished_s == 5 + 30 + 100 / 2 + 4
    assert (record.started_s, record.changes, record.migrations, record.suspensions) == (5.0, 1, 0, 0)
    assert record.slot_s == 2 * 84
    assert record.met
    assert record.completion_s == 84
    assert [(c.at_s, len(c.slots), c.event) for c in log] == [(5, 2, ""), (89, 0, ""), (89, 0, "finished")]
    assert heard(policy, ev.JobFinished) == [(89.0, ev.JobFinished("a"))]
    assert (result.begin_s, result.end_s, result.slots) == (5, 89, 4)


def test_resize_and_migration_cost_a_pause_each_and_no_step_is_lost(simulated: Make) -> None:
    script = {
        ("submitted", "a"): [resize("a", 0), de.WakeMeAt(40.0)],  # steps from 10 on: 30 by 40
        40.0: [resize("a", 0, 1), de.WakeMeAt(60.0)],  # from 45 on, two a second: 30 by 60
        60.0: [resize("a", 2, 3), de.WakeMeAt(70.0)],  # a migration, from 65 on: 10 by 70
        70.0: [resize("a", 2)],  # from 75 on, one a second: 30 left
    }
    result, _, _ = run(script, [simulated("a", steps=100, startup_s=10, pause_s=5)])
    (record,) = result.records
    assert record.finished_s == 105
    assert (record.changes, record.migrations, record.suspensions) == (4, 1, 0)
    assert record.slot_s == 40 + 40 + 20 + 35


def test_the_same_slots_again_cost_nothing(simulated: Make) -> None:
    script = {
        ("submitted", "a"): [resize("a", 0, 1), de.WakeMeAt(20.0)],
        20.0: [resize("a", 1, 0)],
    }
    result, log, _ = run(script, [simulated("a", steps=100, startup_s=10, pause_s=5)])
    assert result.records[0].finished_s == 60
    assert result.records[0].changes == 1
    assert len([c for c in log if c.slots]) == 1


def test_an_interrupted_start_is_paid_again_and_an_interrupted_pause_is_a_pause(simulated: Make) -> None:
    script = {
        ("submitted", "a"): [resize("a", 0), de.WakeMeAt(6.0)],
        6.0: [resize("a", 0, 1), de.WakeMeAt(20.0)],  # still starting: ready at 16, two a second
        20.0: [resize("a", 2, 3), de.WakeMeAt(22.0)],  # 8 done; pause until 25
        22.0: [resize("a", 0, 1)],  # within the pause: pause until 27
    }
    result, _, _ = run(script, [simulated("a", steps=100, startup_s=10, pause_s=5)])
    assert result.records[0].finished_s == 27 + 92 / 2


def test_a_suspended_job_keeps_its_steps_and_pays_to_start_again(simulated: Make) -> None:
    script = {
        ("submitted", "a"): [resize("a", 0), de.WakeMeAt(50.0)],
        50.0: [de.Suspend("a", "for now"), de.WakeMeAt(80.0)],
        80.0: [resize("a", 0, 1, 2, 3)],
    }
    result, _, _ = run(script, [simulated("a", steps=100, startup_s=10, pause_s=5)])
    (record,) = result.records
    assert record.finished_s == 80 + 10 + 60 / 4
    assert (record.changes, record.suspensions, record.slot_s) == (2, 1, 50 + 4 * 25)


def test_speed_is_that_of_the_block_that_it_got_not_of_what_was_told(simulated: Make) -> None:
    job = simulated("a", steps=90, curve={1: 1.0, 2: 2.0, 4: 4.0}, truth={1: 1.0, 2: 1.5})
    result, _, _ = run({("submitted", "a"): [resize("a", 0, 1, 2, 3)]}, [job])
    assert result.records[0].finished_s == 60.0


def test_a_gang_below_its_least_size_is_an_error(simulated: Make) -> None:
    with pytest.raises(SimulationError, match="runs 'a' with 1; it needs at least 2"):
        run({("submitted", "a"): [resize("a", 0)]}, [simulated("a", curve={2: 1.0})])


def test_a_batch_of_decisions_is_one_change(simulated: Make) -> None:
    """Two jobs swap their slots in one breath; nobody ever holds a slot twice."""
    script = {
        ("submitted", "a"): [resize("a", 0)],
        ("submitted", "b"): [resize("b", 1), de.WakeMeAt(10.0)],
        10.0: [resize("a", 1), resize("b", 0)],
    }
    result, _, _ = run(script, [simulated("a", pause_s=5), simulated("b", pause_s=5)])
    assert [record.finished_s for record in result.records] == [105, 105]


def test_a_slot_given_twice_is_an_error(simulated: Make) -> None:
    script = {("submitted", "a"): [resize("a", 0, 1)], ("submitted", "b"): [resize("b", 1)]}
    with pytest.raises(SimulationError, match=r"script gives Slot\(node_id='n0', index=1\) to 'b' beside 'a'"):
        run(script, [simulated("a"), simulated("b")])


@pytest.mark.parametrize("place", [4, ("n7", 0)])
def test_a_slot_that_is_not_there_is_an_error(simulated: Make, place: int | tuple[str, int]) -> None:
    with pytest.raises(SimulationError, match=r"uses Slot.*, which is not there"):
        run({("submitted", "a"): [resize("a", place)]}, [simulated("a")])


def test_a_busy_slot_is_not_there(simulated: Make) -> None:
    nodes = [Node(node_id="n0", slots=4, busy=frozenset({1}))]
    with pytest.raises(SimulationError, match=r"index=1\), which is not there"):
        run({("submitted", "a"): [resize("a", 1)]}, [simulated("a")], nodes)


def test_a_decision_on_a_job_that_is_gone_is_an_error(simulated: Make) -> None:
    with pytest.raises(SimulationError, match="decides on 'a', which is not live"):
        run({("submitted", "a"): [resize("a", 0)], ("finished", "a"): [resize("a", 0)]}, [simulated("a")])
    with pytest.raises(SimulationError, match="decides on 'nobody', which is not live"):
        run({("submitted", "a"): [de.Suspend("nobody", "")]}, [simulated("a")])


def test_a_rejected_job_is_over_and_gives_back_what_it_held(simulated: Make) -> None:
    script = {
        ("submitted", "a"): [resize("a", 0), de.WakeMeAt(10.0)],
        10.0: [de.Reject("a", "after all not", None)],
        ("submitted", "b"): [resize("b", 0)],
    }
    result, log, _ = run(script, [simulated("a"), simulated("b", at_s=20.0)])
    first, second = result.records
    assert (first.rejected_s, first.reject_reason, first.finished_s) == (10.0, "after all not", None)
    assert not first.met
    assert first.slot_s == 10
    assert second.finished_s == 120.0
    assert [c for c in log if c.at_s == 10.0] == [Change(10.0, "a", ()), Change(10.0, "a", (), "rejected")]


def test_only_the_last_wake_up_asked_for_comes_and_other_events_take_its_place(simulated: Make) -> None:
    script: dict[object, Sequence[de.Decision]] = {
        ("submitted", "a"): [de.WakeMeAt(10.0), de.WakeMeAt(15.0)],
        15.0: [resize("a", 0), de.WakeMeAt(30.0)],
        ("submitted", "b"): [resize("b", 1)],  # asks for nothing: the wake-up at 30 is off
    }
    _, _, policy = run(script, [simulated("a"), simulated("b", at_s=20.0)])
    assert [now for now, _ in heard(policy, ev.WakeUp)] == [15.0]


def test_at_one_moment_ends_come_before_arrivals(simulated: Make) -> None:
    script = {("submitted", "a"): [resize("a", 0)], ("submitted", "b"): [resize("b", 0)]}
    result, _, policy = run(script, [simulated("a", steps=50), simulated("b", at_s=50.0, steps=10)])
    assert [type(event) for now, event in policy.heard if now == 50.0] == [ev.JobFinished, ev.JobSubmitted]
    assert result.records[1].finished_s == 60.0


def test_a_policy_that_only_asks_to_be_woken_is_stopped(simulated: Make) -> None:
    class Restless:
        def handle(self, event: ev.Event, now: float) -> list[de.Decision]:
            return [de.WakeMeAt(now + 1.0)]

    with pytest.raises(SimulationError, match="asks to be woken for ever"):
        Simulation(name="restless", policy=Restless(), nodes=[NODE], jobs=[simulated("a")]).run()


@pytest.mark.parametrize("every_s", [0.0, 1e-6])
def test_nor_may_it_stop_the_clock_while_a_job_runs(simulated: Make, every_s: float) -> None:
    class Restless:
        def handle(self, event: ev.Event, now: float) -> list[de.Decision]:
            back_and_forth = [resize("a", 0)] if isinstance(event, ev.JobSubmitted) else []
            return [*back_and_forth, de.WakeMeAt(now + every_s)]

    with pytest.raises(SimulationError, match="asks to be woken for ever"):
        Simulation(name="restless", policy=Restless(), nodes=[NODE], jobs=[simulated("a")]).run()


def test_a_policy_may_be_woken_as_often_as_it_likes_while_work_is_done(simulated: Make) -> None:
    """One watches a long job; one lets two of them take turns, and suspends both at every other wake-up."""

    class Watching:
        def handle(self, event: ev.Event, now: float) -> list[de.Decision]:
            return [*([resize("a", 0)] if isinstance(event, ev.JobSubmitted) else []), de.WakeMeAt(now + 1.0)]

    class TakingTurns:
        def __init__(self) -> None:
            self.live: list[str] = []
            self.turn = 0

        def handle(self, event: ev.Event, now: float) -> list[de.Decision]:
            if isinstance(event, ev.JobSubmitted):
                self.live.append(event.job.job_id)
            elif isinstance(event, ev.JobFinished):
                self.live.remove(event.job_id)
            self.turn += 1
            decided: list[de.Decision] = [de.Suspend(job_id, "its turn is over") for job_id in self.live]
            if self.turn % 2 and self.live:
                decided.append(resize(self.live[self.turn // 2 % len(self.live)], 0))
            return [*decided, de.WakeMeAt(now + 0.5)]

    watched = Simulation(name="w", policy=Watching(), nodes=[NODE], jobs=[simulated("a", steps=15_000)]).run()
    assert watched.records[0].finished_s == 15_000
    jobs = [simulated("a", steps=3_000), simulated("b", steps=3_000)]
    shared = Simulation(name="t", policy=TakingTurns(), nodes=[NODE], jobs=jobs).run()
    assert all(record.finished_s is not None for record in shared.records)


def test_jobs_that_nobody_runs_are_unfinished(simulated: Make) -> None:
    result, _, _ = run({}, [simulated("a", deadline_s=50.0)])
    summary = result.summary()
    assert (summary["unfinished"], summary["met"], summary["late_though_admitted"]) == (1, 0, 0)


def test_what_was_promised_counts_as_late_and_what_came_with_it_as_met(simulated: Make) -> None:
    """One ends 1 s after its promise; one is given a later promise, and keeps it, but not what it came with."""

    def promise(job_id: str, deadline_s: float) -> de.Admit:
        return de.Admit(job_id, de.Terms.DEADLINE, deadline_s, None, "")

    script = {
        ("submitted", "a"): [promise("a", 99.0), resize("a", 0)],
        ("submitted", "b"): [promise("b", 150.0), resize("b", 1)],
        ("submitted", "c"): [promise("c", 100.0), resize("c", 2)],
    }
    jobs = [simulated(name, deadline_s=deadline) for name, deadline in [("a", 99.0), ("b", 90.0), ("c", 100.0)]]
    result, _, _ = run(script, jobs)
    assert [(r.met, r.late_though_admitted) for r in result.records] == [(False, True), (False, False), (True, False)]


def test_reports_say_what_really_is_and_begin_anew_with_each_change(simulated: Make) -> None:
    script = {("submitted", "a"): [resize("a", 0), de.WakeMeAt(75.0)], 75.0: [resize("a", 0, 1)]}
    job = simulated("a", steps=100, startup_s=10, pause_s=5, truth={1: 0.5, 2: 1.0})
    _, _, policy = run(script, [job], report_after_s=20.0, report_every_s=30.0)
    assert heard(policy, ev.GangStarted) == [
        (10.0, ev.GangStarted("a", slots(0))),
        (80.0, ev.GangStarted("a", slots(0, 1))),
    ]
    assert [(now, e.remaining_steps, e.steps_per_s) for now, e in heard(policy, ev.JobProgressed)] == [  # type: ignore[union-attr]  # all of this kind
        (30.0, 90.0, 0.5),
        (60.0, 75.0, 0.5),
        (75.0, 67.5, None),  # what is left when its slots change
        (100.0, 47.5, 1.0),
        (130.0, 17.5, 1.0),
    ]


def test_a_gang_that_is_stopped_says_what_is_left_if_it_made_steps(simulated: Make) -> None:
    script = {
        ("submitted", "a"): [resize("a", 0), de.WakeMeAt(5.0)],
        5.0: [resize("a", 0, 1), de.WakeMeAt(25.0)],  # still starting: nothing new to say
        25.0: [de.Suspend("a", "for now"), de.WakeMeAt(50.0)],
        50.0: [resize("a", 0, 1)],
    }
    job = simulated("a", steps=100, startup_s=10, truth={1: 0.5, 2: 1.0})
    result, _, policy = run(script, [job], report_after_s=1000.0)
    assert heard(policy, ev.JobProgressed) == [(25.0, ev.JobProgressed("a", 90.0))]
    assert result.records[0].finished_s == 150.0
    _, _, policy = run(script, [job])
    assert heard(policy, ev.JobProgressed) == []


def test_a_lost_node_takes_its_gangs_and_their_steps_since_the_last_checkpoint(simulated: Make) -> None:
    script = {
        ("submitted", "a"): [resize("a", 0, ("n1", 0))],
        ("submitted", "b"): [resize("b", 1)],
        ev.NodeLost: [resize("a", 0)],
    }
    jobs = [simulated("a", steps=100, startup_s=10), simulated("b", steps=100, startup_s=10)]
    trouble = [Disturbance(35.0, ev.NodeLost("n1"))]
    result, log, policy = run(script, jobs, [NODE, OTHER], disturbances=trouble, checkpoint_s=20.0)
    first, second = result.records
    # 25 s of steps, of which the last 5 are lost: 40 of 50 are saved.
    assert first.finished_s == 35 + 10 + 60
    assert second.finished_s == 110
    assert heard(policy, ev.JobProgressed) == [(35.0, ev.JobProgressed("a", 60.0))]
    assert [(c.at_s, len(c.slots)) for c in log if c.job_id == "a" and not c.event] == [
        (0, 2),
        (35, 0),
        (35, 1),
        (105, 0),
    ]
    assert first.suspensions == 1


def test_slots_of_a_lost_node_are_not_there_until_it_is_back(simulated: Make) -> None:
    script = {("submitted", "a"): [], ("submitted", "b"): [resize("b", ("n1", 3))]}
    jobs = [simulated("a"), simulated("b", at_s=50.0)]
    lost, back = Disturbance(10.0, ev.NodeLost("n1")), Disturbance(40.0, ev.NodeJoined(OTHER))
    with pytest.raises(SimulationError, match="not there at 50"):
        run(script, jobs, [NODE, OTHER], disturbances=[lost])
    result, _, _ = run(script, jobs, [NODE, OTHER], disturbances=[lost, back])
    assert result.records[1].finished_s == 150.0


def test_a_slow_slot_slows_whoever_stands_on_it_as_long_as_it_is_slow(simulated: Make) -> None:
    script = {("submitted", "a"): [resize("a", 0, 1)], ("submitted", "b"): [resize("b", 2)]}
    spell = [Disturbance(10.0, None, (Slot("n0", 1), 0.25)), Disturbance(50.0, None, (Slot("n0", 1), 1.0))]
    result, _, policy = run(script, [simulated("a"), simulated("b")], disturbances=spell)
    assert [record.finished_s for record in result.records] == [50 + 60 / 2, 100]  # 20 steps, then 20 in 40 s, then 60
    assert heard(policy, ev.SlotSlow) == []


def test_a_straggler_is_named_after_a_while_and_left_behind(simulated: Make) -> None:
    script = {
        ("submitted", "a"): [resize("a", 0, 1)],
        ev.SlotSlow: [resize("a", 2, 3)],
    }
    spell = [Disturbance(10.0, None, (Slot("n0", 1), 0.5))]
    result, _, policy = run(
        script, [simulated("a", pause_s=5)], disturbances=spell, report_after_s=10.0, straggler_after_s=30.0
    )
    assert heard(policy, ev.SlotSlow) == [(40.0, ev.SlotSlow("a", Slot("n0", 1), 3640.0, gain=2.0))]
    assert result.records[0].finished_s == 45 + 50 / 2  # 20 steps by 10, 30 by 40


def test_a_straggler_alone_in_its_gang_has_nobody_to_be_compared_with(simulated: Make) -> None:
    spell = [Disturbance(10.0, None, (Slot("n0", 0), 0.5))]
    _, _, policy = run(
        {("submitted", "a"): [resize("a", 0)]}, [simulated("a")], disturbances=spell, straggler_after_s=30.0
    )
    assert heard(policy, ev.SlotSlow) == []


def test_the_scheduler_itself_admits_runs_and_rejects(simulated: Make) -> None:
    """Jobs of 100 s on one slot: the first gets it, the second cannot be in time, the third fits behind the first."""
    curve = {1: 1.0}
    jobs = [
        simulated("a", curve=curve, deadline_s=120.0, startup_s=10),
        simulated("b", at_s=1.0, curve=curve, deadline_s=130.0, startup_s=10),
        simulated("c", at_s=2.0, curve=curve, deadline_s=220.0, startup_s=10),
    ]
    nodes = [Node(node_id="n0", slots=1)]
    result = Simulation(name="elasticflow", policy=Scheduler(nodes=nodes), nodes=nodes, jobs=jobs).run()
    first, second, third = result.records
    assert (first.finished_s, third.finished_s) == (pytest.approx(110), pytest.approx(220))
    assert second.rejected_s == 1.0
    assert "earliest" not in second.reject_reason or "promised now" in second.reject_reason
    summary = result.summary()
    assert (summary["met"], summary["rejected"], summary["late_though_admitted"], summary["changes"]) == (2, 1, 0, 2)


def test_best_effort_on_a_given_curve_waits_for_a_size_that_runs(simulated: Make) -> None:
    """A node is lost and no four slots are left together; one, which the curve does not have, would be no help."""
    nodes = [Node(node_id=f"n{i}", slots=2) for i in range(2)]
    trouble = [Disturbance(10.0, ev.NodeLost("n1")), Disturbance(60.0, ev.NodeJoined(nodes[1]))]
    result = Simulation(
        name="elasticflow",
        policy=Scheduler(nodes=nodes),
        nodes=nodes,
        jobs=[simulated("a", curve={4: 1.0})],
        disturbances=trouble,
        checkpoint_s=1.0,
    ).run()
    assert result.records[0].finished_s == pytest.approx(60 + 90)
