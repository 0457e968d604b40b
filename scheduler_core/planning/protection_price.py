"""What a newcomer would take from expected arrivals: a protection price, as in airline seat control.

Under contention, admitting every job that fits in order of arrival can trade twenty small jobs for one large one. With
``objective="value"`` a newcomer is admitted only if it fits beside the promised jobs *and* the expected use of cheaper
arrivals until its deadline; a job is cheaper if it needs fewer slot-seconds for the same value. Arrival rates are
learned from past arrivals by estimates with several half-lives (1, 4 and 36 hours unless ``protection_half_lives_s``
is set), none of which looks further ahead than its reach. At each future time the largest estimate is used, because a
short half-life alone would admit a huge job in a lull; and the more they are worth beside the newcomer, the more than
expected is kept, since arrivals come by chance (Littlewood's rule, 1972, for jobs instead of passengers; in contrast,
OASiS, INFOCOM 2018, prices slots by their use alone).

With ``objective="auto"`` that is so once a job was refused for lack of slots, until none has been for as long as
arrivals are remembered. Where everybody fits, it would only refuse jobs for others that never come; so until then the
smallest estimate is used, what all memories, short and long, agree on, and each less one standard error: after few
arrivals nothing is sure. Pure; knows only the number of slots.
"""

from __future__ import annotations

import math
import zlib
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elasticflow_airflow.scheduler_core.model.work import TOLERANCE_S, Work

FORGOTTEN = 8.0
"""Arrivals older than this many times the longest half-life have no weight."""
_BINS = 48
_LEAST_CHANCE = 1e-3
"""What is kept free by chance is used at least so often."""
_LEAST_OBSERVED_S = 3600.0
"""Observation times below this count as this long: an hour is the least to learn rates from."""


class Arrival(NamedTuple):
    """One job that requested a deadline: arrival time, least slot-seconds needed, time to its deadline, value, key."""

    at_s: float
    footprint: float
    window_s: float
    value: float
    key: float = math.nan
    """Tells a job from others (:func:`key_of`): no job is expected to come again before it is decided on."""


def key_of(job_id: str) -> float:
    """Return the key of a job."""
    return float(zlib.crc32(job_id.encode()))


class Expectation(NamedTuple):
    """Number of slots that are expected to be used in each bin between ``edges``.

    ``footprint`` is the least slot-seconds that the newcomer itself needs, ``by_chance`` how many more than expected
    are kept free for the others.
    """

    edges: NDArray[np.float64]
    slots: NDArray[np.float64]
    footprint: float
    by_chance: float = 0.0

    @property
    def slot_seconds(self) -> float:
        """The expected use until the newcomer's limit."""
        return float(self.slots @ np.diff(self.edges))

    @property
    def needed(self) -> float:
        """The slot-seconds that have to be free until the newcomer's limit: for the others, and for itself."""
        return self.slot_seconds + self.by_chance + self.footprint

    def times(self, factor: float) -> Expectation:
        """Return so many times the expected use."""
        return self._replace(slots=self.slots * factor)

    def whole_slots(self) -> NDArray[np.int32]:
        """Return the number of slots of each bin, rounded."""
        return np.rint(self.slots).astype(np.int32)


def footprint_of(work: Work, now: float, limit_s: float) -> float | None:
    """Return the least slot-seconds at one constant size with which the job alone keeps a limit; None: it cannot."""
    left = work.left_at(now)
    least: float | None = None
    for size in work.sizes:
        if work.speeds[size] <= 0.0:
            continue  # not measured yet
        seconds = work.delay_s(now, size) + left / work.speeds[size] + work.tail_s
        if now + seconds <= limit_s + TOLERANCE_S:
            needed = size * seconds
            least = needed if least is None else min(least, needed)
    return least


