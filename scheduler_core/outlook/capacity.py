"""Which nodes are not needed within a horizon, and how many more are wanted: input for cluster autoscaling.

Nothing is estimated, everything is tried on copies of a scheduler: nodes are drained, removed or added there, and the
outcome of every job is checked. Only reports; never changes a cluster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from elasticflow_airflow.scheduler_core.jobs.live_job import LiveJob
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.model.decisions import Reject
from elasticflow_airflow.scheduler_core.model.reason import Reason
from elasticflow_airflow.scheduler_core.model.values import Job, OnReject, Phase
from elasticflow_airflow.scheduler_core.model.work import INFINITY
from elasticflow_airflow.scheduler_core.outlook.forecast import (
    MOST_NODES,
    Outcome,
    commonest,
    fewest,
    join,
    missed_runs,
    outlook_of,
)
from elasticflow_airflow.scheduler_core.outlook.node_release import Releasing, UnneededNode, stands
from elasticflow_airflow.scheduler_core.scheduler import Scheduler


class Need(StrEnum):
    """Why a job or an expected run wants capacity."""

    AT_RISK = "at_risk"
    """Promised, but no longer on course."""
    MISSED = "missed"
    """An expected run that would be rejected in the current state."""
    WAITING = "waiting"
    """Waits for capacity, as its submitter requested."""
    UNMEASURED = "unmeasured"
    """Waits for slots on which its speed can be measured."""
    BEST_EFFORT = "best_effort"
    """Best effort, and holds no slots."""
    REJECTED = "rejected"
    """Was rejected and would be rejected again, although its deadline is still ahead."""


_PHRASES = {
    Need.AT_RISK: ("promise at risk", "promises at risk"),
    Need.MISSED: ("expected run that would be missed", "expected runs that would be missed"),
    Need.WAITING: ("job that waits", "jobs that wait"),
    Need.UNMEASURED: ("job that cannot be measured", "jobs that cannot be measured"),
    Need.BEST_EFFORT: ("best-effort job without slots", "best-effort jobs without slots"),
    Need.REJECTED: ("rejected job", "rejected jobs"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """A job (``job_id``) or an expected run (``run_id``) that wants capacity.

    ``deadline_s`` (UTC seconds) is None if there is no deadline to keep.
    """

    need: Need
    deadline_s: float | None
    reason: Reason
    job_id: str = ""
    run_id: str = ""
    task: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedNodes:
    """The nodes that would satisfy all of ``by`` (soonest deadline first): ``nodes`` of ``slots_per_node`` slots each.

    ``nodes`` is None if no number that was tried would satisfy all of them; ``reason`` says why.
    """

    by: tuple[Want, ...]
    nodes: int | None
    slots_per_node: int
    gpu_type: str
    reason: Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityOutlook:
    """The nodes that can be removed, or the nodes that are wanted: never both.

    ``releasable`` nodes can be removed all together, if they are drained and removed in this order. ``hopeless`` wants
    cannot be satisfied by any number of additional nodes that was tried. ``reason`` summarizes it in one sentence.
    """

    releasable: tuple[UnneededNode, ...]
    wanted: WantedNodes | None
    hopeless: tuple[Want, ...]
    reason: Reason


def capacity(scheduler: Scheduler, now: float, until_s: float, wanting: Iterable[Job] = ()) -> CapacityOutlook:
    """Return which nodes are not needed until ``until_s``, or which are missing. Changes ``scheduler``: pass a copy.

    All live jobs count, whatever their deadlines, and the runs expected by ``until_s``. ``wanting`` are recently
    rejected jobs: those whose deadline is ahead are submitted again (best-effort jobs and live ids are left out). A job
    that then fits keeps its place, so that nodes added for it are not released before it is resubmitted.

    Nodes may be released if every promise and every expected run that is kept now is still kept, and every job that has
    a worker still has one; best-effort jobs and promises with time to spare may become slower. A node that is draining
    already, or on which others hold slots, is neither released nor replaced. One node stays while any job is live.

    Cost: a copy of the scheduler and a plan of the expected runs for each number tried. For additional nodes, about
    twice the logarithm of the number wanted is tried, each with a submission of all of ``wanting``; for releasable
    nodes, the same for each shape of node. In addition, two events for each node tried.
    """
    standing = Counter(slot.node_id for state in scheduler.states() for slot in state.placement.slots)
    scheduler.handle(ev.WakeUp(), now)
    live = {state.job.job_id for state in scheduler.states()}
    ahead = _asking((job for job in wanting if job.job_id not in live), now)
    too_late = {job.job_id: reason for job in ahead if (reason := _too_late(job, now))}
    asking = [job for job in ahead if job.job_id not in too_late]
    tried = scheduler.twin()
    wanted, out = _request(scheduler, _wants(tried, asking, now, until_s), asking, now, until_s)
    hopeless = _in_order([*out, *(_rejected(job, too_late[job.job_id]) for job in ahead if job.job_id in too_late)])
    if wanted is not None:
        return CapacityOutlook(
            releasable=(), wanted=wanted, hopeless=hopeless, reason=_sentence(wanted.reason, hopeless)
        )
    released = Releasing(tried, now, until_s).search(standing)
    if not released:
        idle = "no node can go, and nobody wants more" if scheduler.nodes() else "there is no node, and no want"
        return CapacityOutlook(releasable=(), wanted=None, hopeless=hopeless, reason=_sentence(Reason(idle), hopeless))
    slots, count = sum(node.slots for node in released), len(released)
    said = Reason(
        "{count} of {nodes} nodes ({slots} slots) not needed until {until:moment}",
        count=count,
        nodes=len(scheduler.nodes()),
        slots=slots,
        until=until_s,
    )
    return CapacityOutlook(releasable=tuple(released), wanted=None, hopeless=hopeless, reason=_sentence(said, hopeless))


def _sentence(said: Reason, hopeless: Sequence[Want]) -> Reason:
    if not hopeless:
        return said
    return Reason("{said}; no further node would help {wants}", said=said, wants=_counted(hopeless))


def _counted(wants: Iterable[Want]) -> str:
    counts = Counter(want.need for want in wants)
    return ", ".join(f"{counts[need]} {_PHRASES[need][counts[need] > 1]}" for need in Need if counts[need])


def _asking(rejected: Iterable[Job], now: float) -> list[Job]:
    """Return rejected jobs as they would be resubmitted: with their own deadline, and in place of no expected run."""
    known = {job.job_id: job for job in rejected}
    ahead = [job for job in known.values() if job.deadline_s is not None and job.deadline_s > now]
    ahead.sort(key=lambda job: (job.deadline_s or INFINITY, job.job_id))
    return [replace(job, on_reject=OnReject.FAIL, task="") for job in ahead]


def _too_late(job: Job, now: float) -> Reason | None:
    """Return why no cluster can be large enough for a resubmitted job; None if one may be."""
    if job.curve is None or job.partial or job.total_steps is None or job.deadline_s is None:
        return None
    usable = job.curve.usable(job.min_workers, job.max_workers or max(job.curve.steps_per_s))
    if not usable:
        kind = "its speed is not known for any number of workers that it may have, from {least} on"
        return Reason(kind, least=job.min_workers)
    size, speed = max(usable.items())
    need_s, left_s = job.costs.startup_s + job.total_steps / speed + job.costs.tail_s, job.deadline_s - now
    if need_s <= left_s:
        return None
    return Reason(
        "hopeless whatever the cluster: {size:#worker}, its fastest size, need {need:duration}, and {left:duration} "
        "are left",
        size=size,
        need=need_s,
        left=left_s,
    )


def _rejected(job: Job, reason: Reason) -> Want:
    return Want(need=Need.REJECTED, deadline_s=job.deadline_s, reason=reason, job_id=job.job_id)


# -- wants ----------------------------------------------------------------------------------------------------------


def _wants(scheduler: Scheduler, asking: Sequence[Job], now: float, until_s: float) -> dict[str, Want]:
    """Return all wants, by unique names. Submits the jobs in ``asking`` and changes nothing else."""
    found: dict[str, Want] = {}
    for job in asking:
        for decision in scheduler.handle(ev.JobSubmitted(job), now):
            if isinstance(decision, Reject) and decision.job_id == job.job_id:
                found[f"job {job.job_id}"] = _rejected(job, decision.reason)
    _, jobs, _ = scheduler.open_books(now)
    for live in jobs:
        told = _need_of(live, now)
        if told is not None:
            need, reason = told
            deadline = None if live.best_effort else live.job.deadline_s
            found[f"job {live.job_id}"] = Want(
                need=need, deadline_s=deadline, reason=reason, job_id=live.job_id, task=live.job.task
            )
    for run in missed_runs(scheduler, now, until_s):
        found[f"run {run.run_id}"] = Want(
            need=Need.MISSED, deadline_s=run.deadline_s, reason=run.reason, run_id=run.run_id, task=run.task
        )
    return found


def _need_of(job: LiveJob, now: float) -> tuple[Need, Reason] | None:
    """Return why a live job wants capacity, with its reason; None if it has what it needs."""
    if job.promised:
        outlook = outlook_of(job)
        return (Need.AT_RISK, outlook.reason) if outlook.outcome is Outcome.AT_RISK else None
    if job.phase is Phase.WAITING:
        return Need.WAITING, Reason("waits for capacity: its deadline cannot be promised yet")
    if job.phase is Phase.PROFILING and job.profiling is None:
        return Need.UNMEASURED, Reason("waits for slots to measure its speed on")
    if stands(job, now):
        return None
    if job.competes:
        kind = "best effort, and there are no slots for its first {least:#worker}"
        return Need.BEST_EFFORT, Reason(kind, least=job.least_workers)
    return None


def _request(
    scheduler: Scheduler, wants: Mapping[str, Want], asking: Sequence[Job], now: float, until_s: float
) -> tuple[WantedNodes | None, tuple[Want, ...]]:
    """Return the nodes that would satisfy all wants but the hopeless ones, and the hopeless wants."""
    shape = commonest(scheduler.nodes())
    if not wants:
        return None, ()
    if shape is None:
        kind = "wanted by {wants}, but there is no node to size further ones by: add one"
        reason = Reason(kind, wants=_counted(wants.values()))
        return WantedNodes(by=_in_order(wants.values()), nodes=None, slots_per_node=0, gpu_type="", reason=reason), ()
    grown: dict[int, Scheduler] = {0: scheduler}
    unmet: dict[int, Collection[str]] = {}

    def left(count: int) -> Collection[str]:
        if count not in unmet:
            nearest = max(number for number in grown if number <= count)
            twin = grown[count] = grown[nearest].twin()
            join(twin, shape, range(nearest, count), now)
            unmet[count] = _wants(twin.twin(), asking, now, until_s).keys()
        return unmet[count]

    nodes = fewest(lambda count: not left(count), MOST_NODES)
    hopeless: set[str] = set()
    if nodes is None:
        hopeless = set(wants).intersection(*unmet.values())
        if hopeless and hopeless != set(wants):
            nodes = fewest(lambda count: hopeless.issuperset(left(count)), MOST_NODES)
    out = _in_order(want for name, want in wants.items() if name in hopeless)
    by = _in_order(want for name, want in wants.items() if name not in hopeless)
    if not by:
        return None, out
    if nodes is None:
        kind = "no number of further nodes of {slots} slots up to {most} would be enough for {wants}"
    else:
        kind = "{nodes:#more node} of {slots} slots would be enough for {wants}"
    reason = Reason(kind, nodes=nodes or 0, slots=shape.slots, most=MOST_NODES, wants=_counted(by))
    return WantedNodes(by=by, nodes=nodes, slots_per_node=shape.slots, gpu_type=shape.gpu_type, reason=reason), out


def _in_order(wants: Iterable[Want]) -> tuple[Want, ...]:
    def key(want: Want) -> tuple[float, str, str]:
        return (INFINITY if want.deadline_s is None else want.deadline_s, want.job_id, want.run_id)

    return tuple(sorted(wants, key=key))
