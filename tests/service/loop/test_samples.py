"""Samples of how a job goes: kept while it trains, thinned when there are many, and the times of its workers."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace

import pytest

from elasticflow_airflow.service.loop import samples
from elasticflow_airflow.service.store.documents.job_documents import Sampling

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


def kept(world, job):
    with world.store.read() as reader:
        return reader.samples(job.job.job_id, 1)


def test_a_training_leaves_samples_of_its_steps_loss_speed_and_workers(world):
    job = world.submit(steps=300, scaling_curve=CURVE)
    assert world.ended(job).state == "succeeded"
    found = kept(world, job)
    assert len(found) >= 5
    assert [one.step for one in found] == sorted(one.step for one in found)
    assert found[-1].step == 300
    assert {one.workers for one in found} <= {1, 2, 4}
    assert found[-1].loss is not None
    assert any(one.steps_per_s == pytest.approx(32.0, rel=0.2) for one in found)
    assert all(earlier.at <= later.at for earlier, later in pairwise(found))


def test_a_long_training_keeps_a_bounded_number_of_samples_spread_over_its_life(world, monkeypatch):
    monkeypatch.setattr(samples, "MOST", 20)
    job = world.submit(steps=6000, scaling_curve=CURVE)
    assert world.ended(job, every=2.0).state == "succeeded"
    found = kept(world, job)
    assert 10 <= len(found) <= 20
    assert found[0].step < 6000 * 0.1
    assert found[-1].step == 6000
    gaps = [later.at - earlier.at for earlier, later in pairwise(found)]
    assert max(gaps[:-1]) < 60.0


def test_samples_go_on_after_a_restart_of_the_service_without_doubling(world):
    job = world.submit(steps=600, scaling_curve=CURVE)
    world.until(lambda: world.status(job).step > 150, "some steps are done")
    world.restart()
    assert world.ended(job).state == "succeeded"
    steps = [one.step for one in kept(world, job)]
    assert len(steps) == len(set(steps))
    assert steps == sorted(steps)


def test_what_was_said_last_of_noise_and_samples_is_kept():
    row = SimpleNamespace(sampling=Sampling(4, 1.0))
    samples.note(row, {"noise_scale": 240.5, "samples_per_s": 100, "loss": 1.0})
    samples.note(row, {"noise_scale": None, "samples_per_s": math.inf})
    assert row.sampling == Sampling(4, 1.0, noise_scale=240.5, samples_per_s=100.0)


def test_a_checkpoint_is_known_with_its_time_and_size(world):
    job = world.submit(steps=100, scaling_curve=CURVE)
    assert world.ended(job).state == "succeeded"
    with world.store.read() as reader:
        candidates = reader.candidates(job.job.job_id, 1)
    assert candidates
    assert all(one.at is not None and world.now_s - 300 < one.at <= world.now_s for one in candidates)
