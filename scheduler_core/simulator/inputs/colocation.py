"""The fractions of their speeds that jobs keep when they share a GPU, from a measured table of pairs. Reads files.

The table has the speeds of pairs that share a GPU freely; ``curves`` has the speeds of each job alone. The sum of the
normalised speeds, ``a`` and ``b``, is the gain of sharing; Gandiva (OSDI 2018) packs jobs in this way. For guests it is
*assumed* that the speeds can be shifted at a constant sum, as AntMan (OSDI 2020, section 4) does by throttling the
second job's kernels: if the first keeps its full speed, the second has ``a + b - 1`` of its own. Pairs that were not
measured share nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elasticflow_airflow.scheduler_core.simulator.inputs.csv_rows import records_of
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import Curves
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError

_COLUMNS = ("gpu", "model_a", "batch_size_a", "workers_a", "model_b", "batch_size_b", "workers_b")


@dataclass(frozen=True, slots=True)
class Colocation:
    """Speed fractions by pair of workloads.

    ``parts``: what a guest keeps, by holder and guest; ``kept``: what the first keeps beside the second, unthrottled.
    """

    parts: Mapping[tuple[str, str], float]
    kept: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def leftover(self, holder: str, guest: str) -> float:
        """Return the fraction of its speed that a guest keeps while the holder loses nothing; 0 for an unknown pair."""
        return self.parts.get((holder, guest), 0.0)

    def packed(self, mine: str, other: str) -> float:
        """Return the fraction of its speed that a job keeps beside another, unthrottled; 0 for an unknown pair."""
        return self.kept.get((mine, other), 0.0)


def part_left(first: float, second: float) -> float:
    """Return what the second of a pair keeps if the first loses nothing; both speeds are relative to running alone."""
    return min(1.0, max(0.0, first + second - 1.0))


def read_colocation(path: Path, gpu: str, alone: Curves) -> Colocation:
    """Read the table for one GPU type; ``alone`` are its curves, of which the speeds at one worker are used.

    Raises:
        InputError: the file is invalid, or has no pair for this type.
    """
    parts: dict[tuple[str, str], float] = {}
    kept: dict[tuple[str, str], float] = {}
    for line, row in records_of(path, (*_COLUMNS, "steps_per_s_a", "steps_per_s_b")):
        if row["gpu"] != gpu or not row["batch_size_a"] or not row["batch_size_b"]:
            continue
        try:
            keys = [(row["model_" + side], int(row["batch_size_" + side])) for side in "ab"]
            speeds = [float(row["steps_per_s_" + side]) for side in "ab"]
        except ValueError:
            raise InputError(f"a cell is not a number: {row}", path, line) from None
        bases = [alone[key].steps_per_s.get(1, 0.0) if key in alone else 0.0 for key in keys]
        if min(bases) <= 0.0:
            continue
        first, second = speeds[0] / bases[0], speeds[1] / bases[1]
        left = part_left(first, second)
        names = [f"{model}:{batch}" for model, batch in keys]
        kept[names[0], names[1]], kept[names[1], names[0]] = first, second
        parts[names[0], names[1]] = parts[names[1], names[0]] = left
    if not parts:
        raise InputError(f"no pair of known models for GPU type {gpu!r}", path)
    return Colocation(parts, kept)
