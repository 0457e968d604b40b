"""Gandiva: turns by time slices, and growth into slots that would idle."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Job
from elasticflow_airflow.scheduler_core.simulator.baselines.gandiva import Gandiva
from elasticflow_airflow.scheduler_core.simulator.inputs.colocation import read_colocation
from elasticflow_airflow.scheduler_core.simulator.inputs.mixed import read_typed_curves

MakeJob = Callable[..., Job]
DATA = Path(__file__).resolve().parents[4] / "shared" / "data"


def test_two_jobs_on_one_slot_take_turns_of_a_slice(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("a", 120.0, curve={1: 1.0}), make("b", 120.0, curve={1: 1.0})]
    played = play(Gandiva(nodes=nodes(1, 1)), jobs, nodes(1, 1))
    assert played.sizes("a") == [(0.0, 1), (60.0, 0), (120.0, 1), (180.0, 0)]
    assert played.sizes("b") == [(60.0, 1), (120.0, 0), (180.0, 1), (240.0, 0)]


def test_turns_go_round_and_gangs_have_theirs(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("gang", 240.0, asks=2, curve={2: 2.0}),
        make("one", 120.0, curve={1: 1.0}),
        make("two", 120.0, curve={1: 1.0}),
    ]
    played = play(Gandiva(nodes=nodes(1, 2)), jobs, nodes(1, 2))
    assert played.sizes("gang") == [(0.0, 2), (60.0, 0), (120.0, 2), (180.0, 0)]
    assert played.ends() == {"gang": 180.0, "one": 240.0, "two": 240.0}


def test_a_start_does_not_eat_its_slice(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("a", 1000.0, curve={1: 1.0}, pause=10.0), make("b", 1000.0, curve={1: 1.0}, pause=10.0)]
    played = play(Gandiva(nodes=nodes(1, 1)), jobs, nodes(1, 1))
    assert played.sizes("a")[:3] == [(0.0, 1), (200.0, 0), (400.0, 1)]


def test_idle_slots_of_the_node_are_grown_into_and_given_back(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("grows", 1000.0), make("comes", 200.0, at=50.0)]
    played = play(Gandiva(nodes=nodes(2, 4)), jobs, nodes(2, 4))
    assert played.sizes("grows")[0] == (0.0, 4)  # 8 would be faster, but lies on two nodes
    assert played.sizes("comes")[0] == (50.0, 4)
    alone = play(Gandiva(nodes=nodes(1, 4)), jobs, nodes(1, 4))
    assert alone.sizes("grows")[:3] == [(0.0, 4), (50.0, 2), (150.0, 4)]
    assert alone.sizes("comes") == [(50.0, 2), (150.0, 0)]


def test_grown_jobs_shrink_to_what_they_asked_for_before_anybody_waits(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [make("a", 1000.0), *(make(f"b{i}", 100.0, at=10.0, curve={1: 1.0}) for i in range(3))]
    played = play(Gandiva(nodes=nodes(1, 4)), jobs, nodes(1, 4))
    assert [size for at, size in played.sizes("a") if at == 10.0][-1] == 1
    assert all(record.started_s == record.submitted_s for record in played.jobs.values())


def test_nobody_grows_past_the_knee_or_for_less_than_the_pause(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [
        make("knee", 100.0, curve={1: 1.0, 2: 1.5, 4: 1.4}, pause=30.0),
        make("last", 110.0, curve={1: 1.0, 2: 1.2}, pause=30.0),
    ]
    played = play(Gandiva(nodes=nodes(1, 4)), jobs, nodes(1, 4))
    assert max(size for _, size in played.sizes("knee")) == 2
    late = [make("first", 60.0, asks=2, curve={2: 2.0}, pause=30.0), make("b", 80.0, asks=2, pause=30.0)]
    played = play(Gandiva(nodes=nodes(1, 4)), late, nodes(1, 4))
    assert played.jobs["b"].changes == 1  # 10 s are left when slots fall idle; a pause takes 30


# -- packing -----------------------------------------------------------------------------------------------------------


def keeps(**parts: float) -> Callable[[str, str], float]:
    """``ab=0.8``: what ``a`` keeps beside ``b``. All else share nothing."""
    return lambda mine, other: parts.get(mine + other, 0.0)


def single(make: MakeJob, job_id: str, steps: float, **more: Any) -> Job:
    return make(job_id, steps, curve={1: 1.0}, workload=job_id[0], **more)


def test_two_who_do_more_together_share_a_slot_instead_of_taking_turns(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [single(make, "a", 120.0), single(make, "b", 120.0)]
    packed = keeps(ab=0.8, ba=0.7)
    played = play(Gandiva(nodes=nodes(1, 1), packed=packed), jobs, nodes(1, 1), packed=packed)
    assert played.sizes("a") == [(0.0, 1), (150.0, 0)]  # 120 steps at 0.8
    assert played.sizes("b") == [(0.0, 1), (165.0, 0)]  # 105 at 0.7 until then, the last 15 alone


def test_two_who_would_do_less_take_turns(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [single(make, "a", 120.0), single(make, "b", 120.0)]
    packed = keeps(ab=0.6, ba=0.4)
    played = play(Gandiva(nodes=nodes(1, 1), packed=packed), jobs, nodes(1, 1), packed=packed)
    assert played.ends() == {"a": 180.0, "b": 240.0}
    unknown = play(Gandiva(nodes=nodes(1, 1), packed=keeps()), jobs, nodes(1, 1), packed=keeps())
    assert unknown.ends() == {"a": 180.0, "b": 240.0}


def test_the_partner_is_who_gains_most_and_a_free_slot_ends_the_sharing(make: MakeJob, nodes: Any, play: Any) -> None:
    jobs = [single(make, "a", 100.0), single(make, "b", 100.0), single(make, "c", 100.0, at=10.0)]
    packed = keeps(ac=0.7, ca=0.4, bc=0.9, cb=0.5)
    played = play(Gandiva(nodes=nodes(1, 2), packed=packed), jobs, nodes(1, 2), packed=packed)
    assert {c.slots for c in played.changes if c.at_s == 10.0} == {played.changes[1].slots}  # of b, the second
    assert played.sizes("c")[:2] == [(10.0, 1), (100.0, 1)]  # a is done, and leaves its slot to one of the two
    # 45 of c's steps until then, 55 alone; 81 + 10 of b's, 9 alone.
    assert played.ends() == pytest.approx({"a": 100.0, "b": 109.0, "c": 155.0})


def test_gangs_are_not_packed_nor_is_anybody_while_there_is_room(make: MakeJob, nodes: Any, play: Any) -> None:
    packed = keeps(ab=1.0, ba=1.0, gg=1.0)
    gangs = [make(f"g{i}", 120.0, asks=2, curve={2: 1.0}, workload="g") for i in range(2)]
    played = play(Gandiva(nodes=nodes(1, 2), packed=packed), gangs, nodes(1, 2), packed=packed)
    assert played.ends() == {"g0": 180.0, "g1": 240.0}
    jobs = [single(make, "a", 120.0), single(make, "b", 120.0)]
    played = play(Gandiva(nodes=nodes(1, 2), packed=packed), jobs, nodes(1, 2), packed=packed)
    assert len({change.slots for change in played.changes if change.slots}) == 2


@pytest.mark.parametrize("together", [0.0, 0.4])
def test_who_takes_the_turn_of_another_shares_with_nobody(together: float, make: MakeJob, nodes: Any) -> None:
    policy = Gandiva(nodes=nodes(1, 1), packed=keeps(ab=together, ba=together))
    for job_id in ("a", "b"):
        policy.handle(ev.JobSubmitted(single(make, job_id, 1000.0)), 0.0)
    policy.handle(ev.WakeUp(), 60.0)
    assert [policy.jobs[job_id].mask for job_id in "ab"] == [0, 1]
    assert policy.projected_finish_s("b") == pytest.approx(1060.0)
    policy.handle(ev.JobProgressed("b", 100.0, steps_per_s=2.0), 110.0)
    curve = policy.jobs["b"].job.curve
    assert curve is not None
    assert 1.0 < curve.steps_per_s[1] <= 2.0


def test_a_speed_seen_beside_another_is_a_part_of_ones_own(make: MakeJob, nodes: Any) -> None:
    policy = Gandiva(nodes=nodes(1, 1), packed=keeps(ab=0.8, ba=0.5))
    for job_id in ("a", "b"):
        policy.handle(ev.JobSubmitted(single(make, job_id, 120.0)), 0.0)
    policy.handle(ev.JobProgressed("b", 70.0, steps_per_s=0.5), 100.0)
    assert policy.jobs["b"].job.curve is not None
    assert policy.jobs["b"].job.curve.steps_per_s == pytest.approx({1: 1.0})
    assert policy.projected_finish_s("b") == pytest.approx(240.0)


@pytest.mark.parametrize("seed", range(6))
def test_in_any_company_every_step_is_made_at_the_speed_that_it_leaves(
    seed: int, make: MakeJob, nodes: Any, play: Any
) -> None:
    """Recounted from who held which slot when, apart from the simulator."""
    chaos = random.Random(seed)
    parts = {mine + other: chaos.uniform(0.3, 0.9) for mine in "abc" for other in "abc"}
    jobs = [
        make(
            f"{chaos.choice('abc')}{i}",
            chaos.uniform(20.0, 600.0),
            at=chaos.uniform(0.0, 900.0),
            asks=asks,
            curve={n: float(n) for n in (1, 2, 4) if n >= asks},
            pause=5.0,
        )
        for i, asks in enumerate(chaos.choices([1, 1, 1, 2], k=30))
    ]
    jobs = [replace(job, workload=job.job_id[0]) for job in sorted(jobs, key=lambda job: job.submitted_s)]
    packed = keeps(**parts)
    cluster = nodes(2, 2)
    played = play(Gandiva(nodes=cluster, packed=packed), jobs, cluster, packed=packed)
    assert all(end is not None for end in played.ends().values())
    held: dict[str, tuple[Any, ...]] = {}
    done = {job.job_id: 0.0 for job in jobs}
    ready = dict(done)
    now, shared = 0.0, 0
    for change in played.changes:
        for job_id, slots in held.items() if change.at_s > now else ():  # changes at one time are one
            others = [o for o, theirs in held.items() if o != job_id and set(theirs) & set(slots)]
            assert len(others) <= 1
            part = min((parts[job_id[0] + other[0]] for other in others), default=1.0)
            done[job_id] += len(slots) * part * max(0.0, change.at_s - max(now, ready[job_id]))
            shared += len(others)
        now = change.at_s
        if change.slots and change.slots != held.get(change.job_id):
            ready[change.job_id] = now + 5.0
        held[change.job_id] = change.slots
        held = {job_id: slots for job_id, slots in held.items() if slots}
    assert shared
    assert done == pytest.approx({job.job_id: job.total_steps for job in jobs})


def test_measured_pairs_end_sooner_than_in_turns(make: MakeJob, nodes: Any, play: Any) -> None:
    folder = DATA / "throughput" / "gavel"
    if not folder.is_dir():
        pytest.skip(f"needs the data folder {DATA} beside the checkout")
    curves = read_typed_curves(folder / "curves.csv")["v100"]
    pairs = read_colocation(folder / "colocation.csv", "v100", curves)
    (mine, other), both = max(
        ((pair, pairs.packed(*pair) + pairs.packed(*reversed(pair))) for pair in pairs.kept), key=lambda found: found[1]
    )
    assert 1.5 < both < 2.2
    jobs = [
        make(name, 3600.0, curve={1: 1.0}, workload=workload, pause=30.0)
        for name, workload in (("a", mine), ("b", other))
    ]
    turns = play(Gandiva(nodes=nodes(1, 1)), jobs, nodes(1, 1))
    packed = play(Gandiva(nodes=nodes(1, 1), packed=pairs.packed), jobs, nodes(1, 1), packed=pairs.packed)
    assert max(packed.ends().values()) < 0.75 * max(turns.ends().values())
