"""Detects workers of a gang that are persistently slow: they hold up all others and are better replaced.

EDL (TPDS 2021, section 3) removes stragglers by scaling in. Workers of a gang do equal shares of each step, so their
compute times (without waiting for each other) are comparable. Each is compared with the median of the *others*, in
units of their median absolute deviation, so that one slow worker of two or four is not hidden in the statistics.
Pure functions over JSON-friendly values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

_TO_DEVIATION = 1.4826
"""Factor from median absolute deviation to standard deviation, for normally distributed times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerRule:
    """When a worker is a straggler. Raises ValueError for a rule that no worker, or every worker, would meet."""

    windows: int = 3
    """Number of consecutive measurements that must show it."""
    deviations: float = 5.0
    """The worker is slower than the others' median by this many of their deviations ..."""
    least_excess: float = 0.25
    """... and by this fraction of it: below that, replacing a worker costs more than it gains."""

    def __post_init__(self) -> None:
        if self.windows < 1 or not self.deviations >= 0 or not self.least_excess > 0:
            raise ValueError(
                f"windows={self.windows}, deviations={self.deviations}, least_excess={self.least_excess}: at least one"
                " window, no negative deviations, and a positive excess"
            )


@dataclass(frozen=True, slots=True)
class Straggler:
    """A slow worker. ``slowdown`` is its time divided by the others' median, as the median over the windows used."""

    worker_id: str
    slowdown: float


Windows = Mapping[str, Sequence[float]]
"""By worker: compute seconds per step in its last windows, oldest first."""


def add_window(
    windows: Windows, worker_id: str, compute_s: float, steps: int, rule: StragglerRule
) -> dict[str, list[float]]:
    """Return the windows after a worker has reported ``compute_s`` seconds of computing for ``steps`` steps.

    An invalid measurement (no steps, no finite time) changes nothing. Only the windows that the rule needs are kept.
    """
    new = {known: list(values) for known, values in windows.items()}
    if steps > 0 and math.isfinite(compute_s) and compute_s > 0:
        new[worker_id] = [*new.get(worker_id, []), compute_s / steps][-rule.windows :]
    return new


def find_stragglers(windows: Windows, workers: Sequence[str], rule: StragglerRule) -> tuple[Straggler, ...]:
    """Return the workers that were slow in each of the last windows, slowest first; always less than half of them.

    Empty until all of ``workers`` (the current gang; others are ignored) have enough windows: a worker that is new, or
    has reported nothing, cannot be compared.
    """
    if len(workers) < 2 or any(len(windows.get(worker, ())) < rule.windows for worker in workers):
        return ()
    times = {worker: list(windows[worker])[-rule.windows :] for worker in workers}
    found = []
    for worker in workers:
        ratios = []
        for number, own in enumerate(times[worker]):
            others = [times[other][number] for other in workers if other != worker]
            middle = median(others)
            spread = _TO_DEVIATION * median(abs(other - middle) for other in others)
            if own - middle <= max(rule.deviations * spread, rule.least_excess * middle):
                break
            ratios.append(own / middle)
        if len(ratios) == rule.windows:
            found.append(Straggler(worker, median(ratios)))
    found.sort(key=lambda straggler: (-straggler.slowdown, straggler.worker_id))
    # If half of them are slow, there are two kinds of workers rather than stragglers.
    return tuple(found) if 2 * len(found) < len(workers) or len(workers) == 2 else ()
