"""Schedules of one-term leases in which every job gets enough leases in time (Chronus, SoCC 2021).

A greedy filling by deadline finds most schedules; if it fails, a mixed-integer program is solved (HiGHS through scipy,
an optional dependency). Every schedule lists the terms of each job, so it is its own proof. Knows no clock and no
curves, only sizes, numbers of leases and terms.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

SOLVER_LIMIT_S = 1.0
"""Time limit of the solver; if it finds no schedule by then, there is taken to be none."""

Rows = npt.NDArray[np.int32]
"""By level and term: slots in free blocks of at least ``2**level`` slots."""
Schedule = dict[str, tuple[int, ...]]
"""By job, the terms (from 0) in which it holds a lease, in ascending order."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A job needs ``leases`` leases of ``size`` slots within the first ``terms`` terms, at most one per term."""

    job_id: str
    size: int
    leases: int
    terms: int

    @property
    def level(self) -> int:
        """Base-2 logarithm of the size."""
        return self.size.bit_length() - 1

    @property
    def possible(self) -> bool:
        """Whether there are enough terms at all."""
        return self.leases <= self.terms


def by_deadline(demands: Iterable[Demand]) -> list[Demand]:
    """Sort by number of terms, fewest first."""
    return sorted(demands, key=lambda d: (d.terms, d.terms - d.leases, d.job_id))


def greedy(ordered: Sequence[Demand], rows: Rows, first: Collection[str] | None = None) -> Schedule | None:
    """Fill in the given order, each job as early as possible; None if a job gets too few leases.

    ``first``: the jobs that hold the first term, if already decided; they must fit there.
    """
    free = rows.copy()
    found: Schedule = {}
    if first is not None:
        for demand in ordered:
            if demand.job_id in first:
                free[: demand.level + 1, 0] -= demand.size
    for demand in ordered:
        terms = _room(free, demand)
        if first is None:
            chosen = terms[: demand.leases]
        else:
            has = demand.job_id in first
            chosen = terms[terms > 0][: demand.leases - has]
        free[: demand.level + 1, chosen] -= demand.size
        if first is not None and demand.job_id in first:
            chosen = np.concatenate(([0], chosen))
        if len(chosen) < demand.leases:
            return None
        found[demand.job_id] = tuple(int(term) for term in chosen)
    return found


def beside(
    schedule: Mapping[str, Sequence[int]], demands: Sequence[Demand], newcomer: Demand, rows: Rows
) -> Schedule | None:
    """Add a new job as early as it fits to an unchanged schedule; None if it does not fit or the schedule fails."""
    free = rows.copy()
    found: Schedule = {}
    for demand in demands:
        terms = [term for term in schedule.get(demand.job_id, ()) if term < min(demand.terms, rows.shape[1])]
        if len(terms) < demand.leases:
            return None
        found[demand.job_id] = tuple(terms[: demand.leases])
        free[: demand.level + 1, list(found[demand.job_id])] -= demand.size
    if free.size and free.min() < 0:
        return None
    chosen = _room(free, newcomer)[: newcomer.leases]
    if len(chosen) < newcomer.leases:
        return None
    return {**found, newcomer.job_id: tuple(int(term) for term in chosen)}


def _room(free: Rows, demand: Demand) -> npt.NDArray[np.intp]:
    """Return the terms with room for one more gang of this size, in order."""
    if demand.level >= free.shape[0]:
        return np.zeros(0, dtype=np.intp)
    window = free[: demand.level + 1, : demand.terms]
    return np.flatnonzero((window >= demand.size).all(axis=0))


