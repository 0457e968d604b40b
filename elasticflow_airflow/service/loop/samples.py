"""The course of a training for the web pages: samples of its progress, and how its workers spent their time.

Written by the pass that folds in the reports, in the same transaction, and thinned: a job keeps a few hundred samples
however long it trains. Rows in, rows out; decides nothing, and nothing depends on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from elasticflow_airflow.runtime.protocol import Report
from elasticflow_airflow.service.decisions.pass_context import PassContext
from elasticflow_airflow.service.decisions.reported_bounds import finite_number
from elasticflow_airflow.service.store.tables import GenerationRow, IncarnationRow, WorkerTimesRow

MOST = 500
"""The most samples that a job keeps."""
INTERVAL_S = 1.0
"""Initial interval between samples; each thinning doubles it."""
_TIMES = ("data_s", "compute_s", "reduce_s", "wait_s", "pause_s", "save_s", "other_s")
_NOTED = ("noise_scale", "samples_per_s")
_SIZES = ("window_steps", "samples", "memory_bytes", "device_memory_bytes")


def take(
    context: PassContext,
    row: IncarnationRow,
    generation: GenerationRow,
    at_s: float,
    speed: float | None,
    *,
    last: bool = False,
) -> None:
    """Record a sample of the progress that was just folded into the row, unless the last one is too recent.

    ``at_s`` is its time (UTC seconds), ``speed`` the recent speed in steps/s. A change of the number of workers is
    always recorded, and so is the ``last`` sample of a training.
    """
    sampling = row.sampling
    stride, before = sampling.stride, sampling.number
    if before is not None and not last:
        fresh = at_s - sampling.at < INTERVAL_S * stride
        if fresh and sampling.workers == generation.workers:
            return
    number = 0 if before is None else (before // stride + 1) * stride
    if number // stride >= MOST:
        stride *= 2
        write(context)
        context.tx.thin_samples(row.job_id, row.incarnation, stride)
        number = -(-number // stride) * stride
    context.samples.append(
        {
            "job_id": row.job_id,
            "incarnation": row.incarnation,
            "number": number,
            "at": at_s,
            "step": row.step,
            "loss": row.loss,
            "steps_per_s": speed,
            "workers": generation.workers,
        }
    )
    row.sampling = replace(sampling, number=number, at=at_s, workers=generation.workers, stride=stride)


def note(row: IncarnationRow, data: Mapping[str, Any]) -> None:
    """Keep the gradient noise scale and the samples per second of all workers from a progress report."""
    told: dict[str, Any] = {
        name: value for name in _NOTED if (value := finite_number(data.get(name))) is not None and value >= 0
    }
    if told:
        row.sampling = replace(row.sampling, **told)


def write(context: PassContext) -> None:
    """Store all samples of this pass that are not stored yet, at once."""
    if context.samples:
        context.tx.add_samples(context.samples)
        context.samples = []


def take_worker(context: PassContext, row: IncarnationRow, generation: GenerationRow, report: Report) -> None:
    """Record how a worker spent its time in the window that it reports; this replaces its previous window."""
    window = {name: report.data[name] for name in (*_TIMES, *_SIZES) if name in report.data}
    if not window:
        return
    known = context.tx.worker_time(row.job_id, row.incarnation, report.worker_id)
    if known is None:
        known = WorkerTimesRow(job_id=row.job_id, incarnation=row.incarnation, worker_id=report.worker_id)
        context.tx.add(known)
    known.generation, known.rank = generation.generation, report.rank
    known.at, known.window = min(report.at_s, context.now), window
