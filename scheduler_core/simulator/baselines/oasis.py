"""``oasis``: a new job gets the cheapest schedule over time, if it is worth its price (OASiS, INFOCOM 2018).

The paper: a job is decided when it is submitted. Each server's resources have a price in each time slot, which rises
exponentially with utilisation (section IV; ours is in :mod:`prices`). For each possible end, a dynamic program finds
the cheapest numbers of workers over time that finish by it. The job is admitted with the schedule of the greatest
utility minus price if that is above 0, else rejected permanently. Admitted schedules never change. The utility falls
with the completion time (a sigmoid); the paper maximises the sum of utilities, with a bound on the competitive ratio.

This policy decides whether to admit a job, and the sizes of its gang over time, on fixed slots.

Differences from the paper, and reasons:

- A job with a deadline has its value (``Job.value``) as the utility of any end by the deadline, and 0 after it: the
  criterion by which all policies are compared, and the limit of the paper's sigmoid for a time-critical job.
- Time is cut where bookings change, not into equal slots: that is exact, and fine enough for jobs of minutes.
- In the paper workers start and stop at no cost. Here a start and each change of size cost their pause, also within the
  dynamic program. Its state is the gang's size, and it weighs steps made against price (by a multiplier, tried over a
  range; the cheapest that finishes is used). The cheapest gangs of constant size compete with its result.
- Servers are equal, and so are their prices: there is one price per moment for all slots. Blocks are found by buddy
  placement.
- There are no parameter servers. ``U`` and ``L`` are learned from the jobs so far (:mod:`prices`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.cluster.timeline import Bookings
from elasticflow_airflow.scheduler_core.model.work import INFINITY, TOLERANCE_S, Course, Holding, Work, course_of
from elasticflow_airflow.scheduler_core.simulator.baselines.common.booking import GUARD_S, constant_gangs, rising
from elasticflow_airflow.scheduler_core.simulator.baselines.common.priced import PricedPolicy
from elasticflow_airflow.scheduler_core.simulator.baselines.common.prices import Stretch

MULTIPLIERS = 20
"""Number of weights of steps against price that are tried."""
PIECES = 24
"""Minimum number of stretches into which the time to the limit is cut."""


class Oasis(PricedPolicy):
    """OASiS: cheapest schedule over time. Deterministic."""

    def choices(self, work: Work, book: Bookings, over: list[Stretch]) -> Iterator[Course]:
        """Yield gangs of constant size, and gangs whose size follows the prices."""
        yield from constant_gangs(work, book, self.layout)
        if work.limit_s == INFINITY:
            return
        fine = _split(over, (work.limit_s - book.now) / PIECES)
        for sizes in schedules(work, fine, self.layout):
            course = course_of(work, seat_over_time(sizes, fine, self.layout, work.mask), book.now)
            if course.promised_s > work.limit_s + TOLERANCE_S:
                continue
            last = course.holdings[-1]
            if not last.mask & ~book.free_over(last.start_s, course.promised_s + GUARD_S):
                yield course
                return  # multipliers rise, so later schedules cost more


def schedules(work: Work, over: Sequence[Stretch], layout: Layout) -> Iterator[list[int]]:
    """Yield sizes for each stretch that may finish the work, for rising weights of steps against price.

    A dynamic program over stretches, with the size held in each as its state (0: none), maximises weight times steps
    minus price. No steps are made during the pause of a start or change of size. Only the number of free slots in
    blocks is considered; whether consecutive stretches have the same block free is checked at placement.
    """
    if not over:
        return
    levels = (0, *rising(work))
    counts = np.array(levels, dtype=np.float64)
    speeds = np.array([0.0, *(work.speeds[size] for size in levels[1:])])
    weights = _weights(levels, speeds, over)
    choices = np.zeros((len(over), len(weights), len(levels)), dtype=np.int8)
    best = np.full((len(weights), len(levels)), -np.inf)
    held = levels.index(work.size) if work.size in levels else 0
    best[:, held] = 0.0
    pause = np.full((len(levels), len(levels)), work.longest_pause_s)
    pause[0, :] = work.startup_s
    pause[:, 0] = 0.0
    np.fill_diagonal(pause, 0.0)
    for k, stretch in enumerate(over):
        length = stretch.end_s - stretch.start_s
        lost: npt.NDArray[np.float64] = np.minimum(pause, length) * speeds[None, :]
        gain = weights[:, None] * (speeds * length)[None, :] - (stretch.price * length) * counts[None, :]
        gain[:, counts > layout.largest(stretch.free)] = -np.inf
        through = best[:, :, None] - weights[:, None, None] * lost[None, :, :]
        choices[k] = through.argmax(axis=1)
        best = through.max(axis=1) + gain
    left = work.left_at(over[0].start_s)
    for row in range(len(weights)):
        state = int(best[row].argmax())
        path = [0] * len(over)
        for k in range(len(over) - 1, -1, -1):
            path[k] = state
            state = int(choices[k, row, state])
        steps = sum(speeds[at] * (s.end_s - s.start_s) for at, s in zip(path, over, strict=True))
        if steps >= left:
            yield [levels[at] for at in path]


def _weights(
    levels: Sequence[int], speeds: npt.NDArray[np.float64], over: Sequence[Stretch]
) -> npt.NDArray[np.float64]:
    """Return prices per step, from where the cheapest slots just pay to where the dearest of the largest gang do."""
    prices = [stretch.price for stretch in over]
    each = [(b - a) / (v - u) for a, b, u, v in zip(levels, levels[1:], speeds, speeds[1:], strict=False)]
    low, high = max(min(prices), 1e-30) * min(each) * 0.5, max(max(prices), 1e-30) * max(each) * 8.0
    return np.geomspace(low, high, MULTIPLIERS)


def seat_over_time(sizes: Sequence[int], over: Sequence[Stretch], layout: Layout, own: int) -> list[Holding]:
    """Return blocks for the size in each stretch: the same one while it is free, around or inside the previous one."""
    found: list[Holding] = []
    before, k = own, 0
    while k < len(over):
        size = sizes[k]
        if size == 0:
            before, k = 0, k + 1
            continue
        end = k
        while end < len(over) and sizes[end] == size:
            end += 1
        block = 0
        while True:
            free = over[k].free
            for stretch in over[k + 1 : end]:
                free &= stretch.free
            block = _block(layout, free, size, before)
            if block or end == k + 1:
                break
            end = k + max(1, (end - k) // 2)
        if block and found and found[-1].mask == block and found[-1].end_s == over[k].start_s:
            found[-1] = Holding(found[-1].start_s, over[end - 1].end_s, block)
        elif block:
            found.append(Holding(over[k].start_s, over[end - 1].end_s, block))
        before, k = block, end
    return found


def _block(layout: Layout, free: int, size: int, before: int) -> int:
    held = before.bit_count()
    if held == size and not before & ~free:
        return before
    if held > size:
        part = layout.find(before & free, size)
        if part:
            return part
    elif held and not before & ~free:
        around = layout.enclosing(free, before, size)
        if around:
            return around
    return layout.find(free, size)


def _split(over: Sequence[Stretch], longest_s: float) -> list[Stretch]:
    fine: list[Stretch] = []
    for stretch in over:
        length = stretch.end_s - stretch.start_s
        parts = max(1, int(np.ceil(length / longest_s)))
        for part in range(parts):
            begin = stretch.start_s + length * part / parts
            end = stretch.end_s if part == parts - 1 else stretch.start_s + length * (part + 1) / parts
            fine.append(Stretch(begin, end, stretch.free, stretch.price))
    return fine
