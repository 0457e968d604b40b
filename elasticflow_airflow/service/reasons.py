"""One sentence about a job: why it has the size that it has, or why it waits, and until when.

Pure functions over the scheduler's plan and the rows. What a decision was made for, the event log says; this says what
holds now, and who is in the way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime

from elasticflow_airflow.scheduler_core.explain import duration, workers
from elasticflow_airflow.scheduler_core.values import JobState, Phase, Reservation
from elasticflow_airflow.service.foresight import Foresight
from elasticflow_airflow.service.models import IncarnationRow

_SAME_S = 1.0
"""Changes closer than this are one."""
_NAMED = 2
_SOON_S = 20 * 3600.0


def why(row: IncarnationRow, foresight: Foresight | None, names: Mapping[str, str], now: float) -> str:
    """The sentence. ``names`` are those of the live jobs, by id; times in it are UTC."""
    if row.terminal or row.ending:
        return row.state_reason
    if not row.introduced:
        return "was just submitted: the scheduler has not decided yet"
    state = None if foresight is None else foresight.states.get(row.job_id)
    if foresight is None or state is None:
        return row.state_reason
    if state.phase is Phase.PARKED:
        until = "" if row.lease_expires_at is None else f", and is cancelled at {clock(row.lease_expires_at, now)}"
        return f"its owner in Airflow is not heard of: it holds nothing until one is back{until}"
    if state.phase is Phase.WAITING or (state.phase is Phase.PROFILING and not state.placement.workers):
        return row.state_reason
    if state.phase is Phase.PROFILING:
        limit = state.profile_until_s
        until = "" if limit is None else f" until {clock(limit, now)} at the latest"
        return f"measures its speed with {workers(state.placement.workers)}{until}; then its deadline is decided on"
    return _of_admitted(row, state, foresight, names, now)


def clock(at_s: float, now: float) -> str:
    """A time as people say it: the time of day if it is near, else with the date. UTC."""
    if not math.isfinite(at_s):
        return "an unknown time"
    form = "%H:%M UTC" if abs(at_s - now) < _SOON_S else "%Y-%m-%d %H:%M UTC"
    if abs(at_s - now) < 600.0:
        form = "%H:%M:%S UTC"
    return datetime.fromtimestamp(at_s, UTC).strftime(form)


def _of_admitted(
    row: IncarnationRow, state: JobState, foresight: Foresight, names: Mapping[str, str], now: float
) -> str:
    size = state.placement.workers
    ahead = [one for one in foresight.planned.get(row.job_id, ()) if one.end_s > now]
    if size == 0:
        return _of_waiting(row, state, ahead, foresight, names, now)
    change = next((one for one in ahead if one.start_s > now + _SAME_S and one.placement.workers != size), None)
    current = [one for one in ahead if one.start_s <= now + _SAME_S]
    gap = _gap(ahead, now)
    if gap is not None:
        then = f"then none until {clock(gap[1], now)}"
        return f"holds {_slots(size)} until {clock(gap[0], now)}, {then}{_others(row, foresight, names, *gap)}"
    if change is not None:
        at, after = change.start_s, change.placement.workers
        because = (
            _limit(row, state, size, foresight, names, now, at)
            if after > size
            else _others(row, foresight, names, at, change.end_s)
        )
        return f"holds {_slots(size)} until {clock(at, now)}, then {after}{because}"
    end = max((one.end_s for one in ahead), default=math.inf)
    until = f" until its end at {clock(end, now)}" if end < math.inf else ""
    if not current:
        until = ", longer than was planned"
    return f"holds {_slots(size)}{until}{_deadline(row, end)}{_limit(row, state, size, foresight, names, now, end)}"


def _of_waiting(
    row: IncarnationRow,
    state: JobState,
    ahead: list[Reservation],
    foresight: Foresight,
    names: Mapping[str, str],
    now: float,
) -> str:
    start = min((one.start_s for one in ahead), default=math.inf)
    if start < math.inf:
        first = min(ahead, key=lambda one: one.start_s)
        more = _others(row, foresight, names, now, start)
        early = "" if more or row.best_effort else ": its deadline leaves time for that"
        return f"waits until {clock(start, now)}, then it gets {_slots(first.placement.workers)}{more}{early}"
    if state.best_effort:
        return f"waits for slots that no promise needs{_others(row, foresight, names, now, math.inf)}"
    return f"waits, and no slots can be had for it{_others(row, foresight, names, now, math.inf)}"


def _gap(ahead: list[Reservation], now: float) -> tuple[float, float] | None:
    """From when until when the plan leaves a job that holds slots without any."""
    end = max((one.end_s for one in ahead if one.start_s <= now + _SAME_S), default=None)
    for one in sorted(ahead, key=lambda one: one.start_s):
        if end is None or one.start_s <= now + _SAME_S:
            continue
        if one.start_s > end + _SAME_S:
            return end, one.start_s
        end = max(end, one.end_s)
    return None


def _deadline(row: IncarnationRow, end: float) -> str:
    if row.deadline_at is None or end == math.inf:
        return ""
    slack = row.deadline_at - end
    if slack < 0:
        return f", {duration(-slack)} after its deadline"
    return f", {duration(slack)} before its deadline"


def _limit(
    row: IncarnationRow,
    state: JobState,
    size: int,
    foresight: Foresight,
    names: Mapping[str, str],
    now: float,
    until: float,
) -> str:
    """Why not more."""
    most = state.job.max_workers
    if most is not None and size >= most:
        return f": max_workers={most}"
    curve = state.job.curve
    if curve is not None:
        larger = [n for n in curve.usable(state.job.min_workers, most or foresight.slots) if n > size]
        if not larger and any(n > size for n in curve.steps_per_s):
            return ": with more it would not be faster"
    elif state.best_effort:
        return ": its speed with more is not known"
    free = foresight.slots - sum(foresight.holds(job_id) for job_id in foresight.states)
    if free >= size:
        if any(_room_before(foresight, until)):
            return ": the others are kept free for runs that are expected"
        return ": a change would cost it more than it gains" if curve is not None and size in curve.steps_per_s else ""
    if free + size >= foresight.slots:
        return ": more there are not"
    return _others(row, foresight, names, now, until, so="until then" if until < math.inf else "")


def _room_before(foresight: Foresight, until: float) -> list[str]:
    return [run.run_id for run, slots in foresight.expected if any(one.start_s < until for one in slots)]


def _others(
    row: IncarnationRow, foresight: Foresight, names: Mapping[str, str], from_s: float, until_s: float, *, so: str = ""
) -> str:
    """Who holds the other slots between two times, largest first."""
    holding = {
        job_id: max(foresight.between(job_id, from_s, until_s), foresight.holds(job_id) if so else 0)
        for job_id in foresight.states
        if job_id != row.job_id
    }
    found = sorted((job_id for job_id, held in holding.items() if held), key=lambda job_id: (-holding[job_id], job_id))
    if not found:
        return ""
    said = list(dict.fromkeys(names.get(job_id, job_id) for job_id in found))
    named = said[:_NAMED]
    rest = len(said) - len(named)
    who = " and ".join(named) if not rest else f"{', '.join(named)} and {rest} more"
    needs = "needs" if len(said) == 1 else "need"
    return f", as {who} {needs} {'the others' if so else 'them'}{f' {so}' if so else ''}"


def _slots(count: int) -> str:
    return "1 slot" if count == 1 else f"{count} slots"
