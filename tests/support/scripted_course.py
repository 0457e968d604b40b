"""What the scripted cluster tells of: who held which slots, who will, and what follows for steps, loss and times."""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass

HOUR = 3600.0
SlotName = tuple[str, int]
NODES = ("gpu-a", "gpu-b")
GPU_A: tuple[SlotName, ...] = tuple((NODES[0], index) for index in range(4))
GPU_B: tuple[SlotName, ...] = tuple((NODES[1], index) for index in range(4))
_DAYS = 7


def steps_per_s(workers: int) -> float:
    """Return the speed of every job with so many workers."""
    return 1.35 * workers**0.9


def loss_at(part: float) -> float:
    """Return the loss after this part of all steps."""
    return 0.24 + 0.9 * math.exp(-5.0 * part)


@dataclass(frozen=True)
class Measured:
    """What was measured at one time."""

    at_h: float
    step: int
    loss: float
    steps_per_s: float
    workers: int


@dataclass(frozen=True)
class Course:
    """Slots over time, in hours from now. ``past``: since when which; ``plan``: until when which, from now on."""

    past: tuple[tuple[float, tuple[SlotName, ...]], ...] = ()
    plan: tuple[tuple[float, tuple[SlotName, ...]], ...] = ()
    end_h: float = 0.0
    """When the past ended: now, for what runs."""

    @property
    def generations(self) -> list[tuple[float, float, tuple[SlotName, ...]]]:
        """From when until when which slots were held."""
        begins = [from_h for from_h, _ in self.past]
        ends = [*begins[1:], self.end_h] if begins else []
        return [(from_h, until_h, slots) for (from_h, slots), until_h in zip(self.past, ends, strict=True)]

    @property
    def held(self) -> tuple[SlotName, ...]:
        """The slots that are held now."""
        return self.past[-1][1] if self.past else ()

    @property
    def until_h(self) -> float:
        """When it will end."""
        return self.plan[-1][0]

    @property
    def done(self) -> float:
        """Steps so far."""
        return sum((until_h - from_h) * HOUR * steps_per_s(len(held)) for from_h, until_h, held in self.generations)

    @property
    def steps(self) -> int:
        """All steps."""
        made, from_h = self.done, 0.0
        for until_h, slots in self.plan:
            made += (until_h - from_h) * HOUR * steps_per_s(len(slots)) if slots else 0.0
            from_h = until_h
        return round(made)

    @property
    def held_slot_h(self) -> float:
        """Slots that were held, times hours."""
        return sum((until_h - from_h) * len(held) for from_h, until_h, held in self.generations)

    def hour_of(self, step: float) -> float:
        """Return when a step was made."""
        made = 0.0
        for from_h, until_h, slots in self.generations:
            more = (until_h - from_h) * HOUR * steps_per_s(len(slots))
            if made + more >= step:
                return from_h + (step - made) / steps_per_s(len(slots)) / HOUR
            made += more
        return self.end_h

    def measured(self, count: int, total: int, seed: str) -> list[Measured]:
        """Return ``count`` samples, evenly over the time in which it trained."""
        chance, found, made = random.Random(seed), [], 0.0
        begun_h = self.past[0][0] if self.past else self.end_h
        for from_h, until_h, slots in self.generations:
            speed = steps_per_s(len(slots))
            for number in range(count):
                at_h = begun_h + (number + 1) / count * (self.end_h - begun_h)
                if from_h < at_h <= until_h + 1e-9:
                    step = int(made + (at_h - from_h) * HOUR * speed)
                    loss = loss_at(step / total) + chance.gauss(0.0, 0.006)
                    found.append(Measured(at_h, step, loss, speed * chance.uniform(0.96, 1.02), len(slots)))
            made += (until_h - from_h) * HOUR * speed
        return found


COURSES = {
    "nightly_reviews": Course(past=((-1.69, GPU_A[:2]), (-0.9, GPU_A)), plan=((1.9, GPU_A),)),
    "fraud_daily": Course(past=((-1.69, GPU_B[:1]), (-0.9, GPU_B[:2])), plan=((1.9, GPU_B[:2]), (2.8, GPU_B))),
    "search_ranker": Course(past=((-1.69, GPU_B[2:3]),), plan=((0.6, GPU_B[2:3]),)),
    "vision": Course(plan=((1.9, ()), (8.4, GPU_A))),
    "payroll": Course(past=((-1.69, GPU_B[3:]),), plan=((1.9, GPU_B[3:]),)),
}
"""Of today's runs, by DAG. All that run were submitted 1.7 hours ago."""


@dataclass(frozen=True)
class PastRun:
    """A run of an earlier day; hours from now. It starts on two slots, and soon has all four of its node."""

    dag: str
    days: int
    begins_h: float
    lasts_h: float
    slots: tuple[SlotName, ...]
    waits_s: float = 8.0
    decision: str = "admitted"
    met: bool = True
    slack_h: float = 0.5

    @property
    def run_id(self) -> str:
        """The run in Airflow."""
        return f"scheduled__{self.days}d"

    @property
    def refused(self) -> bool:
        """Whether it never ran."""
        return self.decision == "rejected"

    @property
    def ends_h(self) -> float:
        """When it ended."""
        return self.begins_h + self.lasts_h

    @property
    def due_h(self) -> float:
        """When it had to end."""
        return self.ends_h + self.slack_h

    @property
    def course(self) -> Course:
        """Its slots."""
        starts_h, grows_h = self.begins_h + self.waits_s / HOUR, self.begins_h + 0.4 * self.lasts_h
        return Course(past=((starts_h, self.slots[:2]), (grows_h, self.slots)), end_h=self.ends_h)

    @property
    def steps(self) -> int:
        """All its steps."""
        return round(self.course.done)

    @property
    def slot_h(self) -> float:
        """Slots that it held, times hours."""
        return self.course.held_slot_h


@functools.cache
def past_runs() -> tuple[PastRun, ...]:
    """Return all runs of the last week, the oldest first."""
    chance, made = random.Random(7), []
    hours = {"nightly_reviews": 3.0, "fraud_daily": 5.5, "search_ranker": 2.0, "payroll": 4.0}
    for days in range(_DAYS, 0, -1):
        for number, (dag, lasts_h) in enumerate(hours.items()):
            refused = dag == "search_ranker" and days in (2, 5)
            met = not (days == 4 and dag == "fraud_daily")
            made.append(
                PastRun(
                    dag=dag,
                    days=days,
                    begins_h=-days * 24.0 + number * 4.6 + chance.uniform(0.0, 0.5),
                    lasts_h=lasts_h,
                    slots=GPU_A if number % 2 == 0 else GPU_B,
                    waits_s=chance.choice([8.0, 12.0, 30.0, 400.0]),
                    decision="rejected" if refused else chance.choice(["admitted"] * 5 + ["renegotiated"]),
                    met=met,
                    slack_h=0.5 if met else -0.4,
                )
            )
    return tuple(made)