def solve(demands: Sequence[Demand], rows: Rows) -> Schedule | None:
    """Search for a schedule with a mixed-integer program; None if it finds none.

    It has one integer per job and span of terms between two deadlines: the leases the job gets there, at most the
    number of terms in the span. This is a relaxation (gangs of different sizes may not pack as their sums suggest), so
    the solution is laid out term by term and is valid only if that succeeds.

    Raises:
        ImportError: scipy is not installed.
    """
    from scipy import optimize, sparse

    if not demands:
        return {}
    horizon = max(demand.terms for demand in demands)
    changed = np.flatnonzero((rows[:, 1:horizon] != rows[:, : horizon - 1]).any(axis=0)) + 1
    cuts = sorted({0, *(demand.terms for demand in demands), *(int(at) for at in changed)})
    spans = [(a, b) for a, b in pairwise(cuts) if b <= rows.shape[1]]
    variables = [
        (row, number)
        for row, demand in enumerate(demands)
        for number, (_, end) in enumerate(spans)
        if end <= demand.terms and demand.level < rows.shape[0]
    ]
    if not variables:
        return None
    low: list[float] = [float(demand.leases) for demand in demands]
    high: list[float] = [np.inf] * len(demands)
    limits: dict[tuple[int, int], int] = {}
    entries: list[tuple[int, int, float]] = []
    upper: list[float] = []
    for column, (row, number) in enumerate(variables):
        demand, (begin, end) = demands[row], spans[number]
        upper.append(float(min(end - begin, demand.leases)))
        entries.append((row, column, 1.0))
        for level in range(demand.level + 1):
            if (number, level) not in limits:
                limits[number, level] = len(low)
                low.append(-np.inf)
                high.append(float(rows[level, begin]) * (end - begin))
            entries.append((limits[number, level], column, float(demand.size)))
    at, columns, values = zip(*entries, strict=True)
    matrix = sparse.csr_array((values, (at, columns)), shape=(len(low), len(variables)))
    answer = optimize.milp(
        np.array([spans[number][1] / horizon for _, number in variables]),  # early rather than late
        constraints=optimize.LinearConstraint(matrix, low, high),
        integrality=np.ones(len(variables)),
        bounds=optimize.Bounds(0, np.array(upper)),
        options={"time_limit": SOLVER_LIMIT_S, "mip_rel_gap": 0.5},
    )
    if answer.x is None:
        return None
    counts = {key: round(x) for key, x in zip(variables, answer.x, strict=True) if x > 0.5}
    return _lay_out(demands, spans, counts, rows)


def _lay_out(
    demands: Sequence[Demand], spans: Sequence[tuple[int, int]], counts: Mapping[tuple[int, int], int], rows: Rows
) -> Schedule | None:
    """Assign terms to each span's leases: large gangs first, in the emptiest terms; leftovers wherever they fit."""
    free = rows.copy()
    found: dict[str, list[int]] = {demand.job_id: [] for demand in demands}
    for number, (begin, end) in enumerate(spans):
        here = [(demand, counts.get((row, number), 0)) for row, demand in enumerate(demands)]
        for demand, count in sorted(here, key=lambda item: (-item[0].size, -item[1], item[0].job_id)):
            if count == 0:
                continue
            window = free[: demand.level + 1, begin:end].min(axis=0)
            order = np.argsort(-window, kind="stable")[:count]
            chosen = np.sort(order[window[order] >= demand.size]) + begin
            free[: demand.level + 1, chosen] -= demand.size
            found[demand.job_id].extend(int(term) for term in chosen)
    for demand in by_deadline(demands):
        missing = demand.leases - len(found[demand.job_id])
        if missing > 0:
            held = set(found[demand.job_id])
            extra = [int(term) for term in _room(free, demand) if int(term) not in held][:missing]
            if len(extra) < missing:
                return None
            free[: demand.level + 1, extra] -= demand.size
            found[demand.job_id].extend(extra)
    return {job_id: tuple(sorted(terms)) for job_id, terms in found.items()}


def schedule_for(demands: Sequence[Demand], rows: Rows) -> Schedule | None:
    """Return a schedule that meets all demands, by greedy filling or by the solver; None if none is found."""
    if any(not demand.possible for demand in demands):
        return None
    found = greedy(by_deadline(demands), rows)
    return solve(demands, rows) if found is None else found


def keeping(demands: Sequence[Demand], rows: Rows, running: Sequence[str]) -> Schedule | None:
    """Return a schedule whose first term goes to jobs that need it, then to ``running``; None if none is found."""
    if not demands or not rows.shape[1]:
        return None
    free = rows[:, 0].copy()
    by_id = {demand.job_id: demand for demand in demands}
    urgent = by_deadline(demands)
    first: set[str] = set()
    tight = [d.job_id for d in urgent if d.terms == d.leases]
    for job_id in [*tight, *running, *(d.job_id for d in urgent)]:
        demand = by_id.get(job_id)
        if demand is None or job_id in first or demand.level >= len(free):
            continue
        if demand.leases and free[: demand.level + 1].min() >= demand.size:
            free[: demand.level + 1] -= demand.size
            first.add(job_id)
    return greedy(urgent, rows, first)
