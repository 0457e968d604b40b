"""Turn a trace, curves and options into simulated jobs; all input errors are raised here, before the simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.model.values import BatchChoice, Job, Node, OnReject, RescaleCosts, ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.baselines.common.goodput import goodput
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import Curves, curve_for
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import Trace, TraceJob
from elasticflow_airflow.scheduler_core.simulator.run import SimulatedJob

LONGEST_S = 1e10
"""Longer jobs are refused: times are floats, and the scheduler must distinguish times 10 µs apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """The conditions shared by all policies of a comparison.

    ``throughput_error`` is the sigma of one log-normal factor per job and size, constant for the job's lifetime: the
    policy is given the table's speed, the job runs at that speed times the factor times ``speed_factor``.
    ``startup_s`` None: same as ``pause_s``.
    """

    pause_s: float = 30.0
    startup_s: float | None = None
    tail_s: float = 0.0
    on_reject: OnReject = OnReject.FAIL
    late_by: float = 0.5
    """With ``on_reject`` LATE: a job is worth nothing once it is this late, as a fraction of the time from submission
    to deadline."""
    throughput_error: float = 0.0
    speed_factor: float = 1.0
    seed: int = 0
    noise_batches: float | None = None
    """Assumed gradient noise scale, in multiples of each job's batch size; if set, policies may choose batch sizes."""
    deadline_jitter: float = 0.0
    """The time from submission to deadline is scaled by a random factor of 1 plus or minus at most this."""

    @property
    def as_told(self) -> bool:
        """Whether every job runs exactly at the speeds of its curve."""
        return self.throughput_error == 0.0 and self.speed_factor == 1.0

    def __post_init__(self) -> None:
        for name in ("pause_s", "tail_s", "throughput_error", "deadline_jitter", "late_by"):
            value = getattr(self, name)
            if not 0.0 <= value < math.inf:
                raise InputError(f"{name} is {value!r}; it must be a number of at least 0")
        if self.throughput_error >= 10.0:
            raise InputError(
                f"throughput_error is {self.throughput_error!r}; it is the sigma of a log-normal factor, say 0.1, and"
                " below 10"
            )
        if not 0.0 < self.speed_factor < math.inf:
            raise InputError(f"speed_factor is {self.speed_factor!r}; it must be a number above 0, such as 0.9")
        if self.startup_s is not None and not 0.0 <= self.startup_s < math.inf:
            raise InputError(f"startup_s is {self.startup_s!r}; it must be a number of at least 0")
        if self.noise_batches is not None and not 0.0 <= self.noise_batches < math.inf:
            raise InputError(f"noise_batches is {self.noise_batches!r}; it must be a number of at least 0")
        if self.deadline_jitter >= 1.0:
            raise InputError(f"deadline_jitter is {self.deadline_jitter!r}; it must be below 1")


def cluster(nodes: int, slots_per_node: int) -> tuple[Node, ...]:
    """Return equal nodes, named so that sorting by name sorts by number.

    Raises:
        InputError: a number is not positive.
    """
    if nodes < 1 or slots_per_node < 1:
        raise InputError(f"a cluster of {nodes} nodes with {slots_per_node} slots each has no room; give at least 1")
    width = len(str(nodes - 1))
    return tuple(Node(node_id=f"n{number:0{width}}", slots=slots_per_node) for number in range(nodes))