class Arrivals:
    """Past arrivals in the order in which they were noted, in arrays that grow: to note one costs the same always."""

    def __init__(self) -> None:
        self._count = 0
        self._fields = np.empty((64, len(Arrival._fields)))
        self._moments = np.empty(64, np.intp)
        self._number_of: dict[float, int] = {}
        """By arrival time, the number of that moment."""

    def __len__(self) -> int:
        return self._count

    @property
    def known(self) -> NDArray[np.float64]:
        """A row for each arrival, a column for each field; what is noted later changes nothing in it."""
        return self._fields[: self._count]

    @property
    def moments(self) -> NDArray[np.intp]:
        """The number of each arrival's moment."""
        return self._moments[: self._count]

    def note(self, arrival: Arrival) -> None:
        """Add one."""
        if self._count == len(self._fields):
            self._fields = np.concatenate([self._fields, np.empty_like(self._fields)])
            self._moments = np.concatenate([self._moments, np.empty_like(self._moments)])
        self._fields[self._count] = arrival
        self._moments[self._count] = self._number_of.setdefault(arrival.at_s, len(self._number_of))
        self._count += 1

    def forget_before(self, oldest_s: float) -> None:
        """Forget those that came before a time, once they are a quarter of all."""
        if self._count <= 64 or self._fields[self._count // 4, 0] >= oldest_s:
            return
        kept = [Arrival(*row) for row in self.known.tolist() if row[0] >= oldest_s]
        self._count, self._number_of = 0, {}
        self._fields, self._moments = np.empty_like(self._fields), np.empty_like(self._moments)
        for arrival in kept:
            self.note(arrival)


class _Seen(NamedTuple):
    """The arrivals as seen at one moment."""

    now: float
    known: NDArray[np.float64]
    weights: tuple[NDArray[np.float64], ...]
    """By half-life: how much each arrival counts."""
    by_window: NDArray[np.intp]
    """The numbers of the arrivals, shortest window first."""


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of the first 0, 1, 2, ... values."""
    return np.concatenate([np.zeros(1), np.cumsum(values)])


def _sure_part(moments: NDArray[np.intp], weights: NDArray[np.float64]) -> float:
    """Return 1 less one standard error of a rate, as a fraction of it (Poisson), with Kish's effective sample size.

    ``moments``: the number of each arrival's moment. What comes together counts once: several jobs of one moment say
    nothing about how often such moments are.
    """
    each = np.bincount(moments, weights)[np.bincount(moments) > 0]
    total = float(each.sum())
    return max(0.0, 1.0 - math.sqrt(float((each**2).sum())) / total) if total > 0.0 else 0.0


class Protection:
    """Learns arrival rates and computes the capacity to protect from a newcomer. ``reach`` counts half-lives."""

    def __init__(self, half_lives_s: tuple[float, ...], reach: float, weight: float) -> None:
        self.half_lives_s = half_lives_s
        self.reach = reach
        self.weight = weight
        self.arrivals = Arrivals()
        self.short_at_s = -math.inf
        """When a job was last refused for lack of slots."""
        self._last_seen: _Seen | None = None

    def is_short(self, now: float) -> bool:
        """Return whether slots have been short within the time for which arrivals are remembered."""
        return now - self.short_at_s <= FORGOTTEN * max(self.half_lives_s)

    def note(self, arrival: Arrival) -> None:
        """Record an arrival, whatever its outcome."""
        self.arrivals.note(arrival)
        self.arrivals.forget_before(arrival.at_s - FORGOTTEN * max(self.half_lives_s))
        self._last_seen = None

    def expected_use(
        self,
        now: float,
        price: float,
        times: NDArray[np.float64],
        *,
        agreed: bool = False,
        sure: bool = False,
        but: float = math.nan,
    ) -> NDArray[np.float64]:
        """Return the number of slots that future arrivals are expected to use at each of ``times`` (``> now``).

        Only arrivals that need less than ``price`` slot-seconds for a value of 1 count. Each uses its footprint evenly
        over its window; the arrival rate is the learned one. ``agreed``: the smallest estimate, else the largest.
        ``sure``: each less its error, and reaching as far ahead as if no half-life were longer than arrivals were seen.
        ``but``: the key of the job that is decided on.
        """
        cheaper = self._cheaper(now, price, but, certain=agreed and sure)
        return np.zeros(len(times)) if cheaper is None else self._use_of(cheaper, now, times, agreed=agreed, sure=sure)

    def _use_of(
        self, cheaper: NDArray[np.bool_], now: float, times: NDArray[np.float64], *, agreed: bool, sure: bool
    ) -> NDArray[np.float64]:
        """Return the expected use of some arrivals; the other arguments are those of :meth:`expected_use`."""
        seen = self._seen(now)
        first = float(seen.known[:, 0].min())
        chosen = seen.by_window[cheaper[seen.by_window]]
        windows = seen.known[chosen, 2]
        use = seen.known[chosen, 1] / windows
        horizon = times - now
        shorter = np.searchsorted(windows, horizon)
        moments = self.arrivals.moments[chosen] if sure else None
        estimates = []
        for half_life, weights_of_all in zip(self.half_lives_s, seen.weights, strict=True):
            decay = math.log(2.0) / half_life
            weights = weights_of_all[chosen]
            observed = (1.0 - math.exp(-decay * max(now - first, _LEAST_OBSERVED_S))) / decay
            # A burst in the first minute surely says nothing about the next hours.
            reach = self.reach * (min(half_life, now - first) if sure else half_life)
            # What comes within ``ahead`` from now is expected, and is there at a time if that is within its window.
            ahead = np.minimum(horizon, reach)
            over = np.searchsorted(windows, horizon - ahead)
            used, windowed = _sums(weights * use), _sums(weights * use * windows)
            estimate = ahead * (used[-1] - used[shorter])
            estimate += windowed[shorter] - windowed[over] - (horizon - ahead) * (used[shorter] - used[over])
            estimate = np.maximum(estimate, 0.0) / observed
            if moments is not None:
                estimate *= _sure_part(moments, weights)
            estimates.append(estimate)
        found: NDArray[np.float64] = (np.min if agreed else np.max)(estimates, axis=0)
        return self.weight * found

    def _cheaper(self, now: float, price: float, but: float, *, certain: bool) -> NDArray[np.bool_] | None:
        """Return which arrivals are cheaper; None if there is none, or if ``certain`` and they say nothing for sure."""
        if certain and not self._several_moments(but):
            return None
        if not len(self.arrivals):
            return None
        known = self._seen(now).known
        value = known[:, 3]
        most = np.multiply(price, value, out=np.zeros(len(value)), where=value > 0.0)  # a price may be infinite
        cheaper = (known[:, 1] < most) & (known[:, 0] <= now) & (known[:, 4] != but)
        return cheaper if cheaper.any() else None

    def _several_moments(self, but: float) -> bool:
        """Return whether others than ``but`` came at several moments: one moment says nothing of a rate."""
        others = self.arrivals.moments[self.arrivals.known[:, 4] != but]
        return len(others) > 0 and bool((others != others[0]).any())

    def _seen(self, now: float) -> _Seen:
        """Return all arrivals as seen now; the same object as long as neither changes."""
        seen = self._last_seen
        if seen is None or seen.now != now:
            known = self.arrivals.known
            ages = np.maximum(now - known[:, 0], 0.0)
            weights = tuple(np.exp(-(math.log(2.0) / half_life) * ages) for half_life in self.half_lives_s)
            seen = self._last_seen = _Seen(now, known, weights, np.argsort(known[:, 2], kind="stable"))
        return seen

    def expectation(
        self, work: Work, value: float, now: float, limit_s: float, *, agreed: bool = False, sure: bool = False
    ) -> Expectation | None:
        """Return the expected use of cheaper arrivals until a job's limit; None: the job cannot keep it even alone."""
        footprint = footprint_of(work, now, limit_s)
        if footprint is None:
            return None
        price = footprint / value if value > 0.0 else math.inf
        cheaper = self._cheaper(now, price, key_of(work.job_id), certain=agreed and sure)
        if cheaper is None:
            return Expectation(np.array([now, limit_s]), np.zeros(1), footprint)
        edges = np.linspace(now, limit_s, _BINS + 1)
        expected = self._use_of(cheaper, now, (edges[:-1] + edges[1:]) / 2, agreed=agreed, sure=sure)
        by_chance = 0.0 if agreed or value <= 0.0 else self._by_chance(cheaper, now, limit_s, value / footprint)
        return Expectation(edges, expected, footprint, by_chance)

    def _by_chance(self, cheaper: NDArray[np.bool_], now: float, limit_s: float, worth: float) -> float:
        """Return how many slot-seconds more than expected cheaper arrivals may need until a limit.

        By Littlewood's rule so many are kept that all of them are used with a probability of at most ``worth``, the
        newcomer's value per slot-second, over that of the others, taken together (EMSR-b; Belobaba, Operations
        Research, 1992). Arrivals are independent, so the variance of what they need is the sum of the squares.
        """
        seen = self._seen(now)
        first = float(seen.known[:, 0].min())
        footprints, values = seen.known[cheaper, 1], seen.known[cheaper, 3]
        largest = more = 0.0
        for half_life, weights_of_all in zip(self.half_lives_s, seen.weights, strict=True):
            decay, weights = math.log(2.0) / half_life, weights_of_all[cheaper]
            observed = (1.0 - math.exp(-decay * max(now - first, _LEAST_OBSERVED_S))) / decay
            expected = weights * (min(limit_s - now, self.reach * half_life) / observed)
            needed = float(expected @ footprints)
            if needed > largest:
                chance = min(1.0, worth * float(weights @ footprints) / float(weights @ values))
                deviations = NormalDist().inv_cdf(1.0 - max(_LEAST_CHANCE, chance)) if chance < 0.5 else 0.0
                largest, more = needed, deviations * math.sqrt(float(expected @ footprints**2))
        return self.weight * more
