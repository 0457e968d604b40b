"""Converts the deadline that a DAG author writes to the time when the training must end. Pure: no clock, no Airflow.

A deadline is a time of day (``"07:30"``, in the DAG's time zone unless it has its own: its first occurrence after the
run is due), a duration after the run is due, a datetime, or a string of either (a rendered template: ``"HH:MM"`` or ISO
8601). It may apply to this training, a downstream task or the whole run, which determines how much earlier the training
must end: ``Reserve``.

Daylight saving, for times of day, datetimes and ISO strings: a wall-clock time that the clocks skip (02:30 in spring)
is moved forward by the length of the gap (03:30). Of a time that occurs twice (02:30 in autumn), the first occurrence
after the run is due is used. A datetime with a zone, or with ``fold=1``, is unambiguous.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta, tzinfo
from typing import Final, TypeAlias

import pendulum
from pendulum import DateTime

from elasticflow_airflow.times import duration, zoned_moment

DeadlineGiven: TypeAlias = "str | time | timedelta | datetime"

DAG_RUN: Final = "dag_run"
"""Value of ``deadline_of`` that means the whole run."""

_TIME_OF_DAY = re.compile(r"(?P<hour>\d{1,2}):(?P<minute>\d{2})(:(?P<second>\d{2}))?")
_FORMS = 'a time of day ("07:30"), a timedelta after the run is due, a datetime, or ISO 8601 text'


class DeadlineError(ValueError):
    """An invalid deadline; the message names the argument, its value and what is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingDeadline:
    """When the training must end (``at``), when its target must end (``target_at``), and the arithmetic as text."""

    at: DateTime
    target_at: DateTime
    arithmetic: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeFromDag:
    """A deadline from the DAG's alerts or timetable, in the absence of ``deadline=``; ``said`` explains its source."""

    at: datetime
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """The time reserved from the end of training to the end of the target: ``after_s``, and a margin.

    ``said`` explains the source of the number, ``margin_said`` the margin.
    """

    after_s: float
    said: str
    margin_s: float = 0.0
    margin_said: str = ""

    @property
    def total_s(self) -> float:
        """The total reserve in seconds."""
        return self.after_s + self.margin_s


def declared_reserve(downstream_reserve: timedelta, deadline_of: str, why: str = "") -> Reserve:
    """Return the reserve of ``downstream_reserve=``; ``why`` explains why no observed value is used."""
    said = f"downstream_reserve: from the end of training to the end of {target_name(deadline_of)}"
    return Reserve(after_s=downstream_reserve.total_seconds(), said=said + (f"; {why}" if why else ""))


def target_name(deadline_of: str | None) -> str:
    """Return the name of a deadline's target for messages."""
    if deadline_of is None:
        return "the training"
    return "the DAG run" if deadline_of == DAG_RUN else f"task {deadline_of!r}"


def check_deadline(given: object, argument: str) -> None:
    """Refuse an invalid deadline at DAG parse. Templates are checked once rendered. Raises DeadlineError."""
    if isinstance(given, bool) or not isinstance(given, (str, time, timedelta, datetime)):
        raise DeadlineError(f"{argument}={given!r} is a {type(given).__name__}, not {_FORMS}")
    if isinstance(given, time) and given.tzinfo is not None:
        _zone_of(given.tzinfo, given, argument)
    if isinstance(given, timedelta) and given <= timedelta(0):
        raise DeadlineError(f"{argument}={given!r} lies before the run is due: give a positive duration")
    if isinstance(given, timedelta) or (isinstance(given, str) and not _is_template(given)):
        resolve(given, run_due=pendulum.datetime(2026, 1, 1), timezone=pendulum.UTC, argument=argument)


def resolve(given: DeadlineGiven, *, run_due: datetime, timezone: tzinfo, argument: str = "deadline") -> DateTime:
    """Convert a given deadline to a time in the DAG's time zone. Raises DeadlineError.

    ``run_due`` is the run's ``run_after``: the time at which Airflow was to start it.
    """
    zone = _named(timezone)
    due = pendulum.instance(run_due).in_timezone(zone)
    if isinstance(given, timedelta):
        try:
            return due + given
        except OverflowError:
            raise DeadlineError(f"{argument}={given!r} lies beyond the year 9999: give a shorter duration") from None
    if isinstance(given, datetime):
        return _moment(given, due, zone)
    if isinstance(given, time):
        there = zone if given.tzinfo is None else _zone_of(given.tzinfo, given, argument)
        return _first_after(due, given.replace(tzinfo=None), there).in_timezone(zone)
    text = given.strip()
    if match := _TIME_OF_DAY.fullmatch(text):
        hour, minute, second = (int(match[name] or 0) for name in ("hour", "minute", "second"))
        if hour > 23 or minute > 59 or second > 59:
            raise DeadlineError(f"{argument}={given!r} is no time of day: the last of a day is 23:59:59")
        return _first_after(due, time(hour, minute, second), zone)
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise DeadlineError(f"{argument}={given!r} is not {_FORMS}") from None
    if len(text) <= len("2026-01-01"):
        raise DeadlineError(f"{argument}={given!r} is a day without a time: write {text}T07:30")
    return _moment(parsed, due, zone)