def prepare(
    trace: Trace,
    curves: Curves,
    nodes: Sequence[Node],
    conditions: Conditions,
    by_type: Mapping[str, Curves] | None = None,
) -> list[SimulatedJob]:
    """Return the jobs of a trace under the given conditions, in order of submission.

    ``by_type`` has the curves of each ``Node.gpu_type`` of a mixed cluster and replaces ``curves``: a policy that does
    not know GPU types is given the slowest.

    Raises:
        InputError: a job's model is unknown, or it cannot run on this cluster at any size.
    """
    largest = Layout(nodes).largest_block
    costs = RescaleCosts(
        startup_s=conditions.pause_s if conditions.startup_s is None else conditions.startup_s,
        pause_s=conditions.pause_s,
        tail_s=conditions.tail_s,
    )
    chaos = random.Random(conditions.seed)
    prepared = []
    for row in trace.jobs:
        where = (trace.path, row.line)
        typed = {name: curve_for(tables, row.model, row.batch_size, where) for name, tables in (by_type or {}).items()}
        curve = slowest(typed.values(), where) if typed else curve_for(curves, row.model, row.batch_size, where)
        smallest = min(curve.steps_per_s)
        if smallest > largest:
            raise InputError(
                f"job {row.job_id!r} needs at least {smallest} slots; the largest block of this cluster is {largest}",
                trace.path,
                row.line,
            )
        length_s = max(row.steps / speed for speed in curve.steps_per_s.values())
        if length_s > LONGEST_S:
            raise InputError(
                f"job {row.job_id!r} would take {length_s:.3g} s at its slowest size, more than the {LONGEST_S:g} s to"
                " which times are exact; check its steps and its curve",
                trace.path,
                row.line,
            )
        deadline = row.deadline_s
        if deadline is not None and conditions.deadline_jitter:
            factor = 1.0 + chaos.uniform(-conditions.deadline_jitter, conditions.deadline_jitter)
            deadline = row.submitted_s + (deadline - row.submitted_s) * factor
        job = Job(
            job_id=row.job_id,
            submitted_s=row.submitted_s,
            deadline_s=deadline,
            total_steps=row.steps,
            curve=curve,
            costs=costs,
            value=row.value,
            on_reject=conditions.on_reject,
            latest_deadline_s=_latest(row.submitted_s, deadline, conditions),
            explore=False,
            requested_workers=row.workers,
            task=row.task if row.expected else "",
            curves=typed,
            workload=f"{row.model}:{row.batch_size}",
            batches=_batches(curves, row, conditions.noise_batches) if not typed else None,
        )
        truth = _truth(curve, conditions, random.Random(f"{conditions.seed} speeds {row.job_id}"))
        factors = {size: truth[size] / speed for size, speed in curve.steps_per_s.items()}
        prepared.append(
            SimulatedJob(
                job=job,
                truth=truth,
                arrives_s=row.submitted_s,
                truths={name: _scaled(other.steps_per_s, factors) for name, other in typed.items()},
                by_batch=_goodputs(job.batches, factors),
            )
        )
    return prepared


def slowest(curves: Iterable[ScalingCurve], where: tuple[Path | None, int | None]) -> ScalingCurve:
    """Return the curve with, at each size that all types have, the speed of the slowest type.

    Raises:
        InputError: there is no such size.
    """
    speeds: dict[int, float] = {}
    for number, curve in enumerate(curves):
        known = curve.steps_per_s
        both = known if number == 0 else {size: min(speeds[size], known[size]) for size in speeds if size in known}
        speeds = dict(both)
    if not speeds:
        raise InputError("the types of GPU of this cluster have no number of workers in common for this job", *where)
    return ScalingCurve(speeds)


def _scaled(speeds: Mapping[int, float], factors: Mapping[int, float]) -> dict[int, float]:
    return {size: speed * factors.get(size, 1.0) for size, speed in speeds.items()}


def _latest(submitted_s: float, deadline_s: float | None, conditions: Conditions) -> float | None:
    if deadline_s is None or conditions.on_reject is not OnReject.LATE:
        return None
    return deadline_s + conditions.late_by * (deadline_s - submitted_s)


def _batches(curves: Curves, row: TraceJob, noise_batches: float | None) -> BatchChoice | None:
    if noise_batches is None:
        return None
    known = {batch: curve for (model, batch), curve in curves.items() if model == row.model}
    return BatchChoice(batch_size=row.batch_size, curves=known, noise_scale=noise_batches * row.batch_size)


def _goodputs(batches: BatchChoice | None, factors: Mapping[int, float]) -> dict[int, dict[int, float]]:
    if batches is None:
        return {}
    return {
        batch: _scaled({size: goodput(batches, batch, size) for size in curve.steps_per_s}, factors)
        for batch, curve in batches.curves.items()
    }


def _truth(curve: ScalingCurve, conditions: Conditions, chaos: random.Random) -> dict[int, float]:
    sigma, factor = conditions.throughput_error, conditions.speed_factor
    if sigma == 0.0:
        return {size: speed * factor for size, speed in curve.steps_per_s.items()}
    return {size: speed * factor * chaos.lognormvariate(0.0, sigma) for size, speed in curve.steps_per_s.items()}
