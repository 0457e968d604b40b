"""No schedule beats the bound: against all schedules of tiny instances, and against ours on the shared traces."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the bound needs scipy")

from elasticflow_airflow.scheduler_core import Scheduler, SchedulerConfig
from elasticflow_airflow.scheduler_core.model.values import Job, RescaleCosts, ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.bound.clairvoyant import _candidates, clairvoyant_bound
from elasticflow_airflow.scheduler_core.simulator.bound.costs import Prices, least_costs
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import read_trace
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster, prepare
from elasticflow_airflow.scheduler_core.simulator.run import Simulation

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def job(
    job_id: str,
    steps: float,
    deadline_s: float,
    speeds: dict[int, float],
    *,
    submitted_s: float = 0.0,
    pause_s: float = 0.0,
    startup_s: float | None = None,
    tail_s: float = 0.0,
    value: float = 1.0,
) -> Job:
    costs = RescaleCosts(startup_s=pause_s if startup_s is None else startup_s, pause_s=pause_s, tail_s=tail_s)
    return Job(
        job_id=job_id,
        submitted_s=submitted_s,
        deadline_s=deadline_s,
        total_steps=steps,
        curve=ScalingCurve(speeds),
        costs=costs,
        value=value,
    )


# -- by hand ---------------------------------------------------------------------------------------------------------


def test_a_cluster_with_room_for_all_meets_all() -> None:
    bound = clairvoyant_bound([job(str(i), 100.0, 10.0, {1: 10.0}) for i in range(4)], 4)
    assert (bound.met, bound.alone, bound.deadlines, bound.exact) == (4, 4, 4, True)
    assert bound.chosen == frozenset("0123")


def test_no_schedule_of_fixed_sizes_meets_what_one_job_alone_cannot_at_its_own_size() -> None:
    speeds = {1: 10.0, 2: 18.0, 4: 32.0}
    asks = [(1, 100.0), (1, 101.0), (2, 101.0), (3, 180.0), (3, 181.0), (None, 90.0), (8, 320.0), (8, 321.0)]
    jobs = [
        replace(job(f"{number}", steps, 10.0, speeds), requested_workers=asked)
        for number, (asked, steps) in enumerate(asks)
    ]
    bound = clairvoyant_bound(jobs, 64)
    assert (bound.alone, bound.alone_at_fixed_size, bound.met) == (7, 5, 7)
    assert bound.hopeless == {"7"}


def test_slot_seconds_limit_how_many_fit() -> None:
    """Each needs all ten seconds of one slot; there are three slots."""
    bound = clairvoyant_bound([job(str(i), 100.0, 10.0, {1: 10.0}) for i in range(5)], 3)
    assert (bound.met, bound.alone, bound.exact, len(bound.chosen)) == (3, 5, True, 3)


def test_jobs_that_miss_alone_are_hopeless() -> None:
    """The start takes 1 s, the tail 1 s: 8 s are left of 10, for 9 s of steps."""
    jobs = [job("slow", 90.0, 10.0, {1: 10.0}, pause_s=1.0, tail_s=1.0), job("fits", 80.0, 10.0, {1: 10.0})]
    bound = clairvoyant_bound(jobs, 8)
    assert (bound.met, bound.hopeless) == (1, frozenset({"slow"}))


def test_a_start_takes_slots_too() -> None:
    """Two jobs of 4 s of steps fit one slot for 8 s, but not when each first takes it for 1 s without a step."""
    assert clairvoyant_bound([job(i, 40.0, 8.0, {1: 10.0}) for i in "ab"], 1).met == 2
    assert clairvoyant_bound([job(i, 40.0, 8.0, {1: 10.0}, pause_s=1.0) for i in "ab"], 1).met == 1


def test_an_end_a_hair_after_the_deadline_counts_as_in_the_simulator() -> None:
    assert clairvoyant_bound([job("a", 100.005, 10.0, {1: 10.0})], 1).met == 1
    assert clairvoyant_bound([job("a", 100.02, 10.0, {1: 10.0})], 1).met == 0


def test_values_are_bounded_beside_the_count() -> None:
    """Either the large one or both small ones: the count takes two, the value takes the large one."""
    speeds = {1: 10.0, 2: 20.0}
    jobs = [
        job("large", 200.0, 10.0, speeds, value=5.5),
        job("one", 100.0, 10.0, {1: 10.0}),
        job("two", 100.0, 10.0, {1: 10.0}),
    ]
    bound = clairvoyant_bound(jobs, 2)
    assert bound.met == 2
    assert bound.value == pytest.approx(5.5, abs=1e-3)
    assert bound.value >= 5.5


def test_jobs_without_deadline_stand_aside() -> None:
    best_effort = Job(job_id="x", submitted_s=0, deadline_s=None, total_steps=1e9, curve=ScalingCurve({1: 1.0}))
    bound = clairvoyant_bound([best_effort, job("a", 100.0, 10.0, {1: 10.0})], 1)
    assert (bound.deadlines, bound.met) == (1, 1)
    assert clairvoyant_bound([best_effort], 1).met == 0


def test_pools_have_slots_and_speeds_of_their_own() -> None:
    """Two need the fast pool, which has room for one; the third is content with the slow one."""
    jobs = [job(i, 100.0, 10.0, {1: 10.0}) for i in ("a", "b")] + [job("c", 50.0, 10.0, {1: 10.0})]
    curves = {"fast": ScalingCurve({1: 10.0}), "slow": ScalingCurve({1: 5.0})}
    bound = clairvoyant_bound(jobs, {"fast": 1, "slow": 2}, curves=lambda _, pool: curves[pool])
    assert (bound.alone, bound.met, bound.exact) == (3, 2, True)
    bound = clairvoyant_bound(jobs, {"fast": 2, "slow": 1}, curves=lambda _, pool: curves[pool])
    assert bound.met == 3
    bound = clairvoyant_bound(jobs, {"slow": 3}, curves=lambda _, pool: curves[pool])
    assert (bound.met, bound.hopeless) == (1, frozenset({"a", "b"}))


def test_a_bound_without_time_is_that_of_the_jobs_alone() -> None:
    bound = clairvoyant_bound([job(str(i), 100.0, 10.0, {1: 10.0}) for i in range(5)], 3, time_limit_s=0.0)
    assert (bound.met, bound.exact) == (5, False)


def test_joined_intervals_loosen_and_never_spoil() -> None:
    jobs = [job(str(i), 30.0, 4.0 * i + 4.0, {1: 10.0}, submitted_s=4.0 * i) for i in range(20)]
    jobs += [job(f"x{i}", 30.0, 4.0 * i + 4.0, {1: 10.0}, submitted_s=4.0 * i) for i in range(20)]
    assert clairvoyant_bound(jobs, 1).met == 20
    assert 20 <= clairvoyant_bound(jobs, 1, max_columns=60).met <= 40


def test_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="0 slots"):
        clairvoyant_bound([], 0)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("elasticflow_airflow.scheduler_core.simulator.bound.fluid.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"elasticflow-airflow\[simulate\]"):
        clairvoyant_bound([], 1)


# -- against all schedules -------------------------------------------------------------------------------------------

State = tuple[tuple[int, int, int], ...]
"""Of each job: steps left (0: done; -1: too late), the way it is held (0: not), seconds until it makes steps."""
Ways = Sequence[tuple[int, int, int]]
"""How a job can be held: pool, slots, steps/s; the first is not at all."""


def ways_of(*curves: ScalingCurve | None) -> Ways:
    on_pools = [(pool, n, int(v)) for pool, curve in enumerate(curves) if curve for n, v in curve.steps_per_s.items()]
    return [(0, 0, 0), *on_pools]


def best_of_all_schedules(jobs: Sequence[Job], ways: Sequence[Ways], slots: Sequence[int]) -> tuple[int, float]:
    """The most deadlines, and the most value, over all schedules whose changes fall on whole seconds."""
    horizon = int(max(j.deadline_s or 0 for j in jobs))
    states: set[State] = {tuple((int(j.total_steps or 0), 0, 0) for j in jobs)}
    for now in range(horizon):
        following: set[State] = set()
        for state in states:
            for held in _choices(jobs, ways, state, tuple(slots), now):
                following.add(tuple(map(_second, jobs, ways, state, held, [now] * len(jobs))))
        states = following
    met = [[left == 0 for left, _, _ in state] for state in states]
    return max(sum(row) for row in met), max(
        sum(j.value for j, done in zip(jobs, row, strict=True) if done) for row in met
    )


def _choices(
    jobs: Sequence[Job], ways: Sequence[Ways], state: State, free: tuple[int, ...], now: int
) -> Iterator[tuple[int, ...]]:
    if not jobs:
        yield ()
        return
    idle = state[0][0] <= 0 or now < jobs[0].submitted_s
    for way, (pool, size, _) in enumerate(ways[0]):
        if size <= free[pool] and not (idle and way):
            rest = tuple(room - size * (i == pool) for i, room in enumerate(free))
            for others in _choices(jobs[1:], ways[1:], state[1:], rest, now):
                yield (way, *others)


def _second(j: Job, ways: Ways, state: tuple[int, int, int], way: int, now: int) -> tuple[int, int, int]:
    left, held, wait = state
    if left <= 0:
        return (left, 0, 0)
    assert j.deadline_s is not None
    if way != held:
        wait = int(j.costs.startup_s if held == 0 else j.costs.pause_s) if way else 0
    if not wait:
        left = max(0, left - ways[way][2])
    wait = max(0, wait - 1)
    if left and now + 1 >= j.deadline_s:
        return (-1, 0, 0)
    return (left, way, wait) if left else (0, 0, 0)


def tiny(seed: int) -> tuple[list[Job], int]:
    chaos = random.Random(seed)
    pause = chaos.choice([0, 0, 1, 2])
    jobs = []
    for number in range(chaos.choice([2, 3, 3])):
        one = chaos.randint(1, 3)
        two = chaos.randint(one, 2 * one + 1)  # better than linear at times, and flat
        speeds = {1: float(one), 2: float(two), 4: float(chaos.randint(max(1, two - 1), 2 * two))}
        begin = chaos.randint(0, 3)
        end = begin + chaos.randint(2, 5)
        steps = chaos.randint(1, max(1, int(max(speeds.values())) * (end - begin - pause)))
        name, value = str(number), float(chaos.choice([1, 1, 2, 3]))
        jobs.append(job(name, steps, end, speeds, submitted_s=begin, pause_s=pause, value=value))
    return jobs, chaos.choice([1, 2, 3, 4])


def test_no_schedule_of_tiny_instances_beats_it() -> None:
    tight = tight_value = 0
    seeds = range(80)
    for seed in seeds:
        jobs, slots = tiny(seed)
        count, value = best_of_all_schedules(jobs, [ways_of(one.curve) for one in jobs], [slots])
        bound = clairvoyant_bound(jobs, slots)
        assert count <= bound.met, f"seed {seed}: {count} of {len(jobs)} can be met, the bound says {bound.met}"
        assert value <= bound.value, f"seed {seed}: value {value} can be met, the bound says {bound.value}"
        tight += bound.met == count
        tight_value += bound.value < value + 0.5
    assert min(tight, tight_value) > 0.8 * len(seeds), "a bound that loose says nothing"


def planted(seed: int) -> tuple[list[Job], int]:
    """Jobs that a schedule, which is then forgotten, just meets: no slot idles, and windows end with the last step."""
    chaos = random.Random(seed)
    slots, horizon, pause = chaos.choice([1, 2, 4, 8]), chaos.randint(6, 16), chaos.choice([0, 0, 1, 2])
    scaling = chaos.choice([1.0, 1.0, 0.8])
    speeds = {n: 6.0 * n**scaling for n in (1, 2, 4, 8)}
    made: list[list[float]] = []  # of each job: first and last second, steps
    running: list[tuple[int, int, int]] = []  # job, size, seconds left to hold it so
    waits: dict[int, int] = {}
    for now in range(horizon):
        free = slots - sum(size for _, size, _ in running)
        while free:
            size = chaos.choice([n for n in speeds if n <= free])
            idle = [i for i in range(len(made)) if all(i != j for j, _, _ in running) and i not in waits]
            number = chaos.choice(idle) if idle and chaos.random() < 0.5 else len(made)
            if number == len(made):
                made.append([now, now, 0.0])
            running.append((number, size, pause + chaos.randint(1, 5)))
            waits[number] = pause
            free -= size
        for number, size, _ in running:
            made[number][1] = now + 1
            made[number][2] += 0.0 if waits[number] else speeds[size]
            waits[number] = max(0, waits[number] - 1)
        running = [(number, size, left - 1) for number, size, left in running if left > 1]
        waits = {number: waits[number] for number, _, _ in running}
    return [
        job(str(i), steps, end, speeds, submitted_s=begin, pause_s=pause)
        for i, (begin, end, steps) in enumerate(made)
        if steps
    ], slots


def test_jobs_of_a_full_schedule_can_pay_what_all_slots_cost_at_any_price() -> None:
    """Each inequality of the bound holds for the schedule, and with no room to spare where no slot was wasted."""
    fullest = {0.0: 0.0, 1.0: 0.0, 2.0: 0.0}  # by pause
    for seed in range(80):
        jobs, slots = planted(seed)
        assert clairvoyant_bound(jobs, slots).met == len(jobs), f"seed {seed}: all {len(jobs)} were met"
        candidates, _, _ = _candidates(jobs, {"": slots}, None)
        chaos = np.random.default_rng(seed)
        edges = np.arange(float(max(one.deadline_s or 0.0 for one in jobs)) + 1.0)
        width = len(edges) - 1
        for per_slot_s in (
            np.ones(width),
            chaos.random(width),
            chaos.random(width) < 0.5,
            chaos.exponential(size=width),
        ):
            prices = Prices(edges, np.asarray(per_slot_s, dtype=float)[None, :])
            paid, budget = least_costs(candidates, prices).sum(), prices.of_all_slots(candidates.pool_slots)
            assert paid <= budget, f"seed {seed}: they pay {paid} at least where all slots cost {budget}"
            pause_s = jobs[0].costs.pause_s
            fullest[pause_s] = max(fullest[pause_s], paid / budget if per_slot_s.min() > 0.0 else 0.0)
    assert min(fullest.values()) > 0.999, "a cost that much too low says nothing"


def test_no_schedule_on_two_pools_beats_it() -> None:
    tight = 0
    seeds = range(60)
    for seed in seeds:
        chaos = random.Random(seed)
        jobs, slots = tiny(seed)
        jobs = jobs[:2] if slots > 2 else jobs
        other = {one.job_id: ScalingCurve({1: float(chaos.randint(1, 3)), 2: 4.0}) for one in jobs}

        def curve_on(one: Job, pool: str, other: dict[str, ScalingCurve] = other) -> ScalingCurve | None:
            return other[one.job_id] if pool == "b" else one.curve

        ways = [ways_of(one.curve, other[one.job_id]) for one in jobs]
        count, _ = best_of_all_schedules(jobs, ways, [slots, 1])
        bound = clairvoyant_bound(jobs, {"a": slots, "b": 1}, curves=curve_on)
        assert count <= bound.met, f"seed {seed}: {count} of {len(jobs)} can be met, the bound says {bound.met}"
        tight += bound.met == count
    assert tight > 0.8 * len(seeds)


def test_no_way_to_run_one_job_pays_less_than_its_least_cost() -> None:
    """Prices by the second against all ways to hold slots on whole seconds; free of the fluid relaxation."""
    ratios = []
    for seed in range(150):
        chaos = random.Random(seed)
        startup, pause = chaos.choice([(0, 0), (1, 1), (2, 1), (1, 2), (2, 2)])
        speeds = {1: 2.0, 2: float(chaos.randint(2, 4)), 4: float(chaos.randint(3, 9))}
        begin, length = chaos.randint(0, 2), chaos.randint(4, 8)
        steps = chaos.randint(1, max(1, int(max(speeds.values())) * (length - startup) // 2))
        one = job("a", steps, begin + length, speeds, submitted_s=begin, pause_s=pause, startup_s=startup)
        candidates, hopeless, _ = _candidates([one], {"": 4}, None)
        if hopeless:
            continue
        price = [chaos.choice([0.0, 0.0, 1.0, 2.0, 5.0]) for _ in range(begin + length)]
        prices = Prices(np.arange(len(price) + 1.0), np.array([price]))
        least = float(least_costs(candidates, prices)[0])
        paid = _cheapest(one, price)
        assert least <= paid + 1e-9, f"seed {seed}: {paid} was paid, at least {least} was claimed"
        if paid:
            ratios.append(least / paid)
    assert sum(ratios) / len(ratios) > 0.6  # whole seconds waste a part of one


def _cheapest(one: Job, price: Sequence[float]) -> float:
    ways = ways_of(one.curve)
    states: dict[tuple[int, int, int], float] = {(int(one.total_steps or 0), 0, 0): 0.0}
    for now in range(len(price)):
        following: dict[tuple[int, int, int], float] = {}
        for state, paid in states.items():
            for way, (_, size, _) in enumerate(ways):
                if way and (state[0] <= 0 or now < one.submitted_s):
                    continue
                after, cost = _second(one, ways, state, way, now), paid + size * price[now]
                following[after] = min(cost, following.get(after, cost))
        states = following
    return min((paid for (left, _, _), paid in states.items() if left == 0), default=float("inf"))


# -- on the traces ---------------------------------------------------------------------------------------------------


def load(trace: str, kind: str, nodes: int, slots: int, pause_s: float) -> list[Job]:
    path = DATA / "traces" / f"{trace}.csv"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    curves = read_curves(DATA / "throughput" / kind)
    simulated = prepare(read_trace(path), curves, cluster(nodes, slots), Conditions(pause_s=pause_s))
    return [item.job for item in simulated]


@pytest.mark.parametrize(
    ("trace", "kind", "nodes", "slots", "pause_s", "most"),
    [
        ("195job", "a100", 16, 8, 30.0, 183),
        ("cluster10", "a100", 32, 8, 30.0, 257),
        ("poisson_100job", "a100", 16, 8, 30.0, 100),
        pytest.param("t4_195job", "t4", 16, 4, 30.0, 163, marks=pytest.mark.slow),
        pytest.param("t4_195job", "t4", 16, 4, 0.0, 181, marks=pytest.mark.slow),
        pytest.param("195job", "a100", 8, 8, 30.0, 174, marks=pytest.mark.slow),
        pytest.param("cluster10", "a100", 4, 8, 30.0, 254, marks=pytest.mark.slow),
    ],
)
def test_bounds_of_the_shared_traces(trace: str, kind: str, nodes: int, slots: int, pause_s: float, most: int) -> None:
    bound = clairvoyant_bound(load(trace, kind, nodes, slots, pause_s), nodes * slots)
    assert bound.met == most
    assert bound.exact
    assert len(bound.chosen) == most


def test_our_schedule_does_not_beat_it_and_pays_what_it_must() -> None:
    """A real schedule meets no more than the bound; its met jobs obey an inequality of prices that nobody tuned."""
    jobs = load("cluster10", "a100", 4, 8, 30.0)
    nodes = cluster(4, 8)
    simulated = prepare(
        read_trace(DATA / "traces" / "cluster10.csv"),
        read_curves(DATA / "throughput" / "a100"),
        nodes,
        Conditions(pause_s=30.0),
    )
    result = Simulation(
        name="elasticflow", policy=Scheduler(SchedulerConfig(), nodes), nodes=nodes, jobs=simulated
    ).run()
    met = {record.job_id for record in result.records if record.met}
    bound = clairvoyant_bound(jobs, 32)
    assert 0 < len(met) <= bound.met
    candidates, _, _ = _candidates(jobs, {"": 32}, None)
    assert met <= set(candidates.ids)
    chosen = np.array([job_id in met for job_id in candidates.ids], dtype=float)
    edges = np.linspace(candidates.begin_s.min(), candidates.end_s.max(), 60)
    chaos = np.random.default_rng(7)
    for _ in range(5):
        prices = Prices(edges, chaos.exponential(size=(1, 59)))
        assert float(least_costs(candidates, prices) @ chosen) <= prices.of_all_slots(candidates.pool_slots)