def training_deadline(
    given: DeadlineGiven | TimeFromDag,
    *,
    run_due: datetime,
    timezone: tzinfo,
    deadline_of: str | None = None,
    reserve: Reserve | None = None,
    now: datetime,
    argument: str = "deadline",
) -> TrainingDeadline:
    """Compute when the training itself must end, and explain it. Raises DeadlineError.

    With ``deadline_of`` (a downstream task, or ``"dag_run"``) the deadline is that of the target, and the training's is
    earlier by ``reserve``: the time from the end of training to the end of the target, and a margin.
    """
    zone = _named(timezone)
    due = pendulum.instance(run_due).in_timezone(zone)
    if isinstance(given, TimeFromDag):
        target_at, said = _moment(given.at, due, zone), given.said
    else:
        target_at = resolve(given, run_due=run_due, timezone=timezone, argument=argument)
        said = f"{argument}={_short(given)}"
        if isinstance(given, timedelta):
            said += f" after the run was due at {zoned_moment(due)}"
        elif isinstance(given, time) or (isinstance(given, str) and _TIME_OF_DAY.fullmatch(given.strip())):
            said += f", its first after the run was due at {zoned_moment(due)}"
    at = target_at
    rows: list[tuple[str, str, str]] = []
    if reserve is not None:
        at = target_at - timedelta(seconds=reserve.total_s)
        rows.append((f"{target_name(deadline_of)} must end by", zoned_moment(target_at), said))
        rows.append(("minus what comes after", duration(reserve.after_s), reserve.said))
        if reserve.margin_s:
            rows.append(("minus a margin", duration(reserve.margin_s), reserve.margin_said))
        said = ""
    rows.append(("the training must end by", zoned_moment(at), said))
    left_s = at.timestamp() - now.timestamp()
    rows.append(("which is", f"in {duration(left_s)}" if left_s >= 0 else f"{duration(-left_s)} ago", ""))
    wide, broad = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = [f"  {a:<{wide}}  {b:<{broad}}{f'  ({c})' if c else ''}".rstrip() for a, b, c in rows]
    return TrainingDeadline(at=at, target_at=target_at, arithmetic="\n".join(["Deadline:", *lines]))


def show_at(at_s: float, timezone: tzinfo) -> str:
    """Format UTC seconds in a time zone."""
    return zoned_moment(pendulum.from_timestamp(at_s).in_timezone(_named(timezone)))


def zone_name(timezone: tzinfo) -> str:
    """Return a time zone as a string that ``zone_from`` parses: its name, or its offset in seconds."""
    zone = _named(timezone)
    return zone.name if isinstance(zone, pendulum.Timezone) else str(zone.offset)


def zone_from(name: str) -> pendulum.Timezone | pendulum.FixedTimezone:
    """Parse the output of ``zone_name``."""
    return pendulum.FixedTimezone(int(name)) if name.lstrip("-").isdigit() else pendulum.Timezone(name)


def written(given: object) -> str:
    """Return a deadline as an unambiguous string: ``str`` omits the zone of a time of day."""
    text = str(given)
    return f"{text} {given.tzinfo}" if isinstance(given, time) and given.tzinfo is not None else text


def _first_after(due: DateTime, wall: time, zone: tzinfo) -> DateTime:
    """Return the first time after ``due`` at which the wall clock of a time zone shows ``wall``."""
    today = due.astimezone(zone).date()
    for days in range(3):
        for moment in _readings(datetime.combine(today + timedelta(days=days), wall), zone):
            if moment.timestamp() > due.timestamp():
                return moment.in_timezone(_named(zone))
    raise DeadlineError(f"no {wall:%H:%M} within three days after {due}")  # no time zone has such a hole


def _moment(given: datetime, due: DateTime, zone: pendulum.Timezone | pendulum.FixedTimezone) -> DateTime:
    """Convert a datetime to a time zone; a datetime without a zone is taken to be in that zone."""
    readings = _readings(given, given.tzinfo or zone)
    says_which = given.fold and not isinstance(given, DateTime)  # pendulum.naive() always has fold=1, so ignore it
    if given.tzinfo is not None or says_which:
        found = readings[-1 if given.fold else 0]
    else:
        found = next((moment for moment in readings if moment.timestamp() > due.timestamp()), readings[-1])
    return found.in_timezone(zone)


def _readings(wall: datetime, zone: tzinfo) -> list[DateTime]:
    """Return the times (UTC) at which the clocks of a zone show ``wall``, in order: one, or two if they go back.

    If the clocks skip it, return the time that is later by the length of the gap.
    """
    parts = (wall.year, wall.month, wall.day, wall.hour, wall.minute, wall.second, wall.microsecond)
    try:
        first, second = (datetime(*parts, tzinfo=zone, fold=fold).astimezone(UTC) for fold in (0, 1))
    except OverflowError:
        raise DeadlineError(f"{wall} is beyond all calendars; leave the deadline out, with best_effort=True") from None
    found = [first, second] if first < second else [first]  # of a skipped time, fold=1 is the earlier one
    return [pendulum.instance(moment) for moment in found]


def _zone_of(zone: tzinfo, given: time, argument: str) -> pendulum.Timezone | pendulum.FixedTimezone:
    try:
        return _named(zone)
    except DeadlineError as error:
        raise DeadlineError(
            f"{argument}={given!r}: {error}; give a ZoneInfo or UTC, or a time without a zone: it is the DAG's"
        ) from None


def _named(timezone: tzinfo) -> pendulum.Timezone | pendulum.FixedTimezone:
    """Convert any time zone to a pendulum time zone."""
    if isinstance(timezone, (pendulum.Timezone, pendulum.FixedTimezone)):
        return timezone
    name = getattr(timezone, "key", None)
    if name is not None:
        return pendulum.Timezone(str(name))
    offset = timezone.utcoffset(None)
    if offset is None:
        raise DeadlineError(f"time zone {timezone!r} has no name and no fixed offset")
    return pendulum.FixedTimezone(int(offset.total_seconds()))


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


def _short(given: DeadlineGiven) -> str:
    if isinstance(given, timedelta):
        return duration(given.total_seconds())
    return repr(given) if isinstance(given, str) else written(given)
