"""What a newcomer would take from those who are expected: a protection price, as in airline seat control.

Under contention, admitting whatever fits in order of arrival lets one large job cost twenty small ones. With
``objective="value"`` a newcomer is admitted only if it finds room beside what is promised *and* what cheaper arrivals
are expected to use until its deadline; cheaper is who needs fewer slot-seconds for the same value. What arrives is
learned from the arrivals themselves by memories of several half-lives (1, 4 and 36 hours unless
``protection_half_lives_s`` says otherwise), each of which looks no further ahead than its reach; at each time ahead the
one that expects most wins: a short memory alone admits a monster in a lull (Littlewood's rule, 1972, with a stream of
jobs in place of a stream of passengers; beside it OASiS, INFOCOM 2018, prices slots by their use alone). Pure; knows no
slots, only their number.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S, Work

FORGOTTEN = 8.0
"""Arrivals older than this many of the longest half-life weigh nothing."""
_BINS = 48
_LEAST_OBSERVED_S = 3600.0
"""Rates are not learned from less than an hour."""


class Arrival(NamedTuple):
    """One job that asked for a deadline: when, the least slot-seconds that it needed, in what time, for what value."""

    at_s: float
    footprint: float
    window_s: float
    value: float


class Expectation(NamedTuple):
    """Slots that are expected to be used in each bin between ``edges``.

    ``footprint`` is the least that the newcomer itself needs, in slot-seconds.
    """

    edges: NDArray[np.float64]
    slots: NDArray[np.float64]
    footprint: float

    @property
    def slot_seconds(self) -> float:
        """What is expected to be used until the newcomer's limit."""
        return float(self.slots @ np.diff(self.edges))

    def reservations(self) -> list[tuple[float, float, int]]:
        """``(start, end, slots)`` wherever it needs any, in whole slots."""
        slots = np.rint(self.slots).astype(int).tolist()
        edges = self.edges.tolist()
        return [(a, b, n) for a, b, n in zip(edges[:-1], edges[1:], slots, strict=True) if n > 0]


def footprint_of(work: Work, now: float, limit_s: float) -> float | None:
    """Least slot-seconds, at one size throughout, with which the job keeps a limit alone; None: not even alone."""
    left = work.left_at(now)
    least: float | None = None
    for size in work.sizes:
        if work.speeds[size] <= 0.0:
            continue  # not measured yet
        seconds = work.cost_of_change(now, size) + left / work.speeds[size] + work.tail_s
        if now + seconds <= limit_s + TOLERANCE_S:
            needed = size * seconds
            least = needed if least is None else min(least, needed)
    return least


class Protection:
    """Learns what arrives and says what is to be kept free of a newcomer. ``reach``: in half-lives of each memory."""

    def __init__(self, half_lives_s: tuple[float, ...], reach: float, weight: float) -> None:
        self.half_lives_s = half_lives_s
        self.reach = reach
        self.weight = weight
        self.arrivals: list[Arrival] = []

    def note(self, arrival: Arrival) -> None:
        """Remember an arrival, whatever becomes of it."""
        self.arrivals.append(arrival)
        oldest = arrival.at_s - FORGOTTEN * max(self.half_lives_s)
        if len(self.arrivals) > 64 and self.arrivals[len(self.arrivals) // 4].at_s < oldest:
            self.arrivals = [known for known in self.arrivals if known.at_s >= oldest]

    def expected_use(self, now: float, price: float, times: NDArray[np.float64]) -> NDArray[np.float64]:
        """Slots that arrivals after ``now`` are expected to use at each of ``times`` (``> now``).

        Counted are those that need less than ``price`` slot-seconds for a value of 1. Each uses its footprint evenly
        over its window, at a rate of arrivals as remembered.
        """
        expected = np.zeros(len(times))
        if not self.arrivals:
            return expected
        known = np.array(self.arrivals, dtype=np.float64)
        value = known[:, 3]
        most = np.multiply(price, value, out=np.zeros(len(value)), where=value > 0.0)  # a price may be infinite
        cheaper = (known[:, 1] < most) & (known[:, 0] <= now)
        if not cheaper.any():
            return expected
        first = float(known[:, 0].min())
        use = known[cheaper, 1] / known[cheaper, 2]
        windows = known[cheaper, 2]
        ages = now - known[cheaper, 0]
        horizon = (times - now)[:, None]
        for half_life in self.half_lives_s:
            decay = math.log(2.0) / half_life
            weights = np.exp(-decay * ages)
            observed = (1.0 - math.exp(-decay * max(now - first, _LEAST_OBSERVED_S))) / decay
            reach = self.reach * half_life
            ahead = np.clip(np.minimum(horizon, reach) - np.maximum(horizon - windows[None, :], 0.0), 0.0, None)
            expected = np.maximum(expected, ahead @ (weights * use) / observed)
        return self.weight * expected

    def expectation(self, work: Work, value: float, now: float, limit_s: float) -> Expectation | None:
        """What cheaper arrivals are expected to use until a job's limit; None: not even alone can it be kept."""
        footprint = footprint_of(work, now, limit_s)
        if footprint is None:
            return None
        edges = np.linspace(now, limit_s, _BINS + 1)
        price = footprint / value if value > 0.0 else math.inf
        expected = self.expected_use(now, price, (edges[:-1] + edges[1:]) / 2)
        return Expectation(edges, expected, footprint)
