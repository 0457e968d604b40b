"""The clairvoyant bound on the number and the value of deadlines that any schedule could meet.

It knows all arrivals in advance; it knows no policy and computes no schedule.

*What is bounded.* Any schedule by the rules of the simulator: each slot belongs to one job at a time; a job with ``n``
slots makes at most the steps/s of the fastest size up to ``n`` in its curve; each change of its slots to a non-empty
set, including the start, stops it for ``startup_s`` (from no slots) or ``pause_s``; all steps are made, and the tail
has passed, by the deadline. Placement, integral gangs at every moment and unknown future arrivals are ignored: they
only make the problem harder. Policies that change the job itself (other batch sizes, fewer steps, two jobs on one slot)
are not bounded.

*Proof.* Take any non-negative price per slot-second ``p(t)`` (one per pool of slots), and let ``c_j`` be the least that
job ``j`` alone has to pay for slots to meet its deadline. In a schedule that meets the jobs of a set ``S``, each of
them pays at least ``c_j``, and together they pay at most the price of all slots at all times::

    sum of c_j over S  <=  integral of p(t) * slots dt

So every price gives one linear inequality that the met jobs of *every* schedule satisfy, and the largest sum of values
under any number of these inequalities is a bound, whatever the prices are and however they were found. ``c_j`` is
bounded from below by the Lagrangian relaxation of "all steps are made": for every price ``m >= 0`` of a step::

    c_j  >=  m * steps + min over all ways to hold slots of (what is paid - m * steps made)

The inner minimum is computed exactly by a dynamic program over sizes (:func:`.costs.least_costs`), with starts and
pauses. Costs are rounded down and capacity up by more than the rounding error of float sums.

*Which prices.* Prices come from the fluid relaxation: jobs may mix sizes (the concave envelope of the usable curve) and
split slots arbitrarily within each interval between submissions and deadlines; they only need their total of steps
after one start. A linear program finds the minimum overload of a set of jobs; its dual values are prices at which the
set is too expensive. The next set is the one that maximises the value under all inequalities so far (HiGHS, first
fractional, then integral). This is repeated until a set fits the fluid relaxation (``exact``: the relaxation gives no
further inequality) or time is up. This is Benders' decomposition, and as tight as the mixed-integer program over
intervals and sizes; starts and pauses in ``c_j`` make it tighter. If an integral program is not solved to the end, its
dual bound is used, never its incumbent.

Needs scipy, which is imported only when a bound is computed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elasticflow_airflow.scheduler_core.model.values import Job, ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.bound.costs import Candidates, Floats, Prices, least_costs
from elasticflow_airflow.scheduler_core.simulator.bound.fluid import FluidRelaxation, require_scipy
from elasticflow_airflow.scheduler_core.simulator.outcome import MET_TOLERANCE_S

_SAFETY = 1e-9
_FRACTION = 1e-7
_COLUMNS, _COLUMNS_OF_POOLS = 250_000, 50_000
_COARSE = 20_000
"""Minimum number of columns of a linear program that is worth coarsening."""
_SOLVER = 1e-5
"""Possible error of HiGHS, at its tolerances, in a sum of some hundred values."""

Curves = Callable[[Job, str], ScalingCurve | None]
"""Returns the curve of a job on a pool of slots (a GPU type), or None if it does not run there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """No schedule meets more than ``met`` deadlines, or deadlines with a total value above ``value``.

    ``alone`` counts the jobs that could meet their deadline on the empty cluster: a weaker bound. ``chosen`` are the
    jobs that the relaxation would meet: one optimal set of possibly several, which a schedule may not be able to meet.
    ``exact``: the relaxation was solved completely; otherwise time ran out, and the bound holds but may be loose.
    ``alone_at_fixed_size`` counts those that could meet it on the empty cluster with as many workers as they asked for
    (the nearest measured size, preferring smaller ones): no schedule in which jobs keep that size meets more.
    """

    deadlines: int
    alone: int
    alone_at_fixed_size: int
    met: int
    value: float
    chosen: frozenset[str]
    hopeless: frozenset[str]
    """Jobs that miss their deadline even alone."""
    inequalities: int
    exact: bool
    run_s: float


