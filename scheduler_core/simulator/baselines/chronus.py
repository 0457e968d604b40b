"""``chronus``: deadlines by leases of equal length, chosen by a mixed-integer program (Chronus, SoCC 2021).

The paper: jobs with deadlines (SLO jobs) and best-effort jobs share a cluster by leases. A job with a lease has its
GPUs exclusively until the lease term ends and is not preempted before. Speeds are profiled, so the number of leases
that a job needs is known. A mixed-integer linear program selects the SLO jobs that can all get enough leases before
their deadlines and assigns the leases; best-effort jobs get the remaining ones. Sizes are those that users request.
Placement consolidates gangs and improves them by local search.

This policy decides whether a deadline is promised, and which jobs hold a lease in each term.

Differences from the paper, and reasons:

- A new job is decided when it is submitted, and promised jobs stay in the program as constraints: that is the meaning
  of a promise for all policies here. ``chronus+size`` chooses a fixed size at admission (the smallest that fits), since
  users of the traces often requested sizes that cannot meet their own deadlines.
- The program counts leases between deadlines, not per term, which keeps it small. Its solution is then laid out term by
  term and stored: the promise rests on that schedule (:mod:`leases`). Greedy filling solves the easy cases.
- In a plan each lease includes the pause of a start. Renewing a lease costs nothing, so plans are kept with time to
  spare. A job too tight for that is *pinned* if possible: it starts immediately and keeps its slots to its end.
- Waiting jobs may use idle slots within a term; the lease then lasts until the term ends. If a promise depends on
  such a start, the slots are reserved for it. At the moment when leases are assigned, no slot is idle: a job that is
  judged then needs leases from that term on.
- A job's tail is part of its last lease, so no job holds slots beyond a lease.
- Placement is buddy allocation, as for all policies: blocks are always consolidated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import Admit, AtRisk, Decision, Reject, Terms, Wait
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Node, Phase
from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.leases import (
    Demand,
    Rows,
    Schedule,
    beside,
    keeping,
    schedule_for,
)
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import GangJob, JobView
from elasticflow_airflow.scheduler_core.simulator.baselines.common.seating import Room, seat
from elasticflow_airflow.times import moment

LEASE_S = 600.0
_HORIZON = 8192
"""Maximum number of terms planned ahead."""
_SIZE, _PINNED, _ENDS = "lease_size", "pinned_until_s", "ends_s"


class Chronus(GangPolicy):
    """Chronus: leases. Deterministic unless the solver hits its time limit."""

    def __init__(
        self,
        config: SchedulerConfig | None = None,
        nodes: Iterable[Node] = (),
        *,
        lease_s: float = LEASE_S,
        choose_size: bool = False,
    ) -> None:
        super().__init__(config, nodes)
        if lease_s <= 0.0:
            raise ValueError(f"lease_s is {lease_s!r}; it must be above 0")
        self._lease_s = lease_s
        self._choose_size = choose_size
        self._term_end_s = -math.inf
        self._pins: dict[str, int] = {}
        """Blocks (masks) found for pinned jobs."""
        self._starts: dict[str, int] = {}
        """Blocks (masks) reserved for promised jobs that start within this term, until they hold them."""
        self._schedule: Schedule = {}
        """By job, the absolute numbers of the terms in which it holds a lease; proves the promises."""
        self._risks: list[Decision] = []

    # -- admission -------------------------------------------------------------------------------------------------

    def judge(self, newcomer: JobView) -> Admit | Reject | Wait:
        """Promise a deadline if all promised jobs still get enough leases in time."""
        job, now = newcomer.job, newcomer.now
        deadline = job.job.deadline_s
        if deadline is None:
            return self.take(newcomer, "runs in leases that no deadline needs")
        if not newcomer.rising:
            return self.refuse(newcomer, "the cluster has no block now that holds it")
        free, begin = self._free(now), self._begin(now)
        others = [view for view in self._promised(now) if view.job_id != job.job_id]
        demands = self._demands(others, begin, now)
        stored = self._shifted(begin)
        for size in newcomer.rising if self._choose_size else (newcomer.requested_within_knee,):
            block = job.mask if job.size == size else self.layout.find(free, size)
            starts = block if begin > now + TOLERANCE_S else 0
            end = now + newcomer.cost_s(size) + newcomer.run_s(size) + newcomer.tail_s
            demand = self._demand(newcomer, begin, now, size=size, runs=bool(starts))
            if demand is None and end <= deadline:
                return self._promise(job, size, deadline, "ends within the lease that is idle now", starts)
            if demand is not None and demand.possible:
                rows = self._rows([*demands, demand], others, begin, now)
                found = beside(stored, demands, demand, rows) or schedule_for([*demands, demand], rows)
                if found is not None:
                    self._keep(found, begin)
                    count = f"{demand.leases} leases of {size} slots among {demand.terms} terms"
                    return self._promise(job, size, deadline, count, starts)
            if block and end <= deadline:
                found = schedule_for(demands, self._rows(demands, others, begin, now, (block, end)))
                if found is not None:
                    self._keep(found, begin)
                    admitted = self._promise(job, size, deadline, f"keeps {size} slots until {moment(end)}")
                    self._pins[job.job_id] = block
                    job.memory[_PINNED] = end
                    return admitted
        return self.refuse(newcomer, "not enough leases are left before its deadline beside those promised")

    def _promise(self, job: GangJob, size: int, deadline: float, why: str, starts: int = 0) -> Admit:
        """Record the promise; ``starts`` is the block it is to get immediately."""
        job.memory[_SIZE] = float(size)
        job.memory.pop(_PINNED, None)
        self._pins.pop(job.job_id, None)
        if starts and starts != job.mask:
            self._starts[job.job_id] = starts
        return Admit(job.job_id, Terms.DEADLINE, deadline, None, Reason(why))

    def keeps(self, job: GangJob) -> bool:  # noqa: ARG002  (same for every job)
        """Return False: a job in its tail when its lease ends needs another lease or releases its slots."""
        return False

    # -- leases ----------------------------------------------------------------------------------------------------

    def wanted(self, scene: Scene) -> Wanted:
        """At the end of a term return the jobs the program chooses; else lease holders and jobs that fit idle slots."""
        now, jobs = scene.now, scene.jobs
        begins = now >= self._term_end_s - TOLERANCE_S
        if begins:
            self._term_end_s = self._next_boundary(now)
        on_time = abs(self._term_end_s - self._lease_s - now) <= TOLERANCE_S
        waiting = sorted((job for job in jobs if not job.size), key=self._by_need)
        running = [job for job in jobs if job.size]
        order: list[JobView]
        if begins and on_time and waiting:
            order = self._choose(running, waiting, now)
        else:
            order = [*running, *self._fitting(waiting, now)]
        claims = [
            Claim(job.job_id, (self._size(job),), f"holds a lease until {moment(self._term_end_s)}") for job in order
        ]
        return Wanted(claims, self._term_end_s if waiting else None)

    def seats(self, wanted: Wanted, free: int) -> tuple[dict[str, int], dict[str, str]]:
        """Keep pinned jobs where they are and place the others around them."""
        pinned: dict[str, int] = {}
        for claim in wanted.claims:
            job = self.jobs[claim.job_id]
            mask = job.mask or self._pins.get(job.job_id, 0) if _PINNED in job.memory else 0
            if mask and not mask & ~free:
                pinned[job.job_id] = mask
                free &= ~mask
        grants, reasons = self._grant(
            Wanted([claim for claim in wanted.claims if claim.job_id not in pinned]), Room(self.layout, free)
        )
        held = {job_id: self.jobs[job_id].mask for job_id, _ in grants}
        return {**pinned, **seat(self.layout, free, grants, held)}, {**dict.fromkeys(pinned, "pinned"), **reasons}

    def _choose(self, running: Sequence[JobView], waiting: Sequence[JobView], now: float) -> list[JobView]:
        """Return all jobs in the order in which the leases of a new term are assigned."""
        jobs = [*running, *waiting]
        promised = [job for job in jobs if job.job.promised]
        demands = self._demands(promised, now, now)
        rows = self._rows(demands, promised, now, now)
        urgent = [job.job_id for job in sorted(promised, key=_by_deadline) if job.size]
        schedule = keeping(demands, rows, urgent)
        if schedule is None:
            stored = self._shifted(now)
            schedule = _still_good(stored, demands, rows) or schedule_for(demands, rows)
        if schedule is None:
            schedule = {demand.job_id: (0,) for demand in demands}
        else:
            self._keep(schedule, now)
        chosen = {job_id for job_id, terms in schedule.items() if terms and terms[0] == 0}

        def rank(job: JobView) -> tuple[int, float, float, int]:
            kind = 3 if not job.job.promised else 0 if _PINNED in job.job.memory else 1 if job.job_id in chosen else 2
            first = job.run_s(self._size(job)) if kind == 3 else job.job.job.deadline_s or 0.0
            return kind, 0.0 if job.size and kind < 3 else 1.0, first, job.job.number

        return sorted(jobs, key=rank)

    def _demands(self, jobs: Iterable[JobView], begin: float, now: float) -> list[Demand]:
        """Return the demands of promised jobs; those that can no longer be met are announced at risk and left out."""
        found = []
        for job in jobs:
            demand = self._demand(job, begin, now)
            if demand is not None and demand.possible:
                found.append(demand)
            elif demand is not None:
                self._announce(job, demand)
        return found

    def _announce(self, view: JobView, demand: Demand) -> None:
        job, deadline = view.job, view.job.job.deadline_s
        if not job.at_risk and deadline is not None:
            job.at_risk = True
            end = view.now + demand.leases * self._lease_s
            reason = Reason("not enough leases are left before its deadline")
            self._risks.append(AtRisk(job.job_id, deadline, end, reason))

    def _keep(self, schedule: Schedule, begin: float) -> None:
        """Store a schedule by absolute term number."""
        base = round(begin / self._lease_s)
        self._schedule = {job_id: tuple(base + term for term in terms) for job_id, terms in schedule.items()}

    def _shifted(self, begin: float) -> Schedule:
        """Return the stored schedule with terms counted from ``begin``."""
        base = round(begin / self._lease_s)
        return {
            job_id: tuple(term - base for term in terms if term >= base) for job_id, terms in self._schedule.items()
        }

    def _replan(self, now: float, why: str, *, retry: bool = False) -> list[Decision]:
        for job in self.jobs.values():
            if not job.mask:
                job.memory.pop(_ENDS, None)
                if job.job_id not in self._pins:
                    job.memory.pop(_PINNED, None)  # its slots were lost
        out = super()._replan(now, why, retry=retry)
        self._pins = {
            job_id: mask for job_id, mask in self._pins.items() if job_id in self.jobs and not self.jobs[job_id].mask
        }
        self._starts.clear()
        risks, self._risks = self._risks, []
        return [*risks, *out]

    def _fitting(self, waiting: Sequence[JobView], now: float) -> list[JobView]:
        """Return the waiting jobs that fit into idle slots without moving a gang: none is moved within a term."""
        found = [job for job in waiting if job.job_id in self._starts or job.job_id in self._pins]
        free = self._free(now)
        for job in waiting:
            block = 0 if job in found else self.layout.find(free, self._size(job))
            if block:
                free &= ~block
                found.append(job)
        return found

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def _free(self, now: float) -> int:
        """Return the idle slots (mask) that are not reserved for a job."""
        taken = 0
        for job in self.jobs.values():
            taken |= job.mask or self._starts.get(job.job_id, 0) | self._pins.get(job.job_id, 0)
        return self.usable(now) & ~taken

    def _next_boundary(self, now: float) -> float:
        return (math.floor((now + TOLERANCE_S) / self._lease_s) + 1.0) * self._lease_s

    def _begin(self, now: float) -> float:
        """Return when the first term begins whose leases are not assigned yet; that may be now."""
        begin = round(now / self._lease_s) * self._lease_s
        due = abs(begin - now) <= TOLERANCE_S and now >= self._term_end_s - TOLERANCE_S
        return now if due else self._next_boundary(now)

    def _promised(self, now: float) -> list[JobView]:
        live = [job for job in self.jobs.values() if job.promised and job.phase is Phase.ADMITTED]
        return [view for view in (self.view(job, now) for job in live) if view.speeds]

    def _by_need(self, job: JobView) -> tuple[float, float, int]:
        """Sort key: promised jobs by deadline, then best-effort jobs, shortest first."""
        return *_by_deadline(job)[:1], 0.0 if job.job.promised else job.run_s(self._size(job)), job.job.number

    def _size(self, job: JobView) -> int:
        return int(job.job.memory.get(_SIZE, 0.0)) or job.requested_within_knee

    def _demand(self, job: JobView, begin: float, now: float, *, size: int = 0, runs: bool = False) -> Demand | None:
        """Return the leases that a job needs from ``begin`` on; None if it has ended by then or is pinned.

        ``size`` and ``runs``, for a new job: its number of slots, and whether it starts now.
        """
        deadline = job.job.job.deadline_s
        if deadline is None or (not size and _PINNED in job.job.memory):
            return None
        known = not size
        size = size or self._size(job)
        speed = job.speeds.get(size, 0.0)
        left = job.left
        if speed > 0.0 and (job.size or runs or job.job_id in self._starts):
            if self._ends_s(job, size) <= begin + TOLERANCE_S:
                return None
            left = max(0.0, left - speed * max(0.0, begin - now - job.cost_s(size)))
        cost = max(job.startup_s, job.pause_s)
        by_lease = speed * (self._lease_s - cost)
        tail = speed * job.tail_s
        if by_lease <= tail or left == math.inf:
            return Demand(job.job_id, size, 1, 0)  # a lease ends before the job has started, or its length is unknown
        leases = max(1, math.ceil(left / by_lease - 1e-9))
        in_last = left - (leases - 1) * by_lease + tail
        if in_last > by_lease * (1.0 + 1e-9):  # the tail needs a lease of its own
            leases, in_last = leases + 1, tail
        terms = max(0, math.floor((deadline - begin) / self._lease_s + 1e-9))
        rest = deadline - begin - terms * self._lease_s - cost
        if rest > 0.0 and in_last <= speed * (rest + (TOLERANCE_S if known else 0.0)):
            terms += 1
        return Demand(job.job_id, size, leases, min(terms, _HORIZON))

    def _ends_s(self, job: JobView, size: int) -> float:
        """Return when it would leave with these slots, tail included; during its tail, the time computed before."""
        cost, run, memory = job.cost_s(size), job.run_s(size), job.job.memory
        if size == job.size and cost + run <= TOLERANCE_S and _ENDS in memory:
            return memory[_ENDS]
        end = job.now + cost + run + job.tail_s
        if size == job.size:
            memory[_ENDS] = end
        return end

    def _rows(
        self,
        demands: Sequence[Demand],
        jobs: Iterable[JobView],
        begin: float,
        now: float,
        pin: tuple[int, float] | None = None,
    ) -> Rows:
        """Return the capacity of the terms from ``begin`` on beside pinned gangs; ``pin``: one more, and its end."""
        pins = [
            (job.job.mask or self._pins.get(job.job_id, 0), job.job.memory[_PINNED])
            for job in jobs
            if _PINNED in job.job.memory
        ]
        if pin is not None:
            pins.append(pin)
        usable = self.usable(now)
        horizon = max((demand.terms for demand in demands), default=0)
        terms = [(min(horizon, max(0, math.ceil((until - begin) / self._lease_s))), mask) for mask, until in pins]
        rows = np.zeros((self.layout.levels, horizon), dtype=np.int32)
        at = 0
        for end in sorted({horizon, *(count for count, _ in terms)}):
            held = 0
            for count, mask in terms:
                held |= mask if count >= end else 0
            rows[:, at:end] = np.array(self.layout.capacity(usable & ~held), dtype=np.int32)[:, None]
            at = end
        return rows


def _still_good(stored: Schedule, demands: Sequence[Demand], rows: Rows) -> Schedule | None:
    nobody = Demand("", 1, 0, 0)
    found = beside(stored, demands, nobody, rows)
    return None if found is None else {job_id: terms for job_id, terms in found.items() if job_id}


def _by_deadline(job: JobView) -> tuple[float, int]:
    deadline = job.job.job.deadline_s
    return (math.inf if deadline is None or not job.job.promised else deadline), job.job.number
