"""Prices of slots over time, for policies that admit a job when it is worth more than the capacity that it takes.

The price function of online primal-dual scheduling (OASiS, INFOCOM 2018, section IV: marginal prices; the same family
in AOnline, TCC 2022): ``p(g) = L (U / L)^(g / c)`` for a slot-second when ``g`` of ``c`` slots are booked then. An
empty cluster costs so little (``L``) that any job enters; a full one costs ``U``, more than any job would pay. Knows no
jobs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from elasticflow_airflow.scheduler_core.cluster.timeline import Bookings
from elasticflow_airflow.scheduler_core.model.work import Holding, Work


@dataclass(slots=True)
class PriceRange:
    """``U`` and ``L``, learned from the jobs that have come so far: nobody knows those that will.

    OASiS takes both as given from past jobs. Here the first job sets them and each newcomer widens them before it is
    priced itself, so that an empty cluster always lets it in. ``headroom`` is the factor by which an empty cluster is
    cheaper than the least that a job would pay (the paper's 1 / 4 eta, which its proof needs to be at least 4).
    """

    headroom: float = 4.0
    highest: float = 0.0
    """``U``: most value per slot-second that a job would pay, at the size at which it takes the fewest."""
    lowest: float = float("inf")
    """``L``: least value per slot-second, at the size at which it takes the most, divided by ``headroom``."""

    def see(self, value: float, least_slot_s: float, most_slot_s: float) -> None:
        """Widen the range for a job worth ``value`` that takes between so many slot-seconds."""
        if value > 0.0 and 0.0 < least_slot_s <= most_slot_s:
            self.highest = max(self.highest, value / least_slot_s)
            self.lowest = min(self.lowest, value / most_slot_s / self.headroom)

    def price(self, booked: float) -> float:
        """Price of a slot-second when this part (0 to 1) of the slots is booked; 0 before any job was seen."""
        if self.highest <= 0.0:
            return 0.0
        return float(self.lowest * (self.highest / self.lowest) ** min(1.0, max(0.0, booked)))


def slot_seconds(work: Work, sizes: Sequence[int]) -> tuple[float, float]:
    """Fewest and most slot-seconds that a job takes at one of ``sizes`` from its start to its end, pauses included."""
    costs = [size * (work.startup_s + work.remaining / work.speed(size) + work.tail_s) for size in sizes]
    return min(costs), max(costs)


class Stretch(NamedTuple):
    """A stretch of time in which neither the free slots nor their price change. ``price`` is for a slot-second."""

    start_s: float
    end_s: float
    free: int
    price: float


def stretches(
    book: Bookings, slots: int, prices: PriceRange, start_s: float, end_s: float, longest_s: float = float("inf")
) -> list[Stretch]:
    """Cut ``[start_s, end_s)`` where bookings change; a stretch longer than ``longest_s`` into equal parts.

    ``slots`` is how many the cluster has for planning (``c`` of the price function).
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
        price = prices.price(booked)
        free = book.everything & ~book.taken[k]
        parts = max(1, int(-(-(end - begin) // longest_s))) if longest_s < end - begin else 1
        for part in range(parts):
            a = begin + (end - begin) * part / parts
            b = end if part == parts - 1 else begin + (end - begin) * (part + 1) / parts
            found.append(Stretch(a, b, free, price))
    return found


class Bill:
    """What holdings cost at the prices of stretches that follow on each other; nothing outside of them."""

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
        """The sum over holdings of size times price, over their time."""
        return sum(h.mask.bit_count() * (self._until(h.end_s) - self._until(h.start_s)) for h in holdings)
