"""Prices of slots over time, for policies that admit a job if it is worth more than the capacity it takes.

This is the price function of online primal-dual scheduling (OASiS, INFOCOM 2018, section IV: marginal prices; the same
family in AOnline, TCC 2022): ``p(g) = L (U / L)^(g / c)`` per slot-second while ``g`` of ``c`` slots are booked. At the
price of an empty cluster (``L``) any job is admitted; at that of a full one (``U``) no job is. Knows no jobs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elasticflow_airflow.scheduler_core.cluster.timeline import Bookings
from elasticflow_airflow.scheduler_core.model.work import Holding, Work

HEADROOM = 4.0
"""An empty cluster is cheaper by this factor than the least that a job would pay.

It is the paper's 1 / 4 eta, which its proof needs to be at least 4.
"""


@dataclass(slots=True)
class PriceRange:
    """``U`` and ``L``, learned from the jobs submitted so far, since future jobs are unknown.

    OASiS takes both as given from past jobs. Here the first job sets them, and each new job widens them before it is
    priced itself, so that an empty cluster always admits it.
    """

    highest: float = 0.0
    """``U``: largest value per slot-second of a job, at the size at which it takes the fewest slot-seconds."""
    lowest: float = float("inf")
    """``L``: smallest value per slot-second, at the size at which a job takes the most, over ``HEADROOM``."""

    def see(self, value: float, least_slot_s: float, most_slot_s: float) -> None:
        """Widen the range for a job worth ``value`` that takes between these numbers of slot-seconds."""
        if value > 0.0 and 0.0 < least_slot_s <= most_slot_s:
            self.highest = max(self.highest, value / least_slot_s)
            self.lowest = min(self.lowest, value / most_slot_s / HEADROOM)

    def price(self, booked: float) -> float:
        """Return the price per slot-second when a fraction ``booked`` (0 to 1) is booked; 0 before the first job."""
        if self.highest <= 0.0:
            return 0.0
        return float(self.lowest * (self.highest / self.lowest) ** min(1.0, max(0.0, booked)))


def slot_seconds(work: Work, sizes: Sequence[int]) -> tuple[float, float]:
    """Return the fewest and most slot-seconds that a job takes at one of ``sizes``, from start to end with pauses."""
    costs = [size * (work.startup_s + work.remaining / work.speed(size) + work.tail_s) for size in sizes]
    return min(costs), max(costs)


class Stretch(NamedTuple):
    """A stretch of time with constant free slots and constant price. ``price`` is per slot-second."""

    start_s: float
    end_s: float
    free: int
    price: float


def stretches(book: Bookings, slots: int, prices: PriceRange, start_s: float, end_s: float) -> list[Stretch]:
    """Cut ``[start_s, end_s)`` where bookings change.

    ``slots`` is the number of slots available for planning (``c`` of the price function).
    """
    found: list[Stretch] = []
    if end_s <= start_s:
        return found
    first = max(0, bisect_right(book.times, start_s) - 1)
    last = bisect_left(book.times, end_s)
    absent = book.everything.bit_count() - slots
    for k in range(first, last):
        begin = max(start_s, book.times[k])
        end = min(end_s, book.times[k + 1] if k + 1 < len(book.times) else end_s)
        if end <= begin:
            continue
        booked = (book.taken[k].bit_count() - absent) / max(1, slots)
        found.append(Stretch(begin, end, book.everything & ~book.taken[k], prices.price(booked)))
    return found


class Bill:
    """Computes the cost of holdings at the prices of consecutive stretches; time outside of them is free."""

    def __init__(self, over: Sequence[Stretch]) -> None:
        self._times = [stretch.start_s for stretch in over]
        self._prices = [stretch.price for stretch in over]
        self._end_s = over[-1].end_s if over else 0.0
        self._sums = [0.0]
        for stretch in over:
            self._sums.append(self._sums[-1] + (stretch.end_s - stretch.start_s) * stretch.price)

    def _until(self, when_s: float) -> float:
        k = bisect_right(self._times, when_s) - 1
        if k < 0:
            return 0.0
        return self._sums[k] + (min(when_s, self._end_s) - self._times[k]) * self._prices[k]

    def of(self, holdings: Sequence[Holding]) -> float:
        """Return the sum over holdings of size times price, integrated over their time."""
        return sum(h.mask.bit_count() * (self._until(h.end_s) - self._until(h.start_s)) for h in holdings)
