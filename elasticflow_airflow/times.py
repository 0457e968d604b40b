"""Times and durations as people read them, in sentences, logs and tables. The page writes them in its reader's zone."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

_FIRST_S, _LAST_S = -62135596800.0 + 86400.0, 253402300799.0 - 86400.0
"""A day within what a calendar has, so that it has them in every zone."""
_HALF_S = 0.5
"""Every moment is rounded to the second, so that two ways of writing one never differ."""
_UNITS = (("d", 86400, "h", 3600, 30.0), ("h", 3600, "min", 60, 0.5), ("min", 60, "s", 1, 0.5))
"""Each with its seconds, the unit below and its seconds, and by how much less is rounded up to it."""


def utc(at_s: float) -> datetime:
    """The moment, or the nearest one that a calendar has: what is worked out from slow speeds may be far beyond."""
    return datetime.fromtimestamp(min(_LAST_S, at_s) if at_s >= _FIRST_S else _FIRST_S, UTC)


def moment(at_s: float) -> str:
    """UTC seconds as date, time and zone; seconds only where they are not 0. For who knows no other zone."""
    if not _FIRST_S <= at_s < _LAST_S:
        return "never" if at_s > 0 else f"{at_s:g} s"
    return f"{utc(at_s + _HALF_S):%Y-%m-%d %H:%M:%S UTC}".replace(":00 ", " ")


def zoned_moment(at: datetime) -> str:
    """A moment in its own zone: weekday, date, time and zone; seconds only where they are not 0."""
    return f"{at + timedelta(seconds=_HALF_S):%a %Y-%m-%d %H:%M:%S %Z}".replace(":00 ", " ")


def local_moment(at_s: float | None) -> str:
    """UTC seconds in this machine's zone, for a table: always as wide; a dash for none."""
    return "-" if at_s is None else f"{utc(at_s + _HALF_S).astimezone():%Y-%m-%d %H:%M:%S}"


def duration(seconds: float) -> str:
    """A duration with the precision that matters: its two largest units; tenths of a second below ten."""
    if not math.isfinite(seconds):
        return "for ever" if seconds > 0 else f"{seconds} s"
    sign, length_s = ("-" if seconds < 0 else ""), abs(seconds)
    if length_s < 9.95:
        tenths = f"{length_s:.1f}".removesuffix(".0")
        return "0 s" if tenths == "0" else f"{sign}{tenths} s"
    for unit, size, smaller, step, slack in _UNITS:
        if length_s >= size - slack:
            count, left = divmod(round(length_s / step) * step, size)
            return f"{sign}{count} {unit}" + (f" {left // step} {smaller}" if left else "")
    return f"{sign}{round(length_s)} s"
