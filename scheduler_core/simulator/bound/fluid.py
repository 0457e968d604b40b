"""The fluid relaxation behind the bound: the minimum overload of the cluster by a set of jobs, and where it occurs.

It only supplies prices: nothing here has to be exact for the bound to hold. Needs scipy when it is called.
"""

from __future__ import annotations

from importlib.util import find_spec
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from elasticflow_airflow.scheduler_core.simulator.bound.costs import Candidates, Floats, Prices

_ABSENT = 1e-9


def require_scipy() -> None:
    """Check that scipy is installed.

    Raises:
        ModuleNotFoundError: scipy is not installed.
    """
    if find_spec("scipy") is None:
        raise ModuleNotFoundError(
            "the clairvoyant bound needs scipy, which is not installed: pip install 'elasticflow-airflow[simulate]'",
            name="scipy",
        )


class FluidRelaxation:
    """A relaxation in which jobs mix sizes and split slots freely within intervals between submissions and deadlines.

    A column is a share of what a job can do in one interval. With one pool it is a segment of the concave envelope of
    the job's curve, which needs no rows beyond its bounds. With several pools it is the time at one size; a row per job
    and interval then limits the total time to the length of the interval.
    """

    def __init__(self, jobs: Candidates, max_columns: int) -> None:
        self.jobs = jobs
        ready = np.minimum(jobs.begin_s + jobs.startup_s, jobs.end_s)
        one_pool = len(jobs.pool_slots) == 1
        parts = [_parts(jobs, j, one_pool) for j in range(len(jobs.ids))]
        edges = np.unique(np.concatenate([ready, jobs.end_s]))
        while len(edges) > 3 and _columns(edges, ready, jobs.end_s, parts) > max_columns:
            edges = np.unique(np.append(edges[::2], edges[-1]))
        self.edges_s = edges
        self.dt = np.diff(edges)
        owner, interval, pair, pool, take, make = [], [], [], [], [], []
        pairs = 0
        self.feasible = np.zeros(len(jobs.ids))
        for j, part in enumerate(parts):
            low = max(0, int(np.searchsorted(edges, ready[j], side="right")) - 1)
            high = int(np.searchsorted(edges, jobs.end_s[j], side="left"))
            inside = np.arange(low, high)
            length = np.minimum(edges[inside + 1], jobs.end_s[j]) - np.maximum(edges[inside], ready[j])
            inside, length = inside[length > 0.0], length[length > 0.0]
            count, n = len(part), len(inside)
            owner.append(np.full(n * count, j))
            interval.append(np.repeat(inside, count))
            pair.append(np.repeat(np.arange(pairs, pairs + n), count))
            pool.append(np.tile(part[:, 0].astype(np.intp), n))
            take.append(np.outer(length, part[:, 1]).ravel())
            make.append(np.outer(length, part[:, 2]).ravel() / jobs.steps[j])
            pairs += n
            self.feasible[j] = min(1.0, float(length.sum()) * float(jobs.speed[j].max()) / float(jobs.steps[j]))
        self.owner, self.interval, self.pool = _joined(owner), _joined(interval), _joined(pool)
        self.pair: NDArray[np.intp] | None = None if one_pool else _joined(pair)
        self.take, self.make = np.concatenate(take), np.concatenate(make)
        self.columns = len(self.take)

    def overload(self, chosen: Floats, time_limit_s: float) -> Prices | None:
        """Return prices at which the chosen jobs (or fractions of them) are too expensive; all zero if they fit.

        Returns None if the solver did not finish in time.
        """
        from scipy import sparse
        from scipy.optimize import linprog

        jobs, intervals = self.jobs, len(self.dt)
        taken = np.flatnonzero(chosen > _ABSENT)
        row_of = np.full(len(chosen), -1)
        row_of[taken] = np.arange(len(taken))
        columns = np.flatnonzero(row_of[self.owner] >= 0)
        n, caps = len(columns), intervals * len(jobs.pool_slots)
        owner, here = self.owner[columns], np.arange(n)
        cap_row = self.pool[columns] * intervals + self.interval[columns]
        room = np.outer(jobs.pool_slots, self.dt).ravel()
        steps = sparse.csr_matrix((-self.make[columns], (row_of[owner], here)), shape=(len(taken), n + caps))
        used = self.take[columns] * chosen[owner] / room[cap_row]
        capacity = sparse.hstack(
            [sparse.csr_matrix((used, (cap_row, here)), shape=(caps, n)), -sparse.identity(caps)], format="csr"
        )
        rows, limits = [steps, capacity], [-self.feasible[taken] * (1.0 - 1e-9), np.ones(caps)]
        if self.pair is not None:
            _, place = np.unique(self.pair[columns], return_inverse=True)
            pairs = int(place.max()) + 1
            rows.append(sparse.csr_matrix((np.ones(n), (place, here)), shape=(pairs, n + caps)))
            limits.append(np.ones(pairs))
        weight = room / room.sum()
        solved = linprog(
            np.concatenate([np.zeros(n), weight]),
            A_ub=sparse.vstack(rows, format="csr"),
            b_ub=np.concatenate(limits),
            bounds=np.column_stack([np.zeros(n + caps), np.concatenate([np.ones(n), np.full(caps, np.inf)])]),
            method="highs-ds" if self.pair is None else "highs-ipm",  # the faster one by far in each case
            options={"time_limit": max(1.0, time_limit_s)},
        )
        if solved.status != 0:
            return None
        per_slot_s = np.zeros(caps)
        if solved.fun > _ABSENT:
            per_slot_s = np.maximum(0.0, -solved.ineqlin.marginals[len(taken) : len(taken) + caps]) / room
            per_slot_s[per_slot_s < 1e-9 * per_slot_s.max()] = 0.0
            per_slot_s /= max(float(per_slot_s.max()), 1e-300)
        return Prices(self.edges_s, per_slot_s.reshape(len(jobs.pool_slots), intervals))


def _parts(jobs: Candidates, j: int, segments: bool) -> Floats:
    """Return rows (pool, slots, steps/s): corners of the concave envelope on each pool, or segments between them."""
    found: list[tuple[float, float, float]] = []
    for pool in np.unique(jobs.pool[j]):
        corners = [(0.0, 0.0)]
        of_pool = jobs.pool[j] == pool
        for size, speed in sorted(set(zip(jobs.size[j][of_pool], jobs.speed[j][of_pool], strict=True))):
            while len(corners) > 1 and _below(corners[-2], corners[-1], (size, speed)):
                corners.pop()
            corners.append((float(size), float(speed)))
        for before, corner in pairwise(corners):
            base = before if segments else (0.0, 0.0)
            found.append((float(pool), corner[0] - base[0], corner[1] - base[1]))
    return np.array(found)


def _below(first: tuple[float, float], middle: tuple[float, float], last: tuple[float, float]) -> bool:
    """Return whether ``middle`` lies on or below the line from ``first`` to ``last``."""
    return (middle[1] - first[1]) * (last[0] - middle[0]) <= (last[1] - middle[1]) * (middle[0] - first[0])


def _columns(edges: Floats, begin: Floats, end: Floats, parts: list[Floats]) -> int:
    spans = np.searchsorted(edges, end, side="left") - np.searchsorted(edges, begin, side="right") + 1
    return int(sum(span * len(part) for span, part in zip(spans, parts, strict=True)))


def _joined(lists: list[NDArray[np.intp]]) -> NDArray[np.intp]:
    return np.concatenate(lists).astype(np.intp)
