"""Estimates the time from the end of training to the end of its downstream target, from recent runs.

It is measured from end to end, including queueing and retries, which sums of task durations would leave out. Read in
the worker through Airflow's Execution API, in a few quick calls per run. Nothing is cached, as each run asks only once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from airflow.sdk.exceptions import AirflowRuntimeError
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.comms import GetDagRun, GetPreviousDagRun, GetPreviousTI, GetTaskBreadcrumbs

from elasticflow_airflow.api import JobIdentity
from elasticflow_airflow.deadlines.parse import DAG_RUN, Reserve, declared_reserve, target_name
from elasticflow_airflow.times import duration

log = logging.getLogger(__name__)

QUANTILE: Final = 0.95
MARGIN: Final = 0.1
"""Margin, as a fraction of the downstream time, that is reserved in addition."""
RUNS: Final = 20
"""Number of recent runs that are evaluated."""
FEW: Final = 3
"""With fewer runs than this, the declared reserve is used if it is larger."""
_LOOKED_AT: Final = 60
"""Maximum number of runs that are requested, since failed, cleared and backfilled runs are skipped."""
_MOST_CALLS: Final = 200


AskAirflow = Callable[[Any], Any]
"""Sends a message of the Execution API and returns the response. Raises AirflowRuntimeError."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """A past training as recorded by the service."""

    run_id: str
    ended_at: float


def ask_airflow(message: Any) -> Any:
    """Send a message through the supervisor of this task process."""
    return task_runner.SUPERVISOR_COMMS.send(message)


def reserve_for(
    identity: JobIdentity,
    before: datetime,
    deadline_of: str,
    downstream_reserve: timedelta,
    *,
    ask: AskAirflow = ask_airflow,
    ended_jobs: Callable[[JobIdentity], Sequence[EndedJob]] | None = None,
) -> tuple[Reserve, str | None]:
    """Return the time to reserve from the end of training to the end of its target, and a warning if it is a guess.

    Evaluates the runs before the time ``before``. ``ended_jobs`` lists past trainings, newest first. It is used if
    Airflow's own history cannot be traversed: the Execution API provides no order of runs without a logical date
    (asset-triggered).
    """
    target = target_name(deadline_of)
    try:
        seen, upper = observed(identity, before, deadline_of, ask), ""
        if not seen and ended_jobs is not None:
            seen = observed_until_run_end(identity, ended_jobs(identity), ask)
            upper = "" if deadline_of == DAG_RUN else " (to the end of the run: these runs have no logical date)"
    except AirflowRuntimeError as error:
        why = "the history of earlier runs could not be read"
        return declared_reserve(downstream_reserve, deadline_of, why), f"{why} ({error}): using downstream_reserve"
    declared_s = downstream_reserve.total_seconds()
    if not seen:
        why = "no earlier run shows how long it takes"
        return declared_reserve(downstream_reserve, deadline_of, why), (
            f"{why} from the end of training to the end of {target}: using downstream_reserve"
            f" ({duration(declared_s)}) as declared"
        )
    after_s = quantile(seen, QUANTILE)
    runs = f"{len(seen)} run{'s' if len(seen) > 1 else ''}"
    if len(seen) < FEW and declared_s > after_s:
        return declared_reserve(downstream_reserve, deadline_of, f"more than the {runs} so far have shown"), None
    spread = duration(seen[0]) if len(seen) == 1 else f"{duration(min(seen))} to {duration(max(seen))}"
    said = (
        f"p{QUANTILE * 100:.0f} of the last {runs} ({spread}), from the end of training to the end of"
        f" {target}, queueing included{upper}"
    )
    margin_said = f"{MARGIN:.0%} of what comes after"
    return Reserve(after_s=after_s, said=said, margin_s=MARGIN * after_s, margin_said=margin_said), None


def observed(identity: JobIdentity, before: datetime, deadline_of: str, ask: AskAirflow) -> list[float]:
    """Return seconds from the end of training to the end of the target, in the last successful runs, newest first.

    Cleared runs and backfills are skipped: their times reflect when they were cleared, or how they were throttled.
    """
    asked = _Counted(ask)
    seen: list[float] = []
    dag_id = identity.dag_id
    for run in _runs_before(dag_id, before, asked):
        training = _last_end(dag_id, identity.task_id, identity.map_index, run.logical_date, run.run_id, asked)
        if training is not None:
            target = run.end_date if deadline_of == DAG_RUN else _target_end(dag_id, deadline_of, run, asked)
            if target is not None and target >= training:
                seen.append((target - training).total_seconds())
        if len(seen) == RUNS or asked.calls >= _MOST_CALLS:
            break
    return seen


def observed_until_run_end(identity: JobIdentity, jobs: Sequence[EndedJob], ask: AskAirflow) -> list[float]:
    """Return seconds from the end of training, by the service, to the end of the run: an upper bound for any target."""
    seen: list[float] = []
    for job in jobs[:_LOOKED_AT]:
        try:
            run = ask(GetDagRun(dag_id=identity.dag_id, run_id=job.run_id))
        except AirflowRuntimeError as error:
            log.debug("run %s is not there any more: %s", job.run_id, error)
            continue
        if _tells(run) and run.end_date is not None and run.end_date.timestamp() >= job.ended_at:
            seen.append(run.end_date.timestamp() - job.ended_at)
        if len(seen) == RUNS:
            break
    return seen


def quantile(values: Sequence[float], part: float) -> float:
    """Return the smallest value that at least the fraction ``part`` of the values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered), max(1, math.ceil(part * len(ordered) - 1e-9))) - 1]


