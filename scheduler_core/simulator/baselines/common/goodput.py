"""Goodput: throughput times statistical efficiency, and the best batch size for it (Pollux, OSDI 2021, section 3).

Steps are counted at the submitter's batch size ``M0``, in which a job's length is given: a step of another size counts
as the number of ``M0`` steps with the same training progress. Knows one job's curves; no cluster, no time.
"""

from __future__ import annotations

from elasticflow_airflow.scheduler_core.model.values import BatchChoice, ScalingCurve


def efficiency(noise_scale: float, base: float, batch: float) -> float:
    """Return the progress per sample at ``batch`` relative to ``base`` (section 3.1); all three in samples."""
    return (noise_scale + base) / (noise_scale + batch)


def goodput(batches: BatchChoice, batch: int, workers: int) -> float:
    """Return the goodput of training with ``batch``, in steps/s of the submitter's batch size; 0 if not measured."""
    speed = batches.curves[batch].steps_per_s.get(workers, 0.0)
    return speed * batch / batches.batch_size * efficiency(batches.noise_scale, batches.batch_size, batch)


def best_batch(batches: BatchChoice, workers: int) -> tuple[int, float]:
    """Return the batch size of greatest goodput for a number of workers, at least the submitter's, and its goodput."""
    allowed = sorted(batch for batch in batches.curves if batch >= batches.batch_size)
    return max(((batch, goodput(batches, batch, workers)) for batch in allowed), key=lambda pair: (pair[1], -pair[0]))


def goodput_curve(batches: BatchChoice) -> ScalingCurve:
    """Return the goodput by number of workers, each at its best batch size."""
    sizes = sorted({workers for curve in batches.curves.values() for workers in curve.steps_per_s})
    found = {workers: best_batch(batches, workers)[1] for workers in sizes}
    return ScalingCurve({workers: value for workers, value in found.items() if value > 0.0})
