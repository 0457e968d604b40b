"""Measured scaling curves from a folder of tables: one CSV per model, rows are global batch sizes, columns workers.

Cells are steps/s; empty, ``nan`` or 0 means that the size does not run. A power of two between two sizes that run,
which does not run itself or has no column, is a hole. Holes are rejected: the speed was never measured, and a plan
would have to guess it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from elasticflow_airflow.scheduler_core.model.values import ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.inputs.csv_rows import require_width, rows_of
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError

Curves = Mapping[tuple[str, int], ScalingCurve]
"""By model and global batch size."""


def read_curves(folder: Path) -> dict[tuple[str, int], ScalingCurve]:
    """Read all tables of a folder.

    Raises:
        InputError: there is no table, or one is invalid.
    """
    if not folder.is_dir():
        raise InputError("is not a folder; --curves names a folder with one CSV table for each model", folder)
    found: dict[tuple[str, int], ScalingCurve] = {}
    for path in sorted(folder.glob("*.csv")):
        for batch, curve in _read_table(path).items():
            found[path.stem, batch] = curve
    if not found:
        raise InputError("no table (*.csv) in this folder; --curves names a folder with one for each model", folder)
    return found


def holes(sizes: Iterable[int]) -> list[int]:
    """Return the powers of two missing between the smallest and largest of ``sizes``, which are powers of two."""
    known = set(sizes)
    least, largest = min(known), max(known)
    return [1 << level for level in range(least.bit_length(), largest.bit_length()) if 1 << level not in known]


def curve_for(curves: Curves, model: str, batch_size: int, where: tuple[Path | None, int | None]) -> ScalingCurve:
    """Look up a curve.

    Raises:
        InputError: the model or the batch size is not in the tables.
    """
    curve = curves.get((model, batch_size))
    if curve is None:
        batches = sorted(batch for known, batch in curves if known == model)
        if batches:
            text = f"model {model!r} has no curve for batch size {batch_size}; there are {batches}"
        else:
            text = f"unknown model {model!r}; the tables have {sorted({known for known, _ in curves})}"
        raise InputError(text, *where)
    return curve


def _read_table(path: Path) -> dict[int, ScalingCurve]:
    rows = list(rows_of(path))
    header = rows[0][1] if rows else []
    if header[:1] != ["global_batch_size"]:
        raise InputError("the first line must be global_batch_size, followed by numbers of workers", path, 1)
    try:
        sizes = [int(cell) for cell in header[1:]]
    except ValueError:
        raise InputError(f"numbers of workers must be whole; the header is {header}", path, 1) from None
    if sizes != sorted(set(sizes)) or any(size < 1 or size & (size - 1) for size in sizes):
        raise InputError(f"numbers of workers must be rising powers of two; they are {sizes}", path, 1)
    found: dict[int, ScalingCurve] = {}
    lines: dict[int, int] = {}
    for line, row in rows[1:]:
        if any(row):
            batch, curve = _read_row(row, sizes, path, line)
            if batch in found:
                raise InputError(f"batch size {batch} is already that of line {lines[batch]}", path, line)
            found[batch], lines[batch] = curve, line
    return found


def _read_row(row: list[str], sizes: list[int], path: Path, line: int) -> tuple[int, ScalingCurve]:
    require_width(row, len(sizes) + 1, path, line)
    speeds: dict[int, float] = {}
    try:
        batch = int(row[0])
        for size, cell in zip(sizes, row[1:], strict=True):
            speed = float(cell) if cell.strip() else 0.0
            if speed < 0 or math.isinf(speed):
                raise InputError(f"{cell!r} steps/s at {size} workers is no speed", path, line)
            if speed > 0:
                speeds[size] = speed
    except InputError:
        raise
    except ValueError:
        raise InputError(f"a cell is not a number: {','.join(row)}", path, line) from None
    if not speeds:
        raise InputError(f"batch size {batch} runs at no number of workers", path, line)
    missing = holes(speeds)
    if missing:
        text = f"the curve of batch size {batch} has a hole at {missing} workers; measure it there"
        raise InputError(text, path, line)
    return batch, ScalingCurve(speeds)
