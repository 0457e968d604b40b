"""Earliest deadline first (EDF), alone and with one of ElasticFlow's two modules: the ablations of its section 6.4.

ElasticFlow (ASPLOS 2023) compares itself with EDF (jobs in order of their deadlines, each on as many GPUs as it scales
to) and with two ablations, *EDF + admission control* and *EDF + elastic scaling*.

``edf`` takes jobs by deadline and gives each, out of the remaining slots, the size at which it ends soonest, counting
the pause of a change. No job is rejected and a late job keeps its place, as in the paper; best-effort jobs come last.
The paper's artifact lets a job grow past the peak of its curve, where more GPUs make it slower. Ours stops at the knee;
``edf-plain`` does as the artifact, for comparison.

``edf+admission`` (:class:`AdmittingEdf`) promises deadlines. The paper puts its admission control, which reasons about
minimum shares, in front of EDF, which hands out as many slots as help: EDF may make a job late that admission control
admitted. Here the admission test uses the policy that will run: a new job is admitted if EDF itself, rolled forward
without further arrivals, ends it and all jobs admitted before in time, with the same margins for speeds and delays as
our own promises. That holds only if nothing else moves promised jobs. So they are resized only at events that concern
them, as in the trial run; waiting and best-effort jobs take the remaining slots and never move a promised job.

``edf+elastic`` (:class:`ElasticEdf`) rejects no job: jobs in order of their deadlines get their minimum satisfactory
share (Algorithm 1, with pauses included). The remaining slots are assigned by marginal return (Algorithm 2), also to
jobs that cannot meet their deadline.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import replace
from heapq import heapify, heappop, heappush

from elasticflow_airflow.scheduler_core.cluster.timeline import FreeCapacity
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.config import SchedulerConfig
from elasticflow_airflow.scheduler_core.model.decisions import Admit, Decision, Reject, Terms, Wait, WakeMeAt
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Node, Phase, Slot
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Work
from elasticflow_airflow.scheduler_core.planning.minimum_share import minimum_share
from elasticflow_airflow.scheduler_core.simulator.baselines.common.gang import Claim, GangPolicy, Scene, Wanted
from elasticflow_airflow.scheduler_core.simulator.baselines.common.live import GangJob, JobView
from elasticflow_airflow.scheduler_core.simulator.baselines.common.seating import Room
from elasticflow_airflow.times import duration

_LAST_STEP = "last_step_s"
"""Memory key: when a job makes, or made, its last step; in its tail, its projected finish is always the present."""
_SOONER_S = 1e-3
"""A change is not worth it unless the job ends earlier by at least this much."""


def by_deadline(job: JobView) -> tuple[float, int]:
    """Sort key of EDF: deadline, then arrival; jobs without a deadline come last."""
    deadline = job.job.job.deadline_s
    return (INFINITY if deadline is None else deadline), job.job.number


class Edf(GangPolicy):
    """Earliest deadline first, each job on as many slots as help it."""

    def __init__(
        self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = (), *, plain: bool = False
    ) -> None:
        super().__init__(config, nodes)
        self._plain = plain

    def wanted(self, scene: Scene) -> Wanted:
        """Return all jobs in order of deadline, each at the size at which it ends soonest."""
        ordered = sorted(scene.jobs, key=self.rank)
        return Wanted([Claim(job.job_id, self._sizes(job), "its deadline is next") for job in ordered])

    def rank(self, job: JobView) -> tuple[float, int]:
        """Return the sort key of a job; the smallest is served first."""
        return by_deadline(job)

    def _sizes(self, job: JobView) -> tuple[int, ...]:
        if self._plain:
            return tuple(sorted(job.speeds, reverse=True))
        if job.left == INFINITY:
            return job.rising[::-1]
        soonest = {size: job.end_s(size) - (_SOONER_S if size == job.size else 0.0) for size in job.rising}
        return tuple(sorted(job.rising, key=lambda size: (soonest[size], size)))


class AdmittingEdf(Edf):
    """EDF that admits only jobs which EDF will finish in time together with all jobs admitted before."""

    promises = True

    def __init__(self, config: SchedulerConfig | None = None, nodes: Iterable[Node] = ()) -> None:
        super().__init__(config, nodes)
        self._anew = True
        """Whether an event has happened for which promised jobs must be resized."""
        self._usable: frozenset[Slot] = frozenset()
        """The slots that were usable when promised jobs were last resized."""

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Handle one event and return the decisions that follow."""
        match event:
            case ev.JobSubmitted() | ev.WakeUp():
                pass  # an admission sets the flag itself
            case ev.NodeJoined() | ev.NodeLost() | ev.NodeDraining() | ev.SlotSlow():
                self._anew = True
            case _:
                job = self.jobs.get(event.job_id)
                self._anew = self._anew or (job is not None and not job.best_effort)
        return super().handle(event, now)

    def wanted(self, scene: Scene) -> Wanted:
        """Return the claims of EDF; promised jobs keep their size unless an event concerned them."""
        usable = self._usable_slots(scene.now)
        if self._anew or usable != self._usable:
            self._anew, self._usable = False, usable
            return super().wanted(scene)
        stay = [Claim(job.job_id, (job.size,)) for job in scene.jobs if job.job.promised and job.size]
        rest = replace(scene, jobs=[job for job in scene.jobs if not job.job.promised])
        return Wanted([*stay, *super().wanted(rest).claims])

    def seats(self, wanted: Wanted, free: int) -> tuple[dict[str, int], dict[str, str]]:
        """Place promised jobs as if they were alone, then the others around them."""
        promised = [claim for claim in wanted.claims if self.jobs[claim.job_id].promised]
        seats, reasons = super().seats(Wanted(promised), free)
        for mask in seats.values():
            free &= ~mask
        others = [claim for claim in wanted.claims if not self.jobs[claim.job_id].promised]
        more, why = super().seats(Wanted(others), free)
        return {**seats, **more}, {**reasons, **why}

    def keeps(self, job: GangJob) -> bool:
        """Return True only for promised jobs: no other job may stand in their way."""
        return job.promised

    def rank(self, job: JobView) -> tuple[float, int]:
        """Return the deadline order; jobs without a promise come after all promised ones, whatever their deadline."""
        return by_deadline(job) if job.job.promised else (INFINITY, job.job.number)

    def judge(self, newcomer: JobView) -> Admit | Reject | Wait:
        """Decide on a new job by rolling forward a copy of the policy that includes it."""
        job = newcomer.job
        deadline = job.job.deadline_s
        if deadline is None:
            return self.take(newcomer, "best effort: runs on slots that no deadline needs")
        if not newcomer.known:
            reason = "its speed or its length is not known: runs as best effort; no deadline is kept"
            return self.take(newcomer, reason)
        twin = self.twin()
        trial = twin.jobs.setdefault(job.job_id, copy.copy(job))
        trial.phase, trial.best_effort = Phase.ADMITTED, False
        for other in [other for other in twin.jobs.values() if other.phase is not Phase.ADMITTED or other.best_effort]:
            del twin.jobs[other.job_id]  # cannot delay promised jobs, and is admitted only if every promise is kept
        twin._anew = True
        late = twin.first_late(newcomer.now)
        if late is None:
            self._anew = True
            kept = Reason("earliest deadline first ends it and all admitted before in time")
            return Admit(job.job_id, Terms.DEADLINE, deadline, None, kept)
        who, by_s = late
        who = "it" if who == job.job_id else who
        return self.refuse(newcomer, f"earliest deadline first would end {who} {duration(by_s)} late")

    def first_late(self, now: float) -> tuple[str, float] | None:
        """Roll forward without further arrivals; return the first promise that would be broken, and by how much.

        Consumes this object: call it on a :meth:`twin`.
        """
        decided = self._replan(now, "a trial")
        while any(job.promised for job in self.jobs.values()):
            wake = min((d.at_s for d in decided if isinstance(d, WakeMeAt)), default=INFINITY)
            ends = {
                job_id: finish + job.job.costs.tail_s
                for job_id, job in self.jobs.items()
                if job.mask and (finish := self._last_step_s(job)) is not None
            }
            hopeless = self._hopeless(ends)
            if hopeless is not None:
                return hopeless
            first = min(ends, key=ends.__getitem__, default=None)
            if first is not None and ends[first] <= wake:
                now = max(now, ends[first])
                decided = self.handle(ev.JobFinished(first), now)
            elif wake < INFINITY:
                now = wake
                decided = self.handle(ev.WakeUp(), now)
            else:
                starved = next(job_id for job_id, job in self.jobs.items() if job.promised)
                return starved, INFINITY
        return None

    def _replan(self, now: float, why: str, *, retry: bool = False) -> list[Decision]:
        self._note_last_steps(now)
        out = super()._replan(now, why, retry=retry)
        self._note_last_steps(now)
        return out

    def _note_last_steps(self, now: float) -> None:
        for job_id, job in self.jobs.items():
            finish = self.projected_finish_s(job_id) if job.mask else None
            if finish is None:
                job.memory.pop(_LAST_STEP, None)
            elif finish > now + TOLERANCE_S or _LAST_STEP not in job.memory:
                job.memory[_LAST_STEP] = finish

    def _last_step_s(self, job: GangJob) -> float | None:
        """Return when a job makes, or made, its last step; None if unknown."""
        finish, noted = self.projected_finish_s(job.job_id), job.memory.get(_LAST_STEP)
        if finish is None or noted is None or noted >= finish:
            return finish
        return noted if self.view(job, job.as_of_s).has_trained else finish

    def _usable_slots(self, now: float) -> frozenset[Slot]:
        usable = self.usable(now)
        return frozenset(slot for number, slot in enumerate(self.layout.slots) if usable >> number & 1)

    def _hopeless(self, ends: dict[str, float]) -> tuple[str, float] | None:
        """Return a promised job that will be late and runs at its fastest size or would end next, and its delay."""
        for job_id, end in ends.items():
            job = self.jobs[job_id]
            deadline = job.job.deadline_s
            by_s = INFINITY if deadline is None else deadline - self.config.deadline_margin_s
            if not job.promised or end <= by_s + TOLERANCE_S:
                continue
            if end == min(ends.values()) or job.size >= self.view(job, job.as_of_s).rising[-1]:
                return job_id, end - by_s
        return None