def clairvoyant_bound(
    jobs: Sequence[Job],
    slots: int | Mapping[str, int],
    *,
    curves: Curves | None = None,
    time_limit_s: float = 120.0,
    max_columns: int | None = None,
) -> Bound:
    """Bound the number and the value of the deadlines of ``jobs`` that can be met on a cluster.

    ``slots`` is the size of the cluster, or of each of its pools (GPU types) by name; a gang lies in one pool, and
    moving to another pool costs a change. ``curves`` returns a job's speeds on each pool; by default its own curve
    applies everywhere. Best-effort jobs and jobs of unknown length or curve are left out: they have no deadline to
    meet, and leaving them out only helps the others. ``max_columns`` limits the size of the linear programs (default:
    250,000, or 50,000 with several pools): beyond it, neighbouring intervals are joined, which loosens the bound.

    Raises:
        ModuleNotFoundError: scipy is not installed.
        ValueError: the cluster has no slots.
    """
    begin = time.monotonic()
    require_scipy()
    pools = dict(slots) if isinstance(slots, Mapping) else {"": slots}
    if not pools or min(pools.values()) < 1:
        raise ValueError(f"the cluster has {slots!r} slots; a bound needs at least 1 in each pool")
    promised = [job for job in jobs if job.deadline_s is not None and job.total_steps is not None]
    candidates, hopeless, at_fixed_size = _candidates(promised, pools, curves)
    if not candidates.ids:
        return Bound(
            deadlines=len(promised),
            alone=0,
            alone_at_fixed_size=0,
            met=0,
            value=0.0,
            chosen=frozenset(),
            hopeless=hopeless,
            inequalities=0,
            exact=True,
            run_s=time.monotonic() - begin,
        )
    values = {job.job_id: job.value for job in promised}
    worth = np.array([values[job_id] for job_id in candidates.ids])
    if max_columns is None:
        max_columns = _COLUMNS if len(pools) == 1 else _COLUMNS_OF_POOLS
    one_each = np.ones(len(worth))
    search = _Search(candidates, max_columns, begin + time_limit_s)
    met, chosen, exact = search.best(one_each)
    value = float(met * worth[0])
    if (worth != worth[0]).any():
        value, _, exact_value = search.best(worth)
        exact = exact and exact_value
    return Bound(
        deadlines=len(promised),
        alone=len(candidates.ids),
        alone_at_fixed_size=at_fixed_size,
        met=round(met),
        value=value,
        chosen=frozenset(job_id for job_id, taken in zip(candidates.ids, chosen, strict=True) if taken > 0.5),
        hopeless=hopeless,
        inequalities=len(search.rows),
        exact=exact,
        run_s=time.monotonic() - begin,
    )


def _candidates(
    jobs: Sequence[Job], pools: Mapping[str, int], curves: Curves | None
) -> tuple[Candidates, frozenset[str], int]:
    """Return the jobs that alone meet their deadlines, as arrays, and the ids of those that do not.

    Also returns how many of them meet it at the size that they asked for.
    """
    names = list(pools)
    found: list[tuple[Job, list[tuple[int, int, float]]]] = []
    hopeless: set[str] = set()
    at_fixed_size = 0
    for job in jobs:
        assert job.deadline_s is not None
        assert job.total_steps is not None
        options: list[tuple[int, int, float]] = []
        for number, name in enumerate(names):
            curve = curves(job, name) if curves is not None else job.curve
            if curve is not None:
                most = min(pools[name], job.max_workers or pools[name])
                options += [(number, size, speed) for size, speed in curve.usable(job.min_workers, most).items()]
        fastest = max((speed for _, _, speed in options), default=0.0)
        room_s = job.deadline_s + MET_TOLERANCE_S - job.costs.tail_s - job.submitted_s - job.costs.startup_s
        if fastest * room_s >= job.total_steps * (1.0 - _SAFETY) and fastest > 0.0:
            found.append((job, options))
            at_fixed_size += _fixed_speed(job, options) * room_s >= job.total_steps * (1.0 - _SAFETY)
        else:
            hopeless.add(job.job_id)
    width = max((len(options) for _, options in found), default=1)
    padded = [options + [options[-1]] * (width - len(options)) for _, options in found]
    grid = np.array(padded, dtype=np.float64).reshape(len(found), width, 3)
    return (
        Candidates(
            ids=tuple(job.job_id for job, _ in found),
            pool_slots=np.array([float(pools[name]) for name in names]),
            begin_s=np.array([job.submitted_s for job, _ in found]),
            end_s=np.array([(job.deadline_s or 0.0) + MET_TOLERANCE_S - job.costs.tail_s for job, _ in found]),
            steps=np.array([job.total_steps or 0.0 for job, _ in found]),
            startup_s=np.array([job.costs.startup_s for job, _ in found]),
            pause_s=np.array([job.costs.pause_s for job, _ in found]),
            pool=grid[:, :, 0].astype(np.intp),
            size=grid[:, :, 1],
            speed=grid[:, :, 2],
        ),
        frozenset(hopeless),
        at_fixed_size,
    )


