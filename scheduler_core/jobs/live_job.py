"""The scheduler's record of one live job, and its conversion to :class:`Work` for the planner. Decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.jobs.learned_speed import Belief, Evidence, belief, believed, planned
from elasticflow_airflow.scheduler_core.model.config import EVEN_ODDS, SchedulerConfig
from elasticflow_airflow.scheduler_core.model.events import JobProgressed
from elasticflow_airflow.scheduler_core.model.values import Job, JobState, Phase, Placement, Reservation, ScalingCurve
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Course, Work

LEAST_S = 3 * TOLERANCE_S
"""Minimum remaining time of a job without slots: anything shorter than the tolerance would count as no work."""


@dataclass(slots=True)
class ProfilingRun:
    """The size being measured, and the time limit of the measurement."""

    size: int
    until_s: float


@dataclass(slots=True)
class LiveJob:
    """One job from its submission to its end. ``number`` counts arrivals, ``promise`` counts promises."""

    job: Job
    job_id: str = field(init=False)
    phase: Phase
    best_effort: bool
    number: int
    remaining: float | None
    as_of_s: float
    waiting_since_s: float
    placement: Placement = field(default_factory=Placement)
    mask: int = 0
    ready_s: float = 0.0
    starting: bool = False
    joined_s: float = -INFINITY
    """Latest time at which the new workers of its last change have joined."""
    started: bool = False
    """Whether the current gang has reported that it makes steps."""
    held_back: bool = False
    """Whether there were slots to grow into when everything was planned last, but :meth:`grows_from_s` not reached."""
    at_risk: bool = False
    measured: dict[int, float] = field(default_factory=dict)
    """Speeds measured in this run, by size, as currently estimated (steps/s)."""
    evidence: dict[int, Evidence] = field(default_factory=dict)
    """The evidence for ``measured``. A size without evidence was measured with certainty."""
    told: ScalingCurve | None = None
    """The curve before anything was measured; ``job.curve`` is the current estimate. None: nothing was measured yet."""
    failed_sizes: set[int] = field(default_factory=set)
    profiling: ProfilingRun | None = None
    promise: int = 0
    course: Course | None = None
    share: int = 0
    """Slots now of its minimum satisfactory share when everything was last planned afresh (0: not known)."""
    running_since_s: float = 0.0
    said_waiting: str = ""
    asked_s: float = 0.0
    """When admission with its deadline was last tried."""
    thorough_s: float = 0.0
    """While it waits: when admission is next tried with all filling orders."""
    until_s: float = 0.0
    """While it waits for capacity: until when waiting can help."""
    trial: int = 0
    """The size to measure before the job is promised, because its curve alone is too uncertain for that; 0: none."""
    judged: int = 0
    """While it is measured: the number of sizes with known speed at the last decision on it."""
    noted: bool = False
    """Whether the protection price has learned from its arrival."""
    turn_until_s: float = 0.0
    """End of the turn that a best-effort job got after waiting too long."""
    parked_from: Phase | None = None
    expected: float | None = None
    """Predicted steps left at ``as_of_s``; None: there is no prediction."""
    foreseen: bool = False
    """Whether the calendar expected it, so that it need not fit beside the other expected runs."""
    reservation: Course | None = None
    """The slots reserved for it before it was submitted, until it is decided on."""
    _work: Work | None = None
    _limited: tuple[Work, Work] | None = None
    """Its work, and that as last limited by :meth:`limited`."""
    _reserved: tuple[tuple[object, ...], tuple[Reservation, ...]] | None = None
    """Its reservations as :meth:`state` returned them last, and what they were computed of."""
    _planned: tuple[tuple[object, ...], dict[int, float]] | None = None
    """The speeds that :meth:`planned` returned last, and what they were computed of."""

    @classmethod
    def newcomer(cls, job: Job, number: int, now: float, *, best_effort: bool) -> Self:
        """Return a job that was just submitted."""
        return cls(
            job=job,
            phase=Phase.ADMITTED,
            best_effort=best_effort,
            number=number,
            remaining=job.total_steps,
            as_of_s=now,
            waiting_since_s=now,
        )

    def __post_init__(self) -> None:
        self.job_id = self.job.job_id

    @property
    def promised(self) -> bool:
        """Whether its deadline is promised (even if at risk)."""
        return self.phase is Phase.ADMITTED and not self.best_effort

    @property
    def least_workers(self) -> int:
        """Number of slots of its smallest gang."""
        return 1 << max(0, self.job.min_workers - 1).bit_length()

    @property
    def competes(self) -> bool:
        """Whether it may hold slots as an admitted job."""
        return self.phase is Phase.ADMITTED

    def constants(self) -> tuple[object, ...]:
        """Return those field values that are replaced and never mutated."""
        return (
            self.job,
            self.placement,
            self.told,
            self.course,
            self.reservation,
            self._work,
            self._limited,
            self._reserved,
            self._planned,
        )

    def changed(self) -> None:
        """Discard what was derived from the fields."""
        self._work = None

    def limited(self, work: Work, limit_s: float) -> Work:
        """Return ``work`` (of this job) with another limit; the same object as long as neither changes."""
        if self._limited is None or self._limited[0] is not work or self._limited[1].limit_s != limit_s:
            self._limited = work, replace(work, limit_s=limit_s)
        return self._limited[1]

    def sizes(self, largest: int, config: SchedulerConfig) -> dict[int, float]:
        """Return the usable sizes on this cluster with their planned speeds; speed 0 if nothing is known."""
        most = min(self.job.max_workers or largest, largest)
        if self.job.curve is not None:
            speeds = self.planned(self.job.curve, config)
            usable = ScalingCurve(speeds).usable(self.job.min_workers, most)
            if usable or not self.best_effort or not self.job.explore:
                return usable
        if self.phase is Phase.PROFILING:
            return {n: speed for n, speed in self.measured.items() if n <= largest}
        return {self.least_workers: 0.0} if self.least_workers <= most else {}

    def work(self, layout: Layout, config: SchedulerConfig) -> Work:
        """Return the planner's view of the job; the same object until something changes."""
        if self._work is None:
            speeds = self.sizes(layout.largest_block, config)
            size = self.mask.bit_count()
            costs = self.job.costs
            limit = INFINITY if self.best_effort or self.job.deadline_s is None else self.job.deadline_s
            remaining = INFINITY if self.remaining is None else self.remaining
            if not size and speeds:  # a job that takes no time would get no slots, and never end
                remaining = max(remaining, LEAST_S * max(speeds.values()))
            work = Work(
                job_id=self.job.job_id,
                remaining=remaining,
                since_s=max(self.as_of_s, self.ready_s),
                mask=self.mask,
                size=size,
                speed_now=0.0,
                starting=self.starting,
                sizes=tuple(speeds),
                speeds=speeds,
                startup_s=costs.startup_s,
                pause_s=costs.pause_s,
                tail_s=costs.tail_s,
                join_s=costs.join_s,
                joined_s=self.joined_s,
                grows_from_s=self.grows_from_s(config),
                limit_s=limit,
                expected=INFINITY if self.expected is None else self.expected,
            )
            if size:
                if size in self.measured and self.job.curve is not None:  # however slow: it is the current speed
                    speeds.setdefault(size, self.planned(self.job.curve, config)[size])
                object.__setattr__(work, "speed_now", work.speed(size))
            self._work = work
        return self._work

    def grows_from_s(self, config: SchedulerConfig) -> float:
        """Return from when on it may grow: its last change is done, and if that was a restart, repaid by training.

        It costs a restart again when somebody else needs the slots a moment later; so at most half of the time is lost.
        """
        if not self.mask:
            return -INFINITY
        if config.starts_reported and not self.started:
            return INFINITY
        return max(self.ready_s, self.joined_s) + self.job.costs.repaid_after_s

    def grows_again(self, now: float, config: SchedulerConfig) -> bool:
        """Return whether there were slots that it could not grow into at once, and now it may."""
        return self.held_back and now >= self.grows_from_s(config) - TOLERANCE_S

    def sigma(self, size: int, config: SchedulerConfig) -> float:
        """Return the error of its curve at a size: that of past runs of its task, else the default for all jobs."""
        otherwise = config.speed_sigma if self.job.speed_sigma is None else self.job.speed_sigma
        return self.job.speed_sigmas.get(size, otherwise)

    def planned(self, curve: ScalingCurve, config: SchedulerConfig) -> dict[int, float]:
        """Return the speeds by size, in steps/s, that a promise may rely on; ``curve`` is the current estimate."""
        # What was measured changes only together with the curve.
        of = (curve, self.told, self.job.speed_sigma, self.job.speed_sigmas, config)
        if self._planned is None or any(known is not one for known, one in zip(self._planned[0], of, strict=True)):
            held = {size: self._belief(size, speed, config) for size, speed in self.measured.items()}
            speeds = planned(curve, self.told or curve, held, lambda size: self.sigma(size, config), config)
            self._planned = of, speeds
        return self._planned[1]

    def _belief(self, size: int, speed: float, config: SchedulerConfig) -> Belief:
        evidence = self.evidence.get(size)
        if evidence is None:
            return Belief(speed, 0.0)
        told = self.told.steps_per_s.get(size) if self.told is not None else None
        return belief(told, self.sigma(size, config), evidence, config)

    def is_certain(self, size: int, config: SchedulerConfig) -> bool:
        """Return whether this run has a solid measurement of the speed at a size."""
        return size in self.measured and (size not in self.evidence or self.evidence[size].is_solid(config))

    def as_told(self, config: SchedulerConfig) -> Self | None:
        """Return the job as if its curve were certain; None if it is, or measuring cannot make it so."""
        sizes = self.job.curve.steps_per_s if self.job.curve is not None else ()
        unsure = [size for size in sizes if size not in self.failed_sizes and not self.is_certain(size, config)]
        exact = not any(self.sigma(size, config) for size in unsure)
        if exact or config.speed_confidence <= EVEN_ODDS or not self.job.profile or self.remaining is None:
            return None
        twin = replace(self, job=replace(self.job, speed_sigma=0.0, speed_sigmas={}))
        twin.changed()
        return twin

    def latest_start_s(self, layout: Layout, config: SchedulerConfig) -> float:
        """Return the latest start with which it keeps its deadline, if its curve is right."""
        hopeful = self.as_told(config) or self
        limit = INFINITY if self.job.deadline_s is None else self.job.deadline_s
        return limit - hopeful.work(layout, config).least_time_s()

    def learn(self, size: int, steps_per_s: float, config: SchedulerConfig) -> None:
        """Record a speed at a size that is known with certainty."""
        self.evidence.pop(size, None)
        self._believe(size, steps_per_s, config)

    def hear_speed(
        self, size: int, steps_per_s: float, config: SchedulerConfig, now: float, measured_s: float | None
    ) -> None:
        """Record a speed that was reported at a size, weighted with all earlier reports at that size."""
        before = self.evidence.get(size)
        if before is None:
            before = Evidence.certain(self.measured[size]) if size in self.measured else Evidence()
        self.told = self.told or self.job.curve
        self.evidence[size] = before.with_report(steps_per_s, now, measured_s, config)
        self._believe(size, self._belief(size, steps_per_s, config).steps_per_s, config)

    def _believe(self, size: int, steps_per_s: float, config: SchedulerConfig) -> None:
        self.measured[size] = steps_per_s
        self._relearn(config)

    def take_measured(self, config: SchedulerConfig) -> None:
        """Combine what profiling has measured so far with what was known before this run."""
        self._relearn(config)
        self.job = replace(self.job, partial=self.job.partial or not self.trial)

    def _relearn(self, config: SchedulerConfig) -> None:
        """Recompute the curve from the one before this run and the speeds measured in it."""
        self.told = self.told or self.job.curve
        curve = ScalingCurve(self.measured) if self.told is None else believed(self.told, self.measured, config)
        self.job = replace(self.job, curve=curve)
        self._work = None

    def renew_trial(self, now: float, config: SchedulerConfig) -> None:
        """Give a job in a trial the full time again to get slots, because it lost them through no fault of its own."""
        if self.trial:
            self.thorough_s = max(self.thorough_s, now + config.overdue_s)

    def settle(self, layout: Layout, config: SchedulerConfig, now: float) -> None:
        """Extrapolate ``remaining`` to ``now`` with the curve."""
        if self.remaining is not None:
            left = self.work(layout, config).left_at(now)
            if self.expected is not None:
                self.expected = max(0.0, self.expected - (self.remaining - left))
            self.remaining = left
        self.as_of_s = now
        self._work = None

    def hear(self, event: JobProgressed) -> None:
        """Apply a report about the job's length and remaining steps (call :meth:`settle` before)."""
        if event.total_steps is not None:
            self.job = replace(self.job, total_steps=event.total_steps)
            if event.remaining_steps is None and self.remaining is None:
                self.remaining = event.total_steps
        if event.remaining_steps is not None:
            self.remaining = max(0.0, event.remaining_steps)
            self.expected = None if event.expected_steps is None else max(0.0, event.expected_steps)

    def stop(self, layout: Layout, config: SchedulerConfig, now: float) -> None:
        """Settle at the end of the current gang: a job that should have ended is given some remaining steps.

        Not during its tail: there no steps are left, and the tail is repeated elsewhere.
        """
        work = self.work(layout, config)
        speed = work.speed_now
        in_tail = speed > 0.0 and now < work.since_s + work.remaining / speed + work.tail_s - TOLERANCE_S
        self.settle(layout, config, now)
        if self.mask and self.remaining is not None and self.remaining <= LEAST_S * speed and not in_tail:
            self.remaining = config.overdue_s * speed

    def hold(self, layout: Layout, config: SchedulerConfig, mask: int, now: float) -> None:
        """Hold exactly the slots of ``mask`` from ``now`` on, and pay for the change."""
        cost = self.work(layout, config).cost_of_change(now, mask.bit_count())
        begins = self.mask == 0 or (self.starting and self.ready_s > now + TOLERANCE_S)
        self.joined_s = -INFINITY if begins or not mask else self.work(layout, config).joined_after(now)
        self.stop(layout, config, now)
        self.placement = layout.placement_of(mask, self.placement)
        if self.mask == 0 and mask:
            self.running_since_s = now
            if self.best_effort and now - self.waiting_since_s >= config.ageing_s - TOLERANCE_S:
                self.turn_until_s = now + config.ageing_s
        if mask == 0:
            self.waiting_since_s = now
        self.mask = mask
        self.starting = begins and mask != 0
        self.started = False
        self.ready_s = now + cost if mask else now
        self._work = None

    def state(self, layout: Layout) -> JobState:
        """Return all of it as a value, for a store."""
        return JobState(
            job=self.job,
            phase=self.phase,
            best_effort=self.best_effort,
            remaining_steps=self.remaining,
            as_of_s=self.as_of_s,
            placement=self.placement,
            no_progress_until_s=self.ready_s,
            measured=dict(self.measured),
            evidence={size: seen.windows for size, seen in self.evidence.items()},
            told=self.told,
            at_risk=self.at_risk,
            starting=self.starting,
            started=self.started,
            joined_s=max(0.0, self.joined_s),
            number=self.number,
            promise=self.promise,
            waiting_since_s=self.waiting_since_s,
            parked_from=self.parked_from,
            failed_sizes=tuple(sorted(self.failed_sizes)),
            profile_until_s=self.profiling.until_s if self.profiling else None,
            expected_steps=self.expected,
            foreseen=self.foreseen,
            trial=self.trial,
            reserved=self._reservations(layout),
        )

    def _reservations(self, layout: Layout) -> tuple[Reservation, ...]:
        holdings = self.course.holdings if self.course is not None else ()
        of = holdings, layout, self.placement
        if self._reserved is None or any(known is not one for known, one in zip(self._reserved[0], of, strict=True)):
            found = (Reservation(h.start_s, h.end_s, layout.placement_of(h.mask, self.placement)) for h in holdings)
            self._reserved = of, tuple(found)
        return self._reserved[1]


def overdue(job: LiveJob, now: float) -> bool:
    """Return whether a job still holds slots after its planned end, tail included: its end was not reported yet."""
    return bool(job.mask) and job.course is not None and job.course.promised_s <= now + TOLERANCE_S