class _Counted:
    def __init__(self, ask: AskAirflow) -> None:
        self._ask, self.calls = ask, 0

    def __call__(self, message: Any) -> Any:
        self.calls += 1
        return self._ask(message)


def _runs_before(dag_id: str, before: datetime, ask: AskAirflow) -> Iterator[Any]:
    for _ in range(_LOOKED_AT):
        run = ask(GetPreviousDagRun(dag_id=dag_id, logical_date=before, state="success")).dag_run
        if run is None:
            return
        before = run.logical_date
        if _tells(run):
            yield run


def _tells(run: Any) -> bool:
    """Whether a run is representative: not cleared, not a backfill, and successful."""
    kind = str(getattr(run.run_type, "value", run.run_type))
    state = str(getattr(run.state, "value", run.state))
    return state == "success" and kind != "backfill" and not run.clear_number


def _target_end(dag_id: str, task_id: str, run: Any, ask: AskAirflow) -> datetime | None:
    """Return when a task of a run ended; for a mapped task, when its last instance ended."""
    end = _last_end(dag_id, task_id, -1, run.logical_date, run.run_id, ask)
    if end is not None:
        return end
    crumbs = ask(GetTaskBreadcrumbs(dag_id=dag_id, run_id=run.run_id)).breadcrumbs
    indexes = [int(crumb["map_index"]) for crumb in crumbs if crumb["task_id"] == task_id and crumb["map_index"] >= 0]
    if len(indexes) > _MOST_CALLS // RUNS:
        return None if run.end_date is None else run.end_date  # not earlier than any of them
    ends = [_last_end(dag_id, task_id, index, run.logical_date, run.run_id, ask) for index in indexes]
    return max((end for end in ends if end is not None), default=None)


def _last_end(
    dag_id: str, task_id: str, map_index: int, logical_date: datetime, run_id: str, ask: AskAirflow
) -> datetime | None:
    """Return when a task instance of the run of this logical date succeeded; None if it did not."""
    just_after = logical_date + timedelta(microseconds=1)  # "previous" is strictly before
    message = GetPreviousTI(
        dag_id=dag_id, task_id=task_id, logical_date=just_after, map_index=map_index, state="success"
    )
    found = ask(message).task_instance
    return None if found is None or found.run_id != run_id else found.end_date
