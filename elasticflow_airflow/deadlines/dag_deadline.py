"""Derives a deadline from the DAG: its DeadlineAlerts, as far as a worker can evaluate them, or its next run.

For ``deadline_of=`` without ``deadline=``. Works on the values of a run that it is given; does not call Airflow itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from elasticflow_airflow.deadlines.parse import DeadlineError, TimeFromDag
from elasticflow_airflow.deadlines.timetables import TimetableError, recurs
from elasticflow_airflow.times import duration

_LOGICAL_DATE: Final = "DagRunLogicalDateDeadline"
_QUEUED_AT: Final = "DagRunQueuedAtDeadline"
_FIXED: Final = "FixedDatetimeDeadline"
_AVERAGE_RUNTIME: Final = "AverageRuntimeDeadline"

REMEDY: Final = (
    "say deadline= too, give the DAG a deadline=DeadlineAlert(...) that counts from the logical date, from when the run"
    " is queued or is a fixed time, or a schedule"
)


def dag_of(task: Any) -> Any:
    """Return the DAG of a task; None if it has none."""
    return task.dag if task.has_dag() else None


def alerts_of(dag: Any) -> tuple[Any, ...]:
    """Return the DeadlineAlerts of a DAG: Airflow accepts one, a list of them, or none."""
    alerts = getattr(dag, "deadline", None)
    if alerts is None:
        return ()
    return tuple(alerts) if isinstance(alerts, (list, tuple)) else (alerts,)


def time_from_dag(
    alerts: Sequence[Any],
    *,
    due: datetime,
    logical_date: datetime | None,
    next_run: Callable[[], datetime | None],
    variable: Callable[[str], str],
    deadline_of: str,
) -> TimeFromDag:
    """Return the earliest alert of the DAG or, without one, its next run. Raises DeadlineError naming the remedy.

    ``due`` is run_after, used in place of the time of queueing. ``next_run`` returns when the next run is due,
    ``variable`` reads an Airflow Variable (KeyError if undefined).
    """
    found: list[tuple[datetime, str]] = []
    left_out: list[str] = []
    for alert in alerts:
        name = _name(alert)
        base, said = _reference(alert.reference, due, logical_date)
        if base is None:
            left_out.append(f"{name}: {said}")
            continue
        interval = _interval(alert.interval, name, variable)
        seconds = interval.total_seconds()
        sign = "-" if seconds < 0 else "+"
        found.append((base + interval, f"{name}: {said} {sign} {duration(abs(seconds))}"))
    unused = f"; cannot be evaluated in a worker: {'; '.join(left_out)}" if left_out else ""
    if found:
        at, said = min(found, key=lambda one: one[0])
        earliest = "earliest deadline alert" if len(found) > 1 else "deadline alert"
        return TimeFromDag(at=at, said=f"{earliest} of the DAG, {said}{unused}")
    next_due = next_run()
    if next_due is not None:
        return TimeFromDag(at=next_due, said=f"the next run of the DAG is due then{unused}")
    reason = unused.removeprefix("; ") or "the DAG has no deadline alert"
    raise DeadlineError(
        f"deadline_of={deadline_of!r} without deadline=: {reason}, and no next run is due by its timetable: {REMEDY}"
    )


def check_time_from_dag(dag: Any, alerts: Sequence[Any], deadline_of: str) -> None:
    """Refuse at DAG parse ``deadline_of`` without ``deadline`` if the DAG provides no time. Raises DeadlineError."""
    known = {_LOGICAL_DATE, _QUEUED_AT, _FIXED}
    if any(_kind(alert.reference) in known for alert in alerts):
        return
    timetable = getattr(dag, "timetable", None)
    try:
        if timetable is None or recurs(timetable):
            return
    except TimetableError:
        return  # decided at run time
    cannot = "; ".join(f"{_name(alert)} ({_kind(alert.reference)})" for alert in alerts)
    has = f"no deadline alert that a worker can evaluate ({cannot})" if alerts else "no deadline alert"
    raise DeadlineError(
        f"deadline_of={deadline_of!r} without deadline=: DAG {dag.dag_id!r} has {has} and no schedule by the clock"
        f" ({type(timetable).__name__}): {REMEDY}"
    )


def _reference(reference: Any, due: datetime, logical_date: datetime | None) -> tuple[datetime | None, str]:
    """Return the time that an alert refers to and its name; or None, and why there is no such time."""
    kind = _kind(reference)
    if kind == _LOGICAL_DATE:
        if logical_date is None:
            return None, "it counts from the logical date, and this run has none"
        return logical_date, "logical date"
    if kind == _QUEUED_AT:
        return due, "when the run was due, as queued"
    if kind == _FIXED:
        # As Airflow stores it: a time without a zone is in this machine's zone.
        return datetime.fromtimestamp(reference._datetime.timestamp(), UTC), "fixed time"
    if kind == _AVERAGE_RUNTIME:
        return None, "the average runtime is known to Airflow's scheduler only"
    return None, f"only Airflow's scheduler can evaluate {kind}"


def _interval(interval: Any, name: str, variable: Callable[[str], str]) -> timedelta:
    if isinstance(interval, timedelta):
        return interval
    key = getattr(interval, "key", None)
    if key is None:
        raise DeadlineError(f"deadline alert {name} has the interval {interval!r}: give a timedelta")
    try:
        value = variable(str(key))
    except KeyError as error:
        raise DeadlineError(
            f"deadline alert {name} takes its interval from the Variable {key!r}, which is not defined: define it, in"
            " seconds, or say deadline="
        ) from error
    try:
        return timedelta(seconds=int(value))
    except (TypeError, ValueError) as error:
        raise DeadlineError(
            f"deadline alert {name} takes its interval from the Variable {key!r} = {value!r}: it must be a whole number"
            " of seconds"
        ) from error


def _name(alert: Any) -> str:
    name = getattr(alert, "name", None)
    return repr(name) if name else "unnamed"


def _kind(reference: Any) -> str:
    return str(getattr(reference, "reference_name", type(reference).__name__))