class ElasticEdf(GangPolicy):
    """Minimum satisfactory shares in order of deadline, the rest by marginal return; no admission control."""

    def wanted(self, scene: Scene) -> Wanted:
        """Return minimum shares first, then growth by marginal return."""
        free = FreeCapacity(self.layout, scene.now)
        sizes: dict[str, int] = {}
        times: list[float] = []
        for job in sorted(scene.jobs, key=by_deadline):
            sizes[job.job_id] = 0
            work = self._work(job)
            known = work.limit_s < INFINITY and job.known
            shares = minimum_share(free, work, scene.now) if known else None
            for start, end, size in shares or ():
                free.reserve(start, end, size)
                times += [start, end]
                if start <= scene.now + TOLERANCE_S and scene.room.fits(size):
                    sizes[job.job_id] = size
                    scene.room.take(size)
        self._grow(scene, sizes)
        claims = [Claim(job_id, (size,)) for job_id, size in sizes.items() if size]
        return Wanted(claims, min((t for t in times if t > scene.now + 1.0), default=None))

    def _work(self, job: JobView) -> Work:
        speeds = {size: job.speeds[size] for size in job.rising}
        work = job.job.work(self.layout, self.config)
        deadline = job.job.job.deadline_s
        return replace(work, sizes=job.rising, speeds=speeds, limit_s=INFINITY if deadline is None else deadline)

    def _grow(self, scene: Scene, sizes: dict[str, int]) -> None:
        """Algorithm 2: the next step up goes to the job that saves the most slot-seconds per extra slot."""
        jobs = {job.job_id: job for job in scene.jobs}
        options = [option for job_id in sizes if (option := self._option(jobs[job_id], sizes[job_id], scene.room))]
        heapify(options)
        while options:
            _, _, job_id, target = heappop(options)
            scene.room.give_back(sizes[job_id]) if sizes[job_id] else None
            if scene.room.fits(target):
                sizes[job_id] = target
            scene.room.take(sizes[job_id]) if sizes[job_id] else None
            again = self._option(jobs[job_id], sizes[job_id], scene.room)
            if again:
                heappush(options, again)

    def _option(self, job: JobView, size: int, room: Room) -> tuple[float, float, str, int] | None:
        """Return the best larger size that fits: (minus the slot-seconds saved per extra slot, deadline, job, size)."""
        larger = [s for s in job.rising if s > size]
        candidates = {*larger[:1], *(s for s in larger if s == job.size)}
        best: tuple[float, float, str, int] | None = None
        if size:
            room.give_back(size)
        for target in candidates:
            if not room.fits(target):
                continue
            rate = INFINITY
            if size:
                before, after = job.end_s(size) - job.now, job.end_s(target) - job.now
                least = _SOONER_S if target == job.size else self.config.min_saving_pauses * job.pause_s + _SOONER_S
                if not before - after >= least:
                    continue
                rate = (size * before - target * after) / (target - size)
            option = (-rate, by_deadline(job)[0], job.job_id, target)
            if best is None or option < best:
                best = option
        if size:
            room.take(size)
        return best
