"""Pollux: goodput and batch size of one job, and the sizes that are fittest for all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import BatchChoice, Job, ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.baselines.common.goodput import (
    best_batch,
    efficiency,
    goodput,
    goodput_curve,
)
from elasticflow_airflow.scheduler_core.simulator.baselines.pollux import Pollux, damping, fittest, speed_ups
from elasticflow_airflow.scheduler_core.simulator.run import SimulatedJob, Simulation

MakeJob = Callable[..., Job]

CURVES = {
    64: ScalingCurve({1: 4.0, 2: 6.0, 4: 7.0}),
    128: ScalingCurve({1: 2.0, 2: 4.0, 4: 6.0}),
    256: ScalingCurve({1: 1.0, 2: 2.0, 4: 4.0}),
}


def choice(noise: float, own: int = 64) -> BatchChoice:
    return BatchChoice(batch_size=own, curves=CURVES, noise_scale=noise)


def test_a_sample_of_a_larger_batch_is_worth_less_by_the_noise_scale() -> None:
    assert efficiency(64.0, 64, 64) == 1.0
    assert efficiency(64.0, 64, 128) == pytest.approx(128 / 192)
    assert efficiency(0.0, 64, 128) == pytest.approx(0.5)  # no noise: a step is a step, whatever its batch
    assert efficiency(1e9, 64, 128) == pytest.approx(1.0)  # all noise: a sample is a sample


def test_goodput_counts_in_steps_of_the_job_s_own_batch() -> None:
    assert goodput(choice(64.0), 64, 4) == 7.0
    assert goodput(choice(64.0), 128, 4) == pytest.approx(6.0 * 2 * 2 / 3)
    assert goodput(choice(64.0), 256, 4) == pytest.approx(4.0 * 4 * 128 / 320)


def test_the_batch_grows_with_the_gang_and_with_the_noise() -> None:
    noisy = choice(64.0)
    assert [best_batch(noisy, workers)[0] for workers in (1, 2, 4)] == [64, 64, 128]
    assert best_batch(choice(640.0), 4)[0] == 256
    assert best_batch(choice(0.0), 4)[0] == 64
    assert best_batch(choice(640.0, own=128), 1)[0] == 128  # never below what the submitter asked for
    assert goodput_curve(noisy).steps_per_s == {1: 4.0, 2: 6.0, 4: pytest.approx(8.0)}


def test_a_restart_damps_the_speed_up_of_young_jobs_most() -> None:
    assert damping(100.0, 1.0, 30.0) == pytest.approx(70 / 130)
    assert damping(10_000.0, 1.0, 30.0) == pytest.approx(9970 / 10_030)
    assert damping(10.0, 5.0, 30.0) == 0.01


def test_speed_ups_are_over_a_fair_share(make: MakeJob, nodes: Any) -> None:
    policy = Pollux(nodes=nodes(1, 8))
    view = policy.view(policy.live_job(make("a", 100.0), 0.0), 0.0)
    assert speed_ups(view, 4.0) == {1: 0.25, 2: 0.5, 4: 1.0, 8: 2.0}
    assert speed_ups(view, 0.5) == {1: 2.0, 2: 4.0, 4: 8.0, 8: 16.0}


def test_the_fittest_sizes_favour_whoever_scales(make: MakeJob, nodes: Any) -> None:
    policy = Pollux(nodes=nodes(1, 8))
    flat = {1: 1.0, 2: 1.1, 4: 1.15, 8: 1.2}
    pair = [make("a", 100.0), make("b", 100.0)]
    assert fittest([policy.view(policy.live_job(job, 0.0), 0.0) for job in pair], 8) == [4, 4]
    # Fair is 4: costs of a are 4/n, of b 1.15/1, 1.15/1.1, 1, 0.96. (4, 4) costs 2; (8, .) leaves b nothing.
    mixed = [make("a", 100.0), make("b", 100.0, curve=flat), make("c", 100.0, curve=flat)]
    assert fittest([policy.view(policy.live_job(job, 0.0), 0.0) for job in mixed], 8) == [4, 2, 2]
    # With three slots nobody is left out for the growth of another.
    assert fittest([policy.view(policy.live_job(job, 0.0), 0.0) for job in mixed], 3) == [1, 1, 1]


def test_a_gang_is_told_its_batch_and_runs_at_its_goodput(make: MakeJob, nodes: Any) -> None:
    job = replace(make("a", 800.0, curve=CURVES[64].steps_per_s), batches=choice(64.0))
    cluster = nodes(1, 4)
    policy = Pollux(nodes=cluster)
    orders = [d for d in policy.handle(ev.JobSubmitted(job), 0.0) if isinstance(d, de.Resize)]
    assert [(order.placement.workers, order.batch_size) for order in orders] == [(4, 128)]
    by_batch = {b: {n: goodput(choice(64.0), b, n) for n in c.steps_per_s} for b, c in CURVES.items()}
    simulated = SimulatedJob(job=job, truth=CURVES[64].steps_per_s, arrives_s=0.0, by_batch=by_batch)
    result = Simulation(name="pollux", policy=Pollux(nodes=cluster), nodes=cluster, jobs=[simulated]).run()
    assert result.records[0].finished_s == pytest.approx(800.0 / 8.0)  # at the batch of 64 it were 800 / 7


def test_without_a_noise_scale_the_batch_stays_and_goodput_is_throughput(make: MakeJob, nodes: Any) -> None:
    decided = Pollux(nodes=nodes(1, 4)).handle(ev.JobSubmitted(make("a", 10.0)), 0.0)
    assert [d.batch_size for d in decided if isinstance(d, de.Resize)] == [None]


def test_a_batch_without_a_curve_is_refused() -> None:
    with pytest.raises(ValueError, match="own batch size 32 has no curve"):
        choice(1.0, own=32)
