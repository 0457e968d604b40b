"""The event loop of the simulator: a virtual clock and a modelled engine around one policy. Reads no files.

Cost model (the same for every policy): each change of a job's slots to another non-empty set stops the job, for
``startup_s`` if it held no slots or was still starting, else for ``pause_s``. Its speed is that of the block it
actually got. Every step is executed.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, NamedTuple

from elasticflow_airflow.scheduler_core.model import decisions as de
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.values import Job, Node, Placement, Slot
from elasticflow_airflow.scheduler_core.simulator.outcome import Result, SimulatedOutcome
from elasticflow_airflow.scheduler_core.simulator.policies import Policy

_TINY_S = 1e-5
_MEASURE_S = 20.0
"""How long a gang takes to measure its speed, from its first step."""
_AVOID_S = 3600.0
"""How long the policy is told to avoid a slow slot."""
_LEAST_WAKE_UP_S = 1e-3
"""Many consecutive wake-ups at shorter intervals than this mean that the clock does not advance."""


class SimulationError(RuntimeError):
    """A policy made an impossible decision: a slot used twice, a slot or a job that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedJob:
    """A job as the policy sees it (``job``) and as it really runs: ``truth`` is steps/s by number of workers.

    ``arrives_s`` is when it is submitted. ``truths``, if not empty, are its real speeds by ``Node.gpu_type`` and
    replace ``truth``.
    """

    job: Job
    truth: Mapping[int, float]
    arrives_s: float
    truths: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    by_batch: Mapping[int, Mapping[int, float]] = field(default_factory=dict)
    """Real speeds by global batch size, in steps of the job's own, if it may be chosen (else ``truth`` applies)."""


class Disturbance(NamedTuple):
    """A cluster event at a given time, passed on to the policy; or a change of a slot's real speed."""

    at_s: float
    event: ev.NodeLost | ev.NodeJoined | ev.NodeDraining | None
    slow: tuple[Slot, float] | None = None
    """A slot, and the speed factor of jobs that run on it from now on (1: healthy again)."""


class Change(NamedTuple):
    """From ``at_s`` on a job holds exactly ``slots``; or, if ``event`` is set, it was rejected or has finished."""

    at_s: float
    job_id: str
    slots: tuple[Slot, ...]
    event: str = ""


@dataclass(slots=True)
class _Run:
    """The simulated state of one job."""

    simulated: SimulatedJob
    record: SimulatedOutcome
    left: float
    slots: tuple[Slot, ...] = ()
    held: frozenset[Slot] = frozenset()
    speed: float = 0.0
    since_s: float = 0.0
    """When ``slots`` last changed."""
    ready_s: float = 0.0
    """The time from which it makes steps."""
    as_of_s: float = 0.0
    starting: bool = False
    batch: int | None = None
    measures: bool = False
    """Whether its gang runs to measure its speed."""
    beside: bool = False
    """Whether it runs as a guest, on the capacity that the owners of its slots leave."""
    version: int = 0
    gone: bool = False
    said_s: float | None = None
    """When it last reported its remaining steps because its slots changed; once per moment is enough."""

    def settle(self, now: float) -> None:
        """Account for the steps made until ``now``."""
        if self.slots:
            self.left = max(0.0, self.left - self.speed * max(0.0, now - max(self.as_of_s, self.ready_s)))
        self.as_of_s = now


class _Due(NamedTuple):
    """A scheduled action or report of a gang; void if its slots change before (``version`` then differs)."""

    what: Literal["left", "start", "measured", "report", "slow", "end"]
    run: _Run
    version: int


