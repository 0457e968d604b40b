"""Formats times and durations for messages, logs and tables. The page formats its own, in the reader's time zone."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

_FIRST_S, _LAST_S = -62135596800.0 + 86400.0, 253402300799.0 - 86400.0
"""One day inside the range of ``datetime``, so that the times are representable in every zone."""
_HALF_S = 0.5
"""Added to round every time to the nearest second, so that two formats of one time never differ."""
_UNITS = (("d", 86400, "h", 3600, 30.0), ("h", 3600, "min", 60, 0.5), ("min", 60, "s", 1, 0.5))
"""Per unit: name, seconds, the next smaller unit and its seconds, and the shortfall that still rounds up to it."""


def utc(at_s: float) -> datetime:
    """Convert UTC seconds, clamped to the range of ``datetime``: a finish projected from a slow speed may exceed it."""
    return datetime.fromtimestamp(min(_LAST_S, at_s) if at_s >= _FIRST_S else _FIRST_S, UTC)


def moment(at_s: float) -> str:
    """Format UTC seconds as date, time and "UTC", without seconds if 0; for callers that know no other zone."""
    if not _FIRST_S <= at_s < _LAST_S:
        return "never" if at_s > 0 else f"{at_s:g} s"
    return f"{utc(at_s + _HALF_S):%Y-%m-%d %H:%M:%S UTC}".replace(":00 ", " ")


def zoned_moment(at: datetime) -> str:
    """Format a time in its own zone as weekday, date, time and zone, without seconds if they are 0."""
    return f"{at + timedelta(seconds=_HALF_S):%a %Y-%m-%d %H:%M:%S %Z}".replace(":00 ", " ")


def local_moment(at_s: float | None) -> str:
    """Format UTC seconds in this machine's zone, with a fixed width for tables; "-" for None."""
    return "-" if at_s is None else f"{utc(at_s + _HALF_S).astimezone():%Y-%m-%d %H:%M:%S}"


def short_moment(at_s: float | None, now: float) -> str:
    """Format UTC seconds in this machine's zone: the time today, with the weekday within six days, else the date."""
    if at_s is None:
        return "-"
    at, today = utc(at_s + _HALF_S).astimezone(), utc(now).astimezone().date()
    days = (at.date() - today).days
    return f"{at:%H:%M}" if days == 0 else f"{at:%a %H:%M}" if abs(days) < 7 else f"{at:%Y-%m-%d}"


def duration(seconds: float) -> str:
    """Format a duration by its two largest units; below ten seconds with tenths of a second."""
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
