"""Goodput: throughput times statistical efficiency, and the best batch size for it (Pollux, OSDI 2021, section 3).

Steps are counted at the submitter's batch size ``M0``, with which a job's length is given: a step of another size is
worth as many of them as it brings training forward. Knows one job's curves; no cluster, no time.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.model.values import BatchChoice, ScalingCurve


def efficiency(noise_scale: float, base: float, batch: float) -> float:
    """Progress by sample at ``batch`` relative to that at ``base`` (section 3.1); all three in samples."""
    return (noise_scale + base) / (noise_scale + batch)


def goodput(batches: BatchChoice, batch: int, workers: int) -> float:
    """Steps of the submitter's batch size by second that training with ``batch`` is worth; 0 if it was not measured."""
    speed = batches.curves[batch].steps_per_s.get(workers, 0.0)
    return speed * batch / batches.batch_size * efficiency(batches.noise_scale, batches.batch_size, batch)


def best_batch(batches: BatchChoice, workers: int) -> tuple[int, float]:
    """The batch size of the greatest goodput for a number of workers, never below the submitter's, and its goodput."""
    allowed = sorted(batch for batch in batches.curves if batch >= batches.batch_size)
    return max(((batch, goodput(batches, batch, workers)) for batch in allowed), key=lambda pair: (pair[1], -pair[0]))


def goodput_curve(batches: BatchChoice) -> ScalingCurve:
    """Goodput by number of workers, each at its best batch size."""
    sizes = sorted({workers for curve in batches.curves.values() for workers in curve.steps_per_s})
    found = {workers: best_batch(batches, workers)[1] for workers in sizes}
    return ScalingCurve({workers: value for workers, value in found.items() if value > 0.0})
