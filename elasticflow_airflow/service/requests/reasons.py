"""Explains in one sentence why a job has its size, or why it waits, and until when.

Pure functions over the scheduler's plan and the rows. The event log has the reasons of past decisions; this module
explains the present, and which jobs are in the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from elasticflow_airflow.api import State
from elasticflow_airflow.scheduler_core.model.reason import Parameter, Reason
from elasticflow_airflow.scheduler_core.model.values import JobState, Phase, Reservation
from elasticflow_airflow.service.decisions.foresight import Foresight, overlaps
from elasticflow_airflow.service.store.tables import IncarnationRow
from elasticflow_airflow.times import duration, utc

_SAME_S = 1.0
"""Changes closer than this are one."""
_SOON_S = 20 * 3600.0
_VERY_SOON_S = 600.0


@dataclass(frozen=True, slots=True)
class _Case:
    """One job, and what is known about the others."""

    row: IncarnationRow
    state: JobState
    foresight: Foresight
    keys: Mapping[str, str]
    now: float

    @property
    def size(self) -> int:
        return self.state.placement.workers

    @property
    def holds(self) -> Reason:
        verb = "holds" if self.row.state == State.RUNNING else "is starting on"
        return Reason(verb + " {size:#slot}", size=self.size)

    @property
    def ahead(self) -> list[Reservation]:
        planned = self.foresight.planned.get(self.row.job_id, ())
        return sorted((one for one in planned if one.end_s > self.now), key=lambda one: one.start_s)


def why(row: IncarnationRow, foresight: Foresight | None, keys: Mapping[str, str], now: float) -> Reason:
    """Return the reason. ``keys`` are the recurring keys of the live jobs, by id; times in the sentence are UTC."""
    if row.terminal or row.ending:
        return row.state_reason
    if not row.introduced:
        return Reason("was just submitted: the scheduler has not decided yet")
    state = None if foresight is None else foresight.states.get(row.job_id)
    if foresight is None or state is None:
        return row.state_reason
    if state.phase is Phase.PARKED:
        ends_at = None if row.lease_expires_at is None else row.lease_expires_at + row.orphan_s
        until = "" if ends_at is None else f", and is cancelled at {clock(ends_at, now)}"
        return Reason("its owner in Airflow is silent: it holds no slots until one is back{until}", until=until)
    waits = state.phase is Phase.PROFILING and (state.profile_until_s is None or not state.placement.workers)
    if state.phase is Phase.WAITING or waits:
        return row.state_reason
    if state.phase is Phase.PROFILING:
        limit = state.profile_until_s
        until = "" if limit is None else f" until {clock(limit, now)} at the latest"
        kind = "measures its speed with {workers:#worker}{until}; then its deadline is decided on"
        return Reason(kind, workers=state.placement.workers, until=until)
    case = _Case(row, state, foresight, keys, now)
    return _of_holder(case) if case.size else _of_waiter(case)


def clock(at_s: float, now: float) -> str:
    """Format a time (UTC seconds) for people: only the time of day if it is near, otherwise with the date."""
    if not math.isfinite(at_s):
        return "an unknown time"
    form = "%H:%M UTC" if abs(at_s - now) < _SOON_S else "%Y-%m-%d %H:%M UTC"
    if abs(at_s - now) < _VERY_SOON_S:
        form = "%H:%M:%S UTC"
    return utc(at_s).strftime(form)


def _of_holder(case: _Case) -> Reason:
    size, now, ahead = case.size, case.now, case.ahead
    current = [one for one in ahead if one.start_s <= now + _SAME_S]
    if not current:
        return _because(_limit(case, math.inf), "{holds}, longer than was planned", holds=case.holds)
    end = current[-1].end_s
    for one in ahead[len(current) :]:
        if one.start_s > end + _SAME_S:
            gap = _others(case, end, one.start_s, "them")
            kind = "{holds} until {until}, then none until {then}"
            return _because(gap, kind, holds=case.holds, until=clock(end, now), then=clock(one.start_s, now))
        if one.placement.workers != size:
            after = one.placement.workers
            reason = _limit(case, one.start_s) if after > size else _others(case, one.start_s, one.end_s, "them")
            kind = "{holds} until {until}, then {after}"
            return _because(reason, kind, holds=case.holds, until=clock(one.start_s, now), after=after)
        end = one.end_s
    until = f" until its end at {clock(end, now)}" if end < math.inf else ""
    spare = _deadline(case.row, end)
    return _because(_limit(case, end), "{holds}{until}{spare}", holds=case.holds, until=until, spare=spare)


def _of_waiter(case: _Case) -> Reason:
    if case.ahead:
        first = case.ahead[0]
        reason = _others(case, case.now, first.start_s, "them until then")
        if not reason and not case.row.best_effort:
            reason = Reason("its deadline leaves time for that")
        kind = "waits until {until}, then it gets {slots:#slot}"
        return _because(reason, kind, until=clock(first.start_s, case.now), slots=first.placement.workers)
    if case.state.best_effort and case.row.state == State.WAITING:
        return case.row.state_reason  # No free block of the cluster is large enough.
    waits = "waits for slots that no promise needs" if case.state.best_effort else "waits, and no slots are free for it"
    return _because(_others(case, case.now, math.inf, "all"), waits)


def _deadline(row: IncarnationRow, end: float) -> str:
    if row.deadline_at is None or end == math.inf:
        return ""
    slack = row.deadline_at - end
    side = "after" if slack < 0 else "before"
    return f", {duration(abs(slack))} {side} its deadline"


def _because(reason: Reason | None, kind: str, **parameters: Parameter) -> Reason:
    """Return a sentence, and the reason for it if there is one."""
    if reason is None:
        return Reason(kind, **parameters)
    return Reason(kind + ": {because}", **parameters, because=reason)


def _limit(case: _Case, until: float) -> Reason | None:
    """Return why the job does not get more slots until ``until``; None if there is no reason."""
    size, state, foresight = case.size, case.state, case.foresight
    if size >= foresight.slots:
        return Reason("no more exist")
    most = state.job.max_workers
    if most is not None and size >= most:
        if case.row.submission.max_workers == most:
            return Reason("max_workers={most}", most=most)
        return Reason("each step is cut into {most}, so more workers would have nothing to do", most=most)
    curve = state.job.curve
    if curve is not None:
        larger = [n for n in curve.usable(state.job.min_workers, most or foresight.slots) if n > size]
        if not larger and any(n > size for n in curve.steps_per_s):
            return Reason("with more it would not be faster")
    free = foresight.slots - sum(foresight.holds(job_id) for job_id in foresight.states)
    if free < size:
        return _others(case, case.now, until, "the others" + (" until then" if until < math.inf else ""))
    kept = _expected(case, case.now, until)
    if kept:
        return Reason("the others are kept free for {runs}", runs=kept)
    if curve is None:
        return Reason("its speed with more is not known")
    if not state.started:
        return Reason("its last start or change is not done yet")
    grows_from_s = state.no_progress_until_s + state.job.costs.repaid_after_s
    if case.now < grows_from_s:
        kind = "it has to make up for the pause of its last change first, until {grows_from}"
        return Reason(kind, grows_from=clock(grows_from_s, case.now))
    return Reason("a change would cost it more than it gains") if size in curve.steps_per_s else None


def _others(case: _Case, from_s: float, until_s: float, what: str) -> Reason | None:
    """Name the jobs that hold slots between two times, the largest first, then the runs for which slots are kept."""
    foresight = case.foresight
    holding = {
        job_id: foresight.between(job_id, from_s, until_s) or (from_s <= case.now and foresight.holds(job_id))
        for job_id in foresight.states
        if job_id != case.row.job_id
    }
    found = sorted((job_id for job_id, held in holding.items() if held), key=lambda job_id: (-holding[job_id], job_id))
    said = [
        Reason("{task:task}", task=key) if known else Reason("{job:job}", job=key)
        for key, known in dict.fromkeys((case.keys.get(job_id, job_id), job_id in case.keys) for job_id in found)
    ]
    runs = _expected(case, from_s, until_s)
    if not said and not runs:
        return None
    promised = runs or not any(foresight.states[job_id].best_effort for job_id in found)
    one = len(said) + len(runs) == 1
    verb = ("needs" if one else "need") if promised else ("has" if one else "have")
    return Reason(f"{{others}} {verb} {what}", others=[*said, *runs])


def _expected(case: _Case, from_s: float, until_s: float) -> list[Reason]:
    """Return the runs for which slots are kept between two times."""
    return [
        Reason("the run of {task:task} that is due {due}", task=run.task, due=clock(run.due_s, case.now))
        for run, slots in case.foresight.expected
        if any(overlaps(one, from_s, until_s) for one in slots)
    ]
