"""Gavel: fair shares of time on several types of GPU, and rounds that realise them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core.model.values import Job, ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.baselines.gavel import Gavel, GavelJob, max_min_shares
from elasticflow_airflow.scheduler_core.simulator.inputs.mixed import mixed_cluster
from elasticflow_airflow.scheduler_core.simulator.run import Change, SimulatedJob, Simulation, SimulationError

MakeJob = Callable[..., Job]


def of_type(job: Job, **speeds: float) -> Job:
    """A job of one slot at a speed by type."""
    curves = {name: ScalingCurve({1: speed}) for name, speed in speeds.items()}
    return replace(job, curve=ScalingCurve({1: min(speeds.values())}), curves=curves, max_workers=1)


def play(jobs: list[Job], nodes: Any, **options: Any) -> dict[str, list[tuple[float, str]]]:
    """When each job stood on which type ("" at its end)."""
    changes: list[Change] = []
    simulated = [
        SimulatedJob(
            job=job,
            truth=job.curve.steps_per_s if job.curve is not None else {},
            arrives_s=job.submitted_s,
            truths={name: curve.steps_per_s for name, curve in job.curves.items()},
        )
        for job in jobs
    ]
    policy = Gavel(nodes=nodes, **options)
    Simulation(name="gavel", policy=policy, nodes=nodes, jobs=simulated, on_change=changes.append).run()
    found: dict[str, list[tuple[float, str]]] = {job.job_id: [] for job in jobs}
    for change in changes:
        if not change.event:
            found[change.job_id].append((change.at_s, change.slots[0].node_id.split("-")[0] if change.slots else ""))
    return found


def test_one_type_is_shared_by_equal_slot_time() -> None:
    three = [GavelJob("a", 1, {"": 5.0}), GavelJob("b", 1, {"": 1.0}), GavelJob("c", 2, {"": 3.0})]
    assert max_min_shares(three, {"": 2}) == pytest.approx({("a", ""): 2 / 3, ("b", ""): 2 / 3, ("c", ""): 1 / 3})


def test_what_one_cannot_use_goes_to_the_others() -> None:
    pair = [GavelJob("small", 1, {"": 1.0}), GavelJob("large", 4, {"": 1.0})]
    assert max_min_shares(pair, {"": 4}) == pytest.approx({("small", ""): 1.0, ("large", ""): 3 / 4})


def test_weights_count() -> None:
    pair = [GavelJob("a", 1, {"": 1.0}, weight=3.0), GavelJob("b", 1, {"": 1.0})]
    assert max_min_shares(pair, {"": 1}) == pytest.approx({("a", ""): 3 / 4, ("b", ""): 1 / 4})


def test_each_goes_to_the_type_where_it_gains_most() -> None:
    pytest.importorskip("scipy")
    # b runs at the same speed everywhere, so it leaves the fast type to a and loses nothing.
    pair = [GavelJob("a", 1, {"fast": 4.0, "slow": 1.0}), GavelJob("b", 1, {"fast": 1.0, "slow": 1.0})]
    shares = max_min_shares(pair, {"fast": 1, "slow": 1})
    assert shares["a", "fast"] == pytest.approx(1.0, abs=1e-4)
    assert shares["b", "slow"] == pytest.approx(1.0, abs=1e-4)


def test_the_least_normalised_throughput_is_as_large_as_it_can_be() -> None:
    pytest.importorskip("scipy")
    # Alike but for their speed, so both have half of each type: anything else takes from one of them.
    pair = [GavelJob("a", 1, {"fast": 4.0, "slow": 1.0}), GavelJob("b", 1, {"fast": 8.0, "slow": 2.0})]
    shares = max_min_shares(pair, {"fast": 1, "slow": 1})
    for job_id, unit in (("a", 1.0), ("b", 2.0)):
        throughput = shares[job_id, "fast"] * 4.0 * unit + shares[job_id, "slow"] * unit
        assert throughput == pytest.approx(2.5 * unit, abs=1e-3)


def test_two_types_are_taken_by_who_gains_and_swapped_for_it(make: MakeJob) -> None:
    pytest.importorskip("scipy")
    nodes = mixed_cluster([("fast", 1, 1), ("slow", 1, 1)])
    jobs = [
        of_type(make("same", 500.0, pause=10.0), fast=1.0, slow=1.0),
        of_type(make("gains", 1600.0, at=20.0, pause=10.0), fast=4.0, slow=1.0),
    ]
    found = play(jobs, nodes)
    assert found["same"][0] == (0.0, "fast")
    assert (360.0, "slow") in found["same"]  # at the next round it makes room, and loses nothing but a pause
    assert (360.0, "fast") in found["gains"]


def test_rounds_give_equal_shares_of_one_slot(make: MakeJob, nodes: Any) -> None:
    jobs = [make("a", 1000.0), make("b", 1000.0)]
    found = play(jobs, nodes(1, 1), round_s=100.0)
    # They take turns; where both have had the same, the one that runs goes on and saves a pause.
    assert [at for at, _ in found["a"]][:4] == [0.0, 100.0, 300.0, 500.0]
    assert [at for at, _ in found["b"]][:3] == [100.0, 300.0, 500.0]


def test_no_gang_may_stand_on_two_types(make: MakeJob) -> None:
    class Across(Gavel):
        def seats(self, wanted: Any, free: int) -> tuple[dict[str, int], dict[str, str]]:
            return {claim.job_id: 0b11 for claim in wanted.claims}, {}

    nodes = mixed_cluster([("fast", 1, 1), ("slow", 1, 1)])
    job = SimulatedJob(job=make("a", 10.0), truth={1: 1.0, 2: 2.0}, arrives_s=0.0)
    with pytest.raises(SimulationError, match="several types of GPU"):
        Simulation(name="across", policy=Across(nodes=nodes), nodes=nodes, jobs=[job]).run()
