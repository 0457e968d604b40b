"""The least that a job must pay to meet its deadline when slots have prices: the arithmetic behind the bound.

Exact except for the last digits, which are rounded down; no solver is trusted. Plain numpy over all jobs at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_GRID = 16
_ROUNDS = 3
_SPAN = 1e5
_RELATIVE, _OF_WORK = 1e-9, 1e-11


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Jobs as arrays: a row per job, a column per option (a size on a pool; the last is repeated to fill the row).

    ``begin_s``/``end_s``: submission, and the time by which the last step must be made.
    """

    ids: tuple[str, ...]
    pool_slots: Floats
    begin_s: Floats
    end_s: Floats
    steps: Floats
    startup_s: Floats
    pause_s: Floats
    pool: NDArray[np.intp]
    size: Floats
    speed: Floats


@dataclass(frozen=True, slots=True)
class Prices:
    """Price per slot-second: a row per pool, a column per interval between two ``edges_s``; 0 outside."""

    edges_s: Floats
    per_slot_s: Floats

    def any(self) -> bool:
        """Return whether any price is above 0."""
        return bool((self.per_slot_s > 0.0).any())

    def of_all_slots(self, pool_slots: Floats) -> float:
        """Return the total price of all slots over all intervals."""
        return float(pool_slots @ (self.per_slot_s @ np.diff(self.edges_s)))

    def runs(self) -> list[Prices]:
        """Return each contiguous stretch of non-zero prices as separate prices; empty if there is only one."""
        busy = np.concatenate([[False], (self.per_slot_s > 0.0).any(axis=0), [False]])
        begins = np.flatnonzero(busy[1:] & ~busy[:-1])
        ends = np.flatnonzero(busy[:-1] & ~busy[1:])
        if len(begins) < 2:
            return []
        return [Prices(self.edges_s[i : j + 1], self.per_slot_s[:, i:j]) for i, j in zip(begins, ends, strict=True)]

    def joined(self) -> Prices:
        """Return the same prices with equal neighbouring intervals joined and free ones added before and after."""
        free = np.zeros((len(self.per_slot_s), 1))
        padded = np.hstack([free, self.per_slot_s, free])
        edges = np.concatenate([[-np.inf], self.edges_s, [np.inf]])
        new = np.concatenate([[True], (padded[:, 1:] != padded[:, :-1]).any(axis=0)])
        return Prices(np.append(edges[:-1][new], np.inf), padded[:, new])


def least_costs(jobs: Candidates, prices: Prices) -> Floats:
    """Return a lower bound of what each job pays for slots if it meets its deadline, with start and pauses.

    For a price ``m`` of a step, the best way to hold slots is found by dynamic programming over intervals of constant
    price; the state is the option held, or none. Within an interval, cost grows linearly with the time in an option, so
    changing at the edges is no worse than inside. A change to an option loses the steps of one pause,
    ``m * speed * pause_s``, wherever that pause falls. A stay shorter than its pause makes no step at all; holding
    nothing instead, with the same loss at the next start, pays less. So every possible schedule is covered. A second
    start is charged the smaller of start-up and pause. ``m`` is searched on a grid that narrows around the maximum; a
    poor ``m`` makes the bound looser but never invalid.
    """
    line = prices.joined()
    rows = np.arange(len(jobs.ids))
    highest = max(float(line.per_slot_s.max()), 1e-300)
    top = 32.0 * highest * (jobs.size / jobs.speed).max(axis=1)
    grid = (top / _SPAN)[:, None] * _SPAN ** (np.arange(_GRID) / (_GRID - 1))[None, :]
    best = np.zeros(len(jobs.ids))
    for _ in range(_ROUNDS):
        least = _least_of_step_price(jobs, line, grid)
        work = grid * jobs.steps[:, None]
        costs = work + least
        costs -= _RELATIVE * np.abs(costs) + _OF_WORK * work
        at = costs.argmax(axis=1)
        best = np.maximum(best, costs.max(axis=1))
        low = np.where(at == 0, 0.0, grid[rows, np.maximum(at - 1, 0)])
        high = grid[rows, np.minimum(at + 1, _GRID - 1)]
        grid = low[:, None] + (high - low)[:, None] * (np.arange(_GRID) / (_GRID - 1))[None, :]
    return best


def _least_of_step_price(jobs: Candidates, line: Prices, step_price: Floats) -> Floats:
    """Return, per job and price of a step, the minimum of (paid for slots - price * steps made); at most 0 (idle)."""
    earned = step_price[:, :, None] * jobs.speed[:, None, :]
    first = earned * jobs.startup_s[:, None, None]
    again = earned * np.minimum(jobs.startup_s, jobs.pause_s)[:, None, None]
    running = np.full(earned.shape, np.inf)
    suspended = np.full(step_price.shape, np.inf)
    for low, high, price in zip(line.edges_s[:-1], line.edges_s[1:], line.per_slot_s.T, strict=True):
        length = np.minimum(high, jobs.end_s) - np.maximum(low, jobs.begin_s)
        active = np.flatnonzero(length > 0.0)
        if not len(active):
            continue
        paid = jobs.size[active] * price[jobs.pool[active]]
        entered = np.minimum(first[active], suspended[active][:, :, None] + again[active])
        state = np.minimum(running[active], entered)
        state += length[active][:, None, None] * (paid[:, None, :] - earned[active])
        running[active] = state
        suspended[active] = np.minimum(suspended[active], state.min(axis=2))
    least: Floats = np.minimum(suspended, 0.0)
    return least
