"""``chronus``: deadlines by leases of equal length, chosen by a mixed-integer program (Chronus, SoCC 2021).

The paper: jobs with deadlines (SLO) and best-effort jobs share a cluster by leases: whoever holds one has its GPUs
exclusively until the lease term ends, and nobody is preempted before that. Speeds are profiled, so the number of leases
that a job needs is known; a mixed-integer linear program selects the SLO jobs that can all get enough leases before
their deadlines, and who holds which; best-effort jobs get the leases left over. Sizes are what users ask for. Placement
consolidates gangs and improves them by local search.

Decided here: whether a deadline is promised, and who holds a lease in each term.

Where it differs, and why:

- A newcomer is decided when it comes, and what was promised stays in the program as a constraint: that is what a
  promise means for all policies here. ``chronus+size`` chooses a size at admission (the smallest that fits), since
  users of the traces often asked for sizes that cannot make their own deadlines; it then stays.
- The program counts leases between deadlines, not term by term, which makes it small; what it finds is then laid out
  term by term, and kept: the promise rests on that schedule (:mod:`leases`). A greedy filling answers easy cases.
- A start costs its pause in each lease of the plan. Renewing a lease costs nothing, so plans are kept with time to
  spare. A job too tight for that is *pinned* if it can be: it starts at once and keeps its slots to its end.
- Idle slots may be used within a term by whoever waits; the lease then lasts until the term ends. Where a promise
  rests on such a start, the slots are set aside for it. At the moment when leases are given out, none is idle: whoever
  is judged then needs leases from that term on.
- A job's tail is a part of its last lease, so nobody holds slots beyond a lease.
- Placement is buddy allocation, as for all policies: blocks are always consolidated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np

from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import Admit, AtRisk, Decision, Reject, Terms, Wait
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
"""No lease is planned more terms ahead."""
_SIZE, _PINNED, _ENDS = "lease_size", "pinned_until_s", "ends_s"


class Chronus(GangPolicy):
    """Leases. Deterministic, as long as the solver is not stopped by its limit of time."""

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
        """Blocks (masks) found for promises that start within this term, until they have them."""
        self._schedule: Schedule = {}
        """By job, the absolute numbers of the terms in which it holds a lease: the proof of the promises."""
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
        for size in newcomer.rising if self._choose_size else (self._asked(newcomer),):
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
        """``starts``: the block that it is to have at once."""
        job.memory[_SIZE] = float(size)
        job.memory.pop(_PINNED, None)
        self._pins.pop(job.job_id, None)
        if starts and starts != job.mask:
            self._starts[job.job_id] = starts
        return Admit(job.job_id, Terms.DEADLINE, deadline, None, why)

    def keeps(self, job: GangJob) -> bool:  # noqa: ARG002  (whoever it is)
        """Nobody: who is in its tail when its lease ends has another, or makes way."""
        return False

    def twin(self) -> Self:
        """An independent copy."""
        other = super().twin()
        other._pins, other._starts, other._risks = dict(self._pins), dict(self._starts), list(self._risks)
        return other

    # -- leases ----------------------------------------------------------------------------------------------------

    def wanted(self, scene: Scene) -> Wanted:
        """At the end of a term whom the program chooses; else whoever holds a lease, and who fits into what is idle."""
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
        """Pinned jobs where they are, the others around them."""
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
        """Everybody in the order in which the leases of a new term are given."""
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
        """What promised jobs need; who cannot make it any more is announced, and vetoes nobody."""
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
            self._risks.append(AtRisk(job.job_id, deadline, end, "not enough leases are left before its deadline"))

    def _keep(self, schedule: Schedule, begin: float) -> None:
        """Store a schedule by absolute number of term."""
        base = round(begin / self._lease_s)
        self._schedule = {job_id: tuple(base + term for term in terms) for job_id, terms in schedule.items()}

    def _shifted(self, begin: float) -> Schedule:
        """The stored schedule as seen from ``begin``."""
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
            job_id: mask for job_id, mask in self._pins.items() if job_id in self.jobs and not self._runs(job_id)
        }
        self._starts.clear()
        risks, self._risks = self._risks, []
        return [*risks, *out]

    def _runs(self, job_id: str) -> bool:
        return bool(self.jobs[job_id].mask)

    def _fitting(self, waiting: Sequence[JobView], now: float) -> list[JobView]:
        """Those who fit into idle slots as they are: nobody is moved within a term."""
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
        """Idle slots that are not set aside for anybody."""
        taken = 0
        for job in self.jobs.values():
            taken |= job.mask or self._starts.get(job.job_id, 0) | self._pins.get(job.job_id, 0)
        return self.usable(now) & ~taken

    def _next_boundary(self, now: float) -> float:
        return (math.floor((now + TOLERANCE_S) / self._lease_s) + 1.0) * self._lease_s

    def _begin(self, now: float) -> float:
        """When the first term begins whose leases are still to be given out; that may be now."""
        begin = round(now / self._lease_s) * self._lease_s
        due = abs(begin - now) <= TOLERANCE_S and now >= self._term_end_s - TOLERANCE_S
        return now if due else self._next_boundary(now)

    def _promised(self, now: float) -> list[JobView]:
        live = [job for job in self.jobs.values() if job.promised and job.phase is Phase.ADMITTED]
        return [view for view in (self.view(job, now) for job in live) if view.speeds]

    def _asked(self, job: JobView) -> int:
        """The size that was asked for, at most the knee; while no block holds it, the least that it could use."""
        least = job.rising[0] if job.rising else job.job.job.min_workers
        return max((size for size in job.rising if size <= job.requested), default=least)

    def _by_need(self, job: JobView) -> tuple[float, float, int]:
        """Promises by their deadline, then best effort, shortest first."""
        return *_by_deadline(job)[:1], 0.0 if job.job.promised else job.run_s(self._size(job)), job.job.number

    def _size(self, job: JobView) -> int:
        return int(job.job.memory.get(_SIZE, 0.0)) or self._asked(job)

    def _demand(self, job: JobView, begin: float, now: float, *, size: int = 0, runs: bool = False) -> Demand | None:
        """Leases that a job needs from ``begin`` on, among how many terms; None: it has ended by then, or is pinned.

        ``size`` and ``runs``, for a newcomer: with how many slots, and whether it starts now.
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
            return Demand(job.job_id, size, 1, 0)  # a lease is over before it has started, or nobody knows its length
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
        """When it would leave with these slots, tail included. In its tail: as was said before that began."""
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
        """What the terms from ``begin`` on offer beside pinned gangs. ``pin``: one more of them, and until when."""
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
