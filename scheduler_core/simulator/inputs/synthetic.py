"""Generates traces in our own format: Poisson arrivals, diurnal load, short jobs, recurring DAGs. All are seeded.

Every job could meet its deadline if it ran alone: the deadline leaves at least the job's time at its requested size,
with start-up, times a slack above 1. Whether all deadlines can be met together is for a simulation to find out.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from elasticflow_airflow.scheduler_core.simulator.inputs.curves import Curves
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import TraceJob

DAY_S = 86400.0
HOUR_S = 3600.0
_SWING = 0.8
"""The rate of arrivals by day is higher than its mean by this fraction, and by night lower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The shape of single jobs: seconds at the requested size and slack are log-uniform between their two ends."""

    seconds: tuple[float, float] = (600.0, 4 * HOUR_S)
    slack: tuple[float, float] = (1.2, 3.0)
    """Time from submission to deadline, as a multiple of start-up plus seconds."""
    most_workers: int = 16
    startup_s: float = 30.0
    """Time that the deadline allows for the start; short with a warm pool (as is the simulated start-up)."""

    def __post_init__(self) -> None:
        for name, least in (("seconds", 0.0), ("slack", 1.0)):
            low, high = getattr(self, name)
            if not least < low <= high < math.inf:
                raise InputError(f"{name} is {low:g} to {high:g}; it must rise from above {least:g}")
        if self.most_workers < 1:
            raise InputError(f"most_workers is {self.most_workers}; give at least 1")
        if not 0.0 <= self.startup_s < math.inf:
            raise InputError(f"startup_s is {self.startup_s!r}; it must be a number of at least 0")


def poisson(curves: Curves, *, jobs: int, every_s: float, seed: int = 0, shape: Shape | None = None) -> list[TraceJob]:
    """Generate independent arrivals, one every ``every_s`` seconds on average.

    Raises:
        InputError: an option is invalid, or no curve has a size that is small enough.
    """
    _check(jobs=jobs, every_s=every_s)
    maker, made, now = _Maker(curves, shape or Shape(), seed), list[TraceJob](), 0.0
    for number in range(jobs):
        now += maker.chaos.expovariate(1.0 / every_s)
        made.append(maker.single(f"p{number:05}", now))
    return made


def diurnal(
    curves: Curves, *, days: float, per_day: float, seed: int = 0, shape: Shape | None = None
) -> list[TraceJob]:
    """Generate arrivals at a daily varying rate: highest at 14:00, lowest at 02:00.

    Uses thinning (Lewis and Shedler, 1979). Raises InputError like :func:`poisson`.
    """
    _check(days=days, per_day=per_day)
    maker, made, now = _Maker(curves, shape or Shape(), seed), list[TraceJob](), 0.0
    most = per_day / DAY_S * (1.0 + _SWING)
    while True:
        now += maker.chaos.expovariate(most)
        if now >= days * DAY_S:
            return made
        rate = per_day / DAY_S * (1.0 + _SWING * math.cos(2 * math.pi * (now / DAY_S - 14 / 24)))
        if maker.chaos.random() * most < rate:
            made.append(maker.single(f"d{len(made):05}", now))


def short_jobs(curves: Curves, *, jobs: int, every_s: float, startup_s: float = 30.0, seed: int = 0) -> list[TraceJob]:
    """Generate jobs of 1 to 10 minutes, dominated by start-up: simulate with the same ``startup_s``.

    A cold start takes tens of seconds, a start from a warm pool a few. Raises InputError like :func:`poisson`.
    """
    shape = Shape(seconds=(60.0, 600.0), slack=(1.15, 2.0), most_workers=8, startup_s=startup_s)
    return [
        replace(job, job_id="s" + job.job_id[1:])
        for job in poisson(curves, jobs=jobs, every_s=every_s, seed=seed, shape=shape)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurringDags:
    """Daily tasks at night, hourly tasks, tasks that run only sometimes, and ad-hoc jobs in between.

    Loads are fractions of ``slots``: for daily tasks within the night window, for the others over the whole day. Each
    job counts with the fewest slot-seconds in which its work can be done.
    """

    slots: int = 64
    days: int = 5
    daily: int = 8
    hourly: int = 2
    now_and_then: int = 3
    """Tasks due every three hours that run (a sensor fires, a branch is taken) with probability ``come``."""
    come: float = 0.3
    night: tuple[float, float] = (HOUR_S, 7 * HOUR_S)
    """Daily tasks are due in the first third of this window and must be done by its end."""
    daily_load: float = 0.55
    hourly_load: float = 0.08
    now_and_then_load: float = 0.05
    ad_hoc_load: float = 0.8
    ad_hoc_per_day: float = 30.0
    late_s: float = 300.0
    """Mean delay of a run's submission (upstream tasks): exponential, at most five times this."""
    spread: float = 0.15
    """Sigma of the log-normal factor on a run's length."""
    retries: float = 0.05
    """Probability that a run fails midway and continues as a retry with the same deadline."""
    startup_s: float = 30.0

    def __post_init__(self) -> None:
        _check(slots=self.slots, days=self.days)
        for name in ("daily", "hourly", "now_and_then", "ad_hoc_per_day", "late_s", "spread"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)!r}; it cannot be negative")
        for name in ("come", "retries"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InputError(f"{name} is {getattr(self, name)!r}; it is a fraction between 0 and 1")


@dataclass(frozen=True, slots=True)
class _Task:
    """One recurring task."""

    name: str
    first_due_s: float
    period_s: float
    seconds: float
    deadline_after_s: float
    model: str
    batch_size: int
    workers: int
    come: float = 1.0


def recurring(curves: Curves, options: RecurringDags | None = None, *, seed: int = 0) -> list[TraceJob]:
    """Generate runs of recurring tasks (``task``, ``expected``, ``due_s``) and ad-hoc jobs, in order of submission.

    Retries name their task but are not marked as expected, since they cannot be known in advance. Raises InputError.
    """
    options = options or RecurringDags()
    shape = Shape(most_workers=max(1, options.slots // 4), startup_s=options.startup_s)
    maker = _Maker(curves, shape, seed)
    made: list[TraceJob] = []
    for task in _tasks(maker, options):
        for number in range(math.ceil((options.days * DAY_S - task.first_due_s) / task.period_s)):
            if maker.chaos.random() < task.come:
                made += _run(maker, options, task, number)
    made += _ad_hoc(maker, options)
    return sorted(made, key=lambda job: (job.submitted_s, job.job_id))


def _tasks(maker: _Maker, options: RecurringDags) -> list[_Task]:
    chaos, (begin, end) = maker.chaos, options.night
    late = 5.0 * options.late_s + options.startup_s
    tasks: list[_Task] = []

    def several(kind: str, count: int, slot_seconds: float, period: float, most_s: float, come: float) -> None:
        parts = [chaos.uniform(0.5, 1.5) for _ in range(count)]
        for number, part in enumerate(parts):
            budget = slot_seconds * part / sum(parts)
            model, batch, workers = maker.pick(at_least=budget / most_s)
            seconds = min(budget / maker.least_slots((model, batch, workers)), most_s)
            due = chaos.uniform(0.0, min(period, HOUR_S))
            window = late + seconds * chaos.uniform(1.5, 3.0)
            if period == DAY_S:
                due = begin + chaos.uniform(0.0, (end - begin) / 3)
                window = min(window, max(end - due, late + 1.2 * seconds))
            due = 60.0 * round(due / 60.0)
            tasks.append(_Task(f"{kind}{number}", due, period, seconds, round(window), model, batch, workers, come))

    night = (end - begin) / 2.0
    several("daily", options.daily, options.daily_load * options.slots * (end - begin), DAY_S, night, 1.0)
    several("hourly", options.hourly, options.hourly_load * options.slots * HOUR_S, HOUR_S, 0.4 * HOUR_S, 1.0)
    use = options.now_and_then_load * options.slots * 3 * HOUR_S / max(options.come, 0.01)
    several("sometimes", options.now_and_then, use, 3 * HOUR_S, HOUR_S, options.come)
    return tasks


def _run(maker: _Maker, options: RecurringDags, task: _Task, number: int) -> list[TraceJob]:
    """Return one run, in two parts if it fails midway."""
    chaos = maker.chaos
    due = task.first_due_s + number * task.period_s
    late = min(chaos.expovariate(1.0 / options.late_s), 5.0 * options.late_s) if options.late_s else 0.0
    seconds = task.seconds * min(chaos.lognormvariate(0.0, options.spread), math.exp(2.0 * options.spread))
    job = maker.job(
        f"{task.name}-{number:03}",
        round(due + late, 1),
        seconds,
        due + task.deadline_after_s,
        (task.model, task.batch_size, task.workers),
    )
    job = replace(job, task=task.name, expected=True, due_s=due)
    if chaos.random() >= options.retries:
        return [job]
    done = chaos.uniform(0.1, 0.7)
    again = job.submitted_s + options.startup_s + done * seconds + chaos.uniform(60.0, 300.0)
    if job.deadline_s is None or again + options.startup_s + 1.1 * (1.0 - done) * seconds > job.deadline_s:
        return [job]
    rest = replace(
        job,
        job_id=f"{job.job_id}-retry",
        submitted_s=round(again, 1),
        steps=max(1.0, round(job.steps * (1.0 - done))),
        duration_s=(1.0 - done) * seconds,
        expected=False,
    )
    return [replace(job, steps=max(1.0, round(job.steps * done)), duration_s=done * seconds), rest]


def _ad_hoc(maker: _Maker, options: RecurringDags) -> list[TraceJob]:
    """Return jobs submitted by people, mostly by day, scaled to the requested load."""
    chaos, made = maker.chaos, list[TraceJob]()
    for number in range(round(options.ad_hoc_per_day * options.days)):
        hour = (chaos.triangular(6.0, 30.0, 16.0)) % 24.0
        submitted = (number % options.days) * DAY_S + hour * HOUR_S
        made.append(maker.single(f"adhoc-{number:04}", round(submitted, 1)))
    offered = sum(maker.least_slots((job.model, job.batch_size, job.workers)) * (job.duration_s or 0.0) for job in made)
    if not offered:
        return made
    factor = options.ad_hoc_load * options.slots * options.days * DAY_S / offered
    scaled = []
    for job in made:
        seconds = min(max(60.0, (job.duration_s or 0.0) * factor), 10 * HOUR_S)
        window = (options.startup_s + seconds) * maker.between((1.3, 4.0))
        size = (job.model, job.batch_size, job.workers)
        scaled.append(maker.job(job.job_id, job.submitted_s, seconds, job.submitted_s + window, size))
    return scaled


class _Maker:
    """Draws jobs from the given curves."""

    def __init__(self, curves: Curves, shape: Shape, seed: int) -> None:
        self.curves, self.shape, self.chaos = curves, shape, random.Random(seed)
        self.choices = [
            (model, batch, workers)
            for (model, batch), curve in sorted(curves.items())
            for workers in curve.usable(1, shape.most_workers)
        ]
        if not self.choices:
            raise InputError(f"no curve has a size of at most {shape.most_workers} workers to make jobs of")

    def between(self, ends: tuple[float, float]) -> float:
        """Draw a log-uniform value."""
        return math.exp(self.chaos.uniform(math.log(ends[0]), math.log(ends[1])))

    def pick(self, at_least: float = 1.0) -> tuple[str, int, int]:
        """Draw a model, batch size and number of workers; sizes are equally likely, however many curves have them."""
        sizes = sorted({workers for _, _, workers in self.choices})
        fitting = [size for size in sizes if size >= at_least] or sizes[-1:]
        size = self.chaos.choice(fitting[:3] if at_least > 1.0 else fitting)
        return self.chaos.choice([choice for choice in self.choices if choice[2] == size])

    def least_slots(self, size: tuple[str, int, int]) -> float:
        """Return the average slots a job of that size would need for the same work at its most efficient size."""
        model, batch, workers = size
        speeds = self.curves[model, batch].steps_per_s
        return min(n / speed for n, speed in speeds.items()) * speeds[workers]

    def single(self, job_id: str, submitted_s: float) -> TraceJob:
        """Draw a job of the requested shape."""
        size, seconds = self.pick(), self.between(self.shape.seconds)
        window = (self.shape.startup_s + seconds) * self.between(self.shape.slack)
        return self.job(job_id, submitted_s, seconds, submitted_s + window, size)

    def job(
        self, job_id: str, submitted_s: float, seconds: float, deadline_s: float, size: tuple[str, int, int]
    ) -> TraceJob:
        """Return a job that takes ``seconds`` at the given model, batch size and number of workers."""
        model, batch, workers = size
        speed = self.curves[model, batch].steps_per_s[workers]
        return TraceJob(
            job_id=job_id,
            submitted_s=submitted_s,
            steps=float(max(1, round(seconds * speed))),
            model=model,
            batch_size=batch,
            deadline_s=round(deadline_s, 1),
            workers=workers,
            duration_s=round(seconds, 1),
        )


def _check(**positive: float) -> None:
    for name, value in positive.items():
        if not 0.0 < value < math.inf:
            raise InputError(f"{name} is {value!r}; it must be a positive number")
