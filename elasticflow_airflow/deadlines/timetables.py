"""Due times of a DAG's runs by its timetable, for the service's calendar and for deadlines from the DAG.

Accepts a timetable of the SDK (as in DAG files and workers) or of the core (as in serialized DAGs). SDK timetables have
no logic, so they are converted to those of the core, which is installed beside the SDK. Reads no database.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pendulum

log = logging.getLogger(__name__)

CALENDAR_WINDOW = timedelta(hours=48)
"""How far ahead due runs are reported to the service."""
CALENDAR_MOST = 200
"""Maximum number of due runs that are reported to the service."""
_MOST_STEPS = 5000
"""Maximum number of runs to step through before starting again from a later time."""


class TimetableError(ValueError):
    """A timetable whose due times cannot be determined, at least in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownRun:
    """A run of a timetable: when it is due, and its data interval.

    Later runs are computed from a known run, since schedules like ``timedelta(hours=3)`` have no phase of their own.
    """

    run_after: datetime
    interval_start: datetime | None = None
    interval_end: datetime | None = None


def recurs(timetable: Any) -> bool:
    """Whether runs are due at predictable times; False for manual, one-time, continuous and purely asset-based ones.

    Raises TimetableError if the timetable cannot be read.
    """
    return bool(_core(timetable).periodic)


def next_runs(
    timetable: Any,
    *,
    after: datetime,
    known: KnownRun | None = None,
    until: datetime | None = None,
    most: int = CALENDAR_MOST,
    earliest: datetime | None = None,
    latest: datetime | None = None,
) -> list[KnownRun]:
    """Return the runs that are due later than ``after`` and not later than ``until``, soonest first.

    ``earliest`` and ``latest`` are the DAG's start_date and end_date. Empty for a DAG whose runs do not recur. Raises
    TimetableError.
    """
    core = _core(timetable)
    if not core.periodic or most < 1:
        return []
    try:
        if known is not None:
            found = _walk(core, _info(core, known), after, until, most, earliest, latest)
            if found is not None:
                return found
        found = _walk(core, _inferred(core, after), after, until, most, earliest, latest)
    except Exception as error:  # a timetable may be user code
        raise TimetableError(f"timetable {type(core).__name__} cannot say when runs are due: {error!r}") from error
    return found or []


def next_run(
    timetable: Any, *, after: datetime, known: KnownRun | None = None, latest: datetime | None = None
) -> datetime | None:
    """Return the next time at which a run is due; None if there is none. Raises TimetableError."""
    return next((run.run_after for run in next_runs(timetable, after=after, known=known, most=1, latest=latest)), None)


def _walk(
    core: Any,
    info: Any,
    after: datetime,
    until: datetime | None,
    most: int,
    earliest: datetime | None,
    latest: datetime | None,
) -> list[KnownRun] | None:
    """Step from run to run; return None if ``after`` is too far from the starting point."""
    found: list[KnownRun] = []
    for steps, due in enumerate(_dues(core, info, earliest, latest), start=1):
        if until is not None and due.run_after > until:
            break
        if due.run_after > after:
            found.append(due)
        if len(found) == most:
            break
        if steps >= _MOST_STEPS:
            return found or None
    return found


def _dues(core: Any, info: Any, earliest: datetime | None, latest: datetime | None) -> Iterator[KnownRun]:
    from airflow.timetables.base import TimeRestriction

    restriction = TimeRestriction(_pendulum(earliest), _pendulum(latest), catchup=True)
    before: datetime | None = None
    while True:
        info = core.next_dagrun_info_v2(last_dagrun_info=info, restriction=restriction)
        if info is None or (before is not None and info.run_after <= before):
            return
        before = info.run_after
        start, end = info.data_interval or (None, None)
        yield KnownRun(run_after=info.run_after, interval_start=start, interval_end=end)


def _info(core: Any, known: KnownRun) -> Any:
    from airflow.timetables.base import DagRunInfo, DataInterval

    run_after, start, end = (_pendulum(at) for at in (known.run_after, known.interval_start, known.interval_end))
    if start is None or end is None:
        return _inferred(core, known.run_after)
    return DagRunInfo(run_after=run_after, data_interval=DataInterval(start, end))  # type: ignore[arg-type]  # given


def _inferred(core: Any, at: datetime) -> Any:
    """Return a manual run at a time, as the starting point for the runs that are due after that time."""
    from airflow.timetables.base import DagRunInfo, DataInterval

    moment = _pendulum(at)
    assert moment is not None  # given
    try:
        interval = core.infer_manual_data_interval(run_after=moment)
    except NotImplementedError:
        interval = DataInterval.exact(moment)
    return DagRunInfo(run_after=moment, data_interval=interval)


def _core(timetable: Any) -> Any:
    try:
        from airflow.serialization.encoders import coerce_to_core_timetable

        core = coerce_to_core_timetable(timetable)
    except Exception as error:  # private to Airflow, and a timetable may be user code
        raise TimetableError(f"timetable {type(timetable).__name__} cannot be read here: {error!r}") from error
    if not hasattr(core, "periodic"):
        raise TimetableError(f"{timetable!r} is a {type(timetable).__name__}, no timetable")
    return core


def _pendulum(moment: datetime | None) -> pendulum.DateTime | None:
    return None if moment is None else pendulum.instance(moment)