@dataclass(kw_only=True)
class Simulation:
    """One policy on one cluster with one list of jobs.

    ``report_after_s``/``report_every_s``: when running jobs report progress and measured speed; None: never, which is
    right when curves are exact. With reports, a gang that made steps and is stopped or resized reports its remaining
    steps. ``checkpoint_s``: a lost gang loses its steps since the last multiple of this. ``straggler_after_s``: after a
    gang of several workers has made steps with a slow slot for this long, the policy is told to avoid the slot for an
    hour (None: the policy sees only the reported speed).
    """

    name: str
    policy: Policy
    nodes: Sequence[Node]
    jobs: Sequence[SimulatedJob]
    disturbances: Iterable[Disturbance] = ()
    report_after_s: float | None = None
    report_every_s: float = 600.0
    checkpoint_s: float = 300.0
    straggler_after_s: float | None = None
    leftover: Callable[[str, str], float] | None = None
    """Fraction of its speed that a guest keeps on a slot, given the owner's workload and its own.
    None: no slot is shared in this way, whatever a policy decides."""
    packed: Callable[[str, str], float] | None = None
    """Fraction of its speed that a job keeps beside another one on the same slot if neither is throttled, given its own
    workload and the other's. None: ``leftover`` applies."""
    on_change: Callable[[Change], None] | None = None
    on_progress: Callable[[int, float], None] | None = None
    """Called from time to time with the number of jobs that are over and the virtual time."""
    _queue: list[tuple[float, int, int, SimulatedJob | Disturbance | _Due]] = field(default_factory=list)
    _numbers: count[int] = field(default_factory=count)
    _runs: dict[str, _Run] = field(default_factory=dict)
    _owner: dict[Slot, str] = field(default_factory=dict)
    _slots: set[Slot] = field(default_factory=set)
    _slow: dict[Slot, float] = field(default_factory=dict)
    _guests: dict[Slot, str] = field(default_factory=dict)
    """The guest job on each shared slot."""
    _types: dict[str, str] = field(default_factory=dict)
    """GPU type by node."""
    _wake_s: float | None = None
    _woken: int = 0
    """Number of wake-ups since another event happened, or since ``_woken_since_s``."""
    _woken_since_s: float = 0.0
    _work_done: bool = False
    """Whether any job has held slots since then."""
    _over: int = 0

    def run(self) -> Result:
        """Simulate until the last job is over.

        Raises:
            SimulationError: the policy made an impossible decision.
        """
        begin = time.perf_counter()
        records = [self._expect(job) for job in self.jobs]
        for node in self.nodes:
            self._slots.update(Slot(node.node_id, i) for i in range(node.slots) if i not in node.busy)
            self._types[node.node_id] = node.gpu_type
        for disturbance in self.disturbances:
            self._push(disturbance.at_s, 1, disturbance)
        first = min((job.arrives_s for job in self.jobs), default=0.0)
        now, events, decision_s = first, 0, list[float]()
        self._woken, self._woken_since_s = 0, first
        while self._over < len(self.jobs) and (self._queue or self._wake_s is not None):
            if self._wake_s is not None and (not self._queue or self._wake_s < self._queue[0][0]):
                now, happening = self._wake_s, None
                self._wake_s = None
                self._count_wake_up(now)
            else:
                now, _, _, happening = heapq.heappop(self._queue)
                self._woken, self._woken_since_s, self._work_done = 0, now, False
            for event in self._happen(happening, now):
                events += 1
                started = time.perf_counter()
                decided = self.policy.handle(event, now)
                if isinstance(event, ev.JobSubmitted):
                    decision_s.append(time.perf_counter() - started)
                self._apply(decided, now)
            if self.on_progress is not None and events % 64 == 0:
                self.on_progress(self._over, now)
        return Result(
            policy=self.name,
            slots=sum(node.slots - len(node.busy) for node in self.nodes),
            records=tuple(records),
            begin_s=first,
            end_s=now,
            events=events,
            run_s=time.perf_counter() - begin,
            decision_s=tuple(decision_s),
        )

    def _count_wake_up(self, now: float) -> None:
        """Count consecutive wake-ups; they may go on as long as time advances and work is done.

        Raises:
            SimulationError: there were many, and time does not advance or no job has held slots.
        """
        self._woken += 1
        self._work_done = self._work_done or bool(self._owner)
        if self._woken <= 10_000 + 100 * len(self.jobs):
            return
        if not self._work_done or now - self._woken_since_s < self._woken * _LEAST_WAKE_UP_S:
            raise SimulationError(f"{self.name} asks to be woken for ever at {now:.1f} and nothing happens")
        self._woken, self._woken_since_s, self._work_done = 0, now, False

    # -- what happens ----------------------------------------------------------------------------------------------

    def _push(self, at_s: float, rank: int, happening: SimulatedJob | Disturbance | _Due) -> None:
        """Queue an item; ``rank`` orders items of the same time: ends first, arrivals last."""
        heapq.heappush(self._queue, (at_s, rank, next(self._numbers), happening))

    def _expect(self, simulated: SimulatedJob) -> SimulatedOutcome:
        job = simulated.job
        self._push(simulated.arrives_s, 5, simulated)
        record = SimulatedOutcome(job.job_id, simulated.arrives_s, job.deadline_s, job.value)
        assert job.total_steps is not None
        self._runs[job.job_id] = _Run(simulated, record, job.total_steps)
        return record

    def _happen(self, happening: SimulatedJob | Disturbance | _Due | None, now: float) -> list[ev.Event]:
        """Return the events that one queued item sends to the policy (None: the wake-up it asked for)."""
        match happening:
            case None:
                return [ev.WakeUp()]
            case SimulatedJob():
                return [ev.JobSubmitted(happening.job)]
            case Disturbance():
                return self._disturb(happening, now)
        run = happening.run
        if run.gone or run.version != happening.version:
            return []
        job_id = run.record.job_id
        if happening.what == "start":
            return [ev.GangStarted(job_id, Placement(run.slots))]
        run.settle(now)
        if happening.what == "left":
            run.said_s = now
            return [ev.JobProgressed(job_id, run.left)]
        if happening.what == "measured":
            measured = ev.JobMeasured(job_id, len(run.slots), run.speed, run.simulated.job.costs)
            return [ev.JobProgressed(job_id, run.left), measured]
        if happening.what == "slow":
            return self._tell_of_straggler(run, now)
        if happening.what == "report":
            self._push(now + self.report_every_s, 3, happening)
            measured_s = min(now - max(run.since_s, run.ready_s), self.report_every_s)
            return [ev.JobProgressed(job_id, run.left, steps_per_s=run.speed, measured_s=measured_s)]
        run.left = 0.0  # a rounding remainder must not count as a suspension
        self._hold(run, (), now)
        self._end(run, now, "finished")
        run.record.finished_s, run.record.value_at_end = now, run.simulated.job.value_at(now)
        return [ev.JobFinished(job_id)]

    def _disturb(self, disturbance: Disturbance, now: float) -> list[ev.Event]:
        if disturbance.slow is not None:
            slot, factor = disturbance.slow
            self._slow[slot] = factor
            owner = self._owner.get(slot)
            if owner is not None:
                run = self._runs[owner]
                run.settle(now)
                self._go_on(run, now)
        if disturbance.event is None:
            return []
        told: list[ev.Event] = []
        if isinstance(disturbance.event, ev.NodeLost):
            node_id = disturbance.event.node_id
            held = (*self._owner.items(), *self._guests.items())
            hit = {holder for slot, holder in held if slot.node_id == node_id}
            self._slots = {slot for slot in self._slots if slot.node_id != node_id}
            for job_id in sorted(hit):
                run = self._runs[job_id]
                run.settle(now)
                run.left += run.speed * (max(0.0, now - run.ready_s) % self.checkpoint_s)
                self._hold(run, (), now)
                told.append(ev.JobProgressed(job_id, run.left))
        elif isinstance(disturbance.event, ev.NodeJoined):
            node = disturbance.event.node
            self._types[node.node_id] = node.gpu_type
            self._slots.update(Slot(node.node_id, i) for i in range(node.slots) if i not in node.busy)
        return [disturbance.event, *told]

    def _tell_of_straggler(self, run: _Run, now: float) -> list[ev.Event]:
        """Report the slowest slot of a gang, and the gain of leaving it if the speed with it has been reported."""
        factors = sorted((self._slow.get(slot, 1.0), slot) for slot in run.slots)
        (slowest, slot), (next_slowest, _) = factors[:2]
        after, reported = self.straggler_after_s, self.report_after_s
        gain = next_slowest / slowest if after is not None and reported is not None and reported <= after else 1.0
        return [ev.SlotSlow(run.record.job_id, slot, now + _AVOID_S, gain=gain)]

    # -- what is decided -------------------------------------------------------------------------------------------

    def _apply(self, decided: Sequence[de.Decision], now: float) -> None:
        self._wake_s = None
        wanted: dict[str, tuple[Slot, ...]] = {}
        """By job; of several orders at one moment the last one applies."""
        for decision in decided:
            if isinstance(decision, de.WakeMeAt):
                self._wake_s = max(decision.at_s, now)
                continue
            run = self._runs.get(decision.job_id)
            if run is None or run.gone:
                raise SimulationError(f"{self.name} decides on {decision.job_id!r}, which is not live: {decision}")
            match decision:
                case de.Resize():
                    run.settle(now)
                    run.batch = decision.batch_size
                    run.measures = decision.purpose is de.Purpose.PROFILE
                    if self.leftover is not None or self.packed is not None:
                        run.beside = decision.beside
                    wanted[decision.job_id] = decision.placement.slots
                case de.Suspend():
                    wanted[decision.job_id] = ()
                case de.Admit():
                    if decision.deadline_s is not None:
                        run.record.admitted_s = now
                        run.record.promised_deadline_s = decision.deadline_s
                case de.Reject():
                    wanted[decision.job_id] = ()
                    self._end(run, now, "rejected")
                    run.record.rejected_s, run.record.reject_reason = now, str(decision.reason)
                case de.AtRisk():
                    run.record.at_risk_s = now if run.record.at_risk_s is None else run.record.at_risk_s
                case _:
                    pass  # waiting, amendments and OnTrack change no slots
        changes = [(self._runs[job_id], slots) for job_id, slots in wanted.items()]
        for run, _ in changes:  # a batch is one change: release all old slots first, then assign the new ones
            self._let_go(run, run.slots)
        for run, slots in changes:
            if not run.gone:
                for slot in slots:
                    if slot not in self._slots:
                        raise SimulationError(f"{self.name} uses {slot}, which is not there at {now:.1f}")
                    taken = self._guests if run.beside else self._owner
                    other = taken.setdefault(slot, run.record.job_id)
                    if other != run.record.job_id:
                        raise SimulationError(f"{self.name} gives {slot} to {run.record.job_id!r} beside {other!r}")
            made_steps = bool(run.slots) and now > run.ready_s
            self._hold(run, slots if not run.gone else (), now)
            if made_steps and self.report_after_s is not None and run.since_s == now != run.said_s and not run.gone:
                self._push(now, 2, _Due("left", run, run.version))
        if self.packed is not None:
            self._rate({*self._owner.values(), *self._guests.values()}, now)
        elif self._guests:
            self._rate(set(self._guests.values()), now)

    def _let_go(self, run: _Run, slots: Iterable[Slot]) -> None:
        for slot in slots:
            for taken in (self._owner, self._guests):
                if taken.get(slot) == run.record.job_id:
                    del taken[slot]

    def _rate(self, job_ids: set[str], now: float) -> None:
        """Update the speeds of jobs whose slots may have gained or lost another job."""
        for job_id in sorted(job_ids):
            run = self._runs[job_id]
            if run.slots and abs(self._speed(run) - run.speed) > 1e-12:
                run.settle(now)
                self._go_on(run, now)

    def _end(self, run: _Run, now: float, how: str) -> None:
        run.gone = True
        self._over += 1
        if self.on_change is not None:
            if run.slots:
                self.on_change(Change(now, run.record.job_id, ()))
            self.on_change(Change(now, run.record.job_id, (), how))

    def _hold(self, run: _Run, slots: tuple[Slot, ...], now: float) -> None:
        """Change the slots of a job, possibly to none."""
        before, after = run.held, frozenset(slots)
        if before == after:
            return
        run.settle(now)
        record = run.record
        record.slot_s += len(before) * (now - run.since_s)
        self._let_go(run, before - after)
        interrupted = run.starting and run.ready_s > now + _TINY_S
        run.slots, run.held, run.since_s = slots, after, now
        run.version += 1
        if self.on_change is not None and not run.gone:
            self.on_change(Change(now, record.job_id, slots))
        if not after:
            run.speed, run.starting = 0.0, False
            record.suspensions += not run.gone and run.left > 0.0
            return
        costs = run.simulated.job.costs
        run.starting = not before or interrupted
        cost = costs.startup_s if run.starting else costs.pause_s
        run.ready_s = now + cost
        record.changes += 1
        record.migrations += bool(before) and not (before < after or after < before)
        if record.started_s is None:
            record.started_s = now
        self._go_on(run, now)

    def _truth(self, run: _Run) -> Mapping[int, float]:
        """Return the real speeds of a job on the GPU type it holds."""
        types = sorted({self._types[slot.node_id] for slot in run.slots})
        if len(types) > 1:
            raise SimulationError(f"{self.name} spreads {run.record.job_id!r} over several types of GPU: {types}")
        truths = run.simulated.truths
        if run.batch is not None and run.batch in run.simulated.by_batch:
            return run.simulated.by_batch[run.batch]
        if not truths:
            return run.simulated.truth
        if types[0] not in truths:
            raise SimulationError(
                f"{self.name} runs {run.record.job_id!r} on {types[0]!r}; it runs on {sorted(truths)}"
            )
        return truths[types[0]]

    def _healthy_speed(self, run: _Run) -> float:
        truth, size = self._truth(run), len(run.slots)
        known = [n for n in truth if n <= size]
        if not known:
            raise SimulationError(f"{self.name} runs {run.record.job_id!r} with {size}; it needs at least {min(truth)}")
        return truth[max(known)]

    def _speed(self, run: _Run) -> float:
        """Return the steps/s on the slots that a job holds; the slowest slot determines it."""
        speed = self._healthy_speed(run)
        if self._slow:
            speed *= min(self._slow.get(slot, 1.0) for slot in run.slots)
        if run.beside and self.leftover is not None:
            hosts = {self._owner[slot] for slot in run.slots if slot in self._owner}
            mine = run.simulated.job.workload
            speed *= min(
                (self.leftover(self._runs[h].simulated.job.workload, mine) for h in sorted(hosts)), default=1.0
            )
        if self.packed is not None:
            here = {taken[slot] for slot in run.slots for taken in (self._owner, self._guests) if slot in taken}
            others = [self._runs[job_id].simulated.job.workload for job_id in sorted(here - {run.record.job_id})]
            speed *= min((self.packed(run.simulated.job.workload, other) for other in others), default=1.0)
        return speed

    def _go_on(self, run: _Run, now: float) -> None:
        """Schedule the end and the reports of a job that holds slots, at its present speed."""
        size, healthy = len(run.slots), self._healthy_speed(run)
        run.speed = self._speed(run)
        run.version += 1
        if run.speed <= 0.0:
            return  # a guest whose host leaves it nothing
        counted = max(now, run.ready_s)
        end = counted + run.left / run.speed + run.simulated.job.costs.tail_s
        self._push(end, 0, _Due("end", run, run.version))
        if self.report_after_s is not None:
            if run.ready_s > now:
                self._push(run.ready_s, 2, _Due("start", run, run.version))
            self._push(counted + self.report_after_s, 3, _Due("report", run, run.version))
        if run.measures:
            self._push(counted + _MEASURE_S, 2, _Due("measured", run, run.version))
        if self.straggler_after_s is not None and size > 1 and run.speed < healthy and not run.beside:
            self._push(counted + self.straggler_after_s, 4, _Due("slow", run, run.version))
