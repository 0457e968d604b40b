"""Clusters of several GPU types: their nodes, and curves of each type for the jobs of one trace.

Tables of different types were often measured with different batch sizes. A job's speed on a type whose table lacks its
batch size is then *assumed*, not measured: as many samples per second at each number of workers as the table has for
the nearest measured batch size. This overestimates small batches on many workers, where steps are bound by
communication. Models missing from any of the tables are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from elasticflow_airflow.scheduler_core.model.values import Node, ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.inputs.csv_rows import records_of
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import Curves, holes
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import Trace

_PLACEMENT = "consolidated"


def mixed_cluster(parts: Sequence[tuple[str, int, int]]) -> tuple[Node, ...]:
    """Return nodes of several types; each part is a type, its number of nodes and their slots.

    Raises:
        InputError: a number is not positive, or a type is named twice.
    """
    names = [name for name, _, _ in parts]
    if len(set(names)) != len(names):
        raise InputError(f"each type of GPU is named once; there are {names}")
    nodes: list[Node] = []
    for name, count, slots in parts:
        if count < 1 or slots < 1:
            raise InputError(f"{count} nodes of {name!r} with {slots} slots each have no room; give at least 1")
        width = len(str(count - 1))
        nodes.extend(Node(node_id=f"{name}-{number:0{width}}", slots=slots, gpu_type=name) for number in range(count))
    return tuple(nodes)


def common_jobs(
    trace: Trace, by_type: Mapping[str, Curves]
) -> tuple[Trace, dict[str, dict[tuple[str, int], ScalingCurve]]]:
    """Return the jobs of a trace whose model is in every type's table, and their curves on each type.

    Raises:
        InputError: there are no such jobs.
    """
    models = {name: {model for model, _ in curves} for name, curves in by_type.items()}
    jobs = tuple(job for job in trace.jobs if all(job.model in known for known in models.values()))
    if not jobs:
        raise InputError(f"no job's model is in the tables of all of {sorted(by_type)}", trace.path)
    wanted = {(job.model, job.batch_size) for job in jobs}
    curves = {name: {key: at_batch(known, *key) for key in sorted(wanted)} for name, known in by_type.items()}
    return Trace(trace.path, jobs, trace.ignored), curves


def at_batch(curves: Curves, model: str, batch_size: int) -> ScalingCurve:
    """Return a model's curve at a batch size: measured, or with the samples per second of the nearest measured one."""
    measured = curves.get((model, batch_size))
    if measured is not None:
        return measured
    near = min(
        (batch for known, batch in curves if known == model), key=lambda batch: abs(math.log(batch / batch_size))
    )
    factor = near / batch_size
    return ScalingCurve({size: speed * factor for size, speed in curves[model, near].steps_per_s.items()})


def read_typed_curves(path: Path) -> dict[str, dict[tuple[str, int], ScalingCurve]]:
    """Read curves by type from a table with the columns ``gpu, placement, model, batch_size, workers, steps_per_s``.

    Rows of other placements than the consolidated one, without a batch size, or with a number of workers not a power
    of two are skipped.

    Raises:
        InputError: the file is invalid.
    """
    found: dict[str, dict[tuple[str, int], dict[int, float]]] = {}
    needed = ("gpu", "placement", "model", "batch_size", "workers", "steps_per_s")
    for line, row in records_of(path, needed):
        if row["placement"] != _PLACEMENT or not row["batch_size"]:
            continue
        try:
            batch, workers, speed = int(row["batch_size"]), int(row["workers"]), float(row["steps_per_s"])
        except ValueError:
            raise InputError(f"a cell is not a number: {row}", path, line) from None
        if speed > 0.0 and workers > 0 and not workers & (workers - 1):
            found.setdefault(row["gpu"], {}).setdefault((row["model"], batch), {})[workers] = speed
    if not found:
        raise InputError(f"no row has placement {_PLACEMENT!r} and a batch size", path)
    for gpu, tables in found.items():
        for (model, batch), speeds in tables.items():
            if gaps := holes(speeds):
                what = f"the curve of {model!r} with batch size {batch} on {gpu!r}"
                raise InputError(f"{what} has a hole at {gaps} workers; measure it there", path)
    return {gpu: {key: ScalingCurve(speeds) for key, speeds in tables.items()} for gpu, tables in found.items()}