def _fixed_speed(job: Job, options: Sequence[tuple[int, int, float]]) -> float:
    """Return the best speed on any pool at the size that the job asked for, or the nearest one, preferring smaller."""
    asked, fastest = job.requested_workers or job.min_workers, 0.0
    for pool in {pool for pool, _, _ in options}:
        speeds = {size: speed for other, size, speed in options if other == pool}
        fixed = max((size for size in speeds if size <= asked), default=min(speeds))
        fastest = max(fastest, *(speed for size, speed in speeds.items() if size <= fixed))
    return fastest


class _Search:
    """The inequalities found so far (each scaled to a right-hand side of 1), and the search for more."""

    def __init__(self, candidates: Candidates, max_columns: int, until: float) -> None:
        self.candidates, self.until = candidates, until
        self.fluids = [FluidRelaxation(candidates, max_columns)]
        while self.fluids[0].columns > _COARSE:  # long intervals first: prices almost as good in less time
            coarser = FluidRelaxation(candidates, self.fluids[0].columns // 4)
            if coarser.columns > 0.6 * self.fluids[0].columns:
                break
            self.fluids.insert(0, coarser)
        self.rows: list[Floats] = []

    def best(self, values: Floats) -> tuple[float, Floats, bool]:
        """Return an upper bound of the sum of values, its set of jobs, and whether the relaxation was exhausted."""
        whole = bool(np.all(values == np.round(values)))
        bound, chosen, integral, exact = float(values.sum()), np.ones(len(values)), False, False
        solved = self._fractional(values) if self.rows else None
        if solved is not None:
            bound, chosen = solved
        while time.monotonic() < self.until:
            more = self._more(chosen)
            if more is None:
                break
            if not more:
                if integral or _is_whole(chosen):
                    exact = True
                    break
                integral = True  # the fractional program gives no further inequality; continue with whole jobs
            solved = self._integral(values) if integral else self._fractional(values)
            if solved is None:
                break
            bound, chosen = min(bound, solved[0]), solved[1]
        bound += _SOLVER * max(1.0, bound / 100.0)
        return (float(math.floor(bound)) if whole else bound), chosen, exact

    def _more(self, chosen: Floats) -> bool | None:
        """Search for inequalities that the chosen jobs violate; False: there is none; None: time is up."""
        for fluid in self.fluids:
            prices = fluid.overload(chosen, self.until - time.monotonic())
            if prices is None:
                return None
            if not prices.any():
                continue
            rows = [self._inequality(part) for part in (prices, *prices.runs())]
            broken = [row for row in rows if float(row @ chosen) > 1.0 + _FRACTION]
            self.rows += broken
            if broken:
                return True
        return False

    def _inequality(self, prices: Prices) -> Floats:
        budget = prices.of_all_slots(self.candidates.pool_slots) * (1.0 + _SAFETY)
        return least_costs(self.candidates, prices) / budget

    def _fractional(self, values: Floats) -> tuple[float, Floats] | None:
        from scipy.optimize import linprog

        solved = linprog(-values, A_ub=np.array(self.rows), b_ub=np.ones(len(self.rows)), bounds=(0.0, 1.0))
        return (-float(solved.fun), solved.x) if solved.status == 0 else None

    def _integral(self, values: Floats) -> tuple[float, Floats] | None:
        from scipy.optimize import Bounds, LinearConstraint, milp

        solved = milp(
            -values,
            constraints=LinearConstraint(np.array(self.rows), -np.inf, 1.0),
            bounds=Bounds(0.0, 1.0),
            integrality=np.ones(len(values)),
            options={"mip_rel_gap": 0.0, "time_limit": max(1.0, self.until - time.monotonic())},
        )
        if solved.x is None or solved.mip_dual_bound is None:
            return None
        return -float(solved.mip_dual_bound), np.round(solved.x)


def _is_whole(chosen: Floats) -> bool:
    return bool(np.all(np.abs(chosen - np.round(chosen)) < _FRACTION))
