"""Formats jobs, events and slots for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from elasticflow_airflow.api import Event, Health, JobStatus, LeaderStatus, ReplicaStatus
from elasticflow_airflow.cli.terminal.tables import Column, print_table
from elasticflow_airflow.times import duration, local_moment

_JOBS = (
    Column("job", key=True),
    Column("state"),
    *(Column(name, number=True) for name in ("workers", "step", "steps/s", "loss")),
    Column("deadline"),
    Column("projected"),
    Column("slack", number=True),
)
_CHANGES = {"start": "as the first", "hand-over": "by a hand-over", "fail-over": "by a fail-over"}
_STYLES = {"succeeded": "green", "failed": "red", "rejected": "red", "cancelled": "yellow", "running": "cyan"}


def print_jobs(jobs: Sequence[JobStatus]) -> None:
    """Print a table with one row per job."""
    print_table(_JOBS, [_job_row(job) for job in jobs])


def _job_row(job: JobStatus) -> tuple[str | Text, ...]:
    total = "" if job.total_steps is None else f"/{job.total_steps}"
    state = f"{job.state}, at risk" if job.at_risk else str(job.state)
    return (
        job.job_id,
        Text(state, style=_STYLES.get(str(job.state), "default")),
        str(job.workers),
        f"{job.step}{total}",
        _number(job.steps_per_s),
        _number(job.loss),
        "best effort" if job.best_effort else local_moment(job.deadline_at),
        local_moment(job.result.finished_at if job.result else job.projected_finish_at),
        "-" if job.slack_s is None else duration(job.slack_s),
    )


def job_lines(job: JobStatus) -> list[str]:
    """Return the details of one job, one fact per line."""
    identity = job.identity
    lines = [
        f"job         {job.job_id} (incarnation {job.incarnation}, generation {job.generation})",
        f"task        {identity.namespace}: {identity.dag_id}.{identity.task_id}, run {identity.run_id}",
        f"state       {job.state}{': ' + job.state_reason if job.state_reason else ''}",
        f"verdict     {job.verdict.decision}{': ' + job.verdict.reason if job.verdict.reason else ''}",
        f"deadline    {'best effort' if job.best_effort else local_moment(job.deadline_at)}",
        f"projected   {local_moment(job.projected_finish_at)}",
        (
            f"progress    step {job.step} of {job.total_steps or '?'}, loss {_number(job.loss)}, "
            f"{_number(job.steps_per_s)} steps/s on {job.workers} workers"
        ),
        f"shares      {_shares(job)}",
        f"seed        {'not known yet' if job.seed is None else job.seed}",
        *([] if job.target_loss is None else [f"target      {_target(job, job.target_loss)}"]),
        f"slots       {', '.join(f'{node}:{index}' for node, index in job.slots) or '-'}",
        f"logs        {', '.join(job.log_names) or '-'}",
    ]
    if job.result:
        lines.append(f"checkpoint  {job.result.checkpoint_path or '-'}")
    if job.failure:
        lines.append(f"failure     {job.failure}")
    return lines


def _shares(job: JobStatus) -> str:
    """Return the number of shares per batch, which together with code and seed determines the weights."""
    if job.logical_workers is None:
        return f"one for each worker (consistency {job.consistency})"
    return f"{job.logical_workers} logical workers"


def _target(job: JobStatus, loss: float) -> str:
    """Return a job's progress towards its target loss."""
    now = f"loss {loss:g}, smoothed loss {_number(job.smoothed_loss)}"
    if job.target_reached is not None:
        return f"{now}: {'reached' if job.target_reached else 'not reached'}"
    if job.expected_steps is None:
        return f"{now}: not foreseeable yet, at most {job.total_steps or '?'} steps"
    return (
        f"{now}: expected at step {job.expected_steps}, with its error {job.expected_steps_at_most},"
        f" at most {job.total_steps or '?'}"
    )


def event_line(event: Event) -> str:
    """Format one event: id, time, kind, reason."""
    return f"#{event.event_id:<6} {local_moment(event.at)}  {event.kind:<16} {event.reason}"


def health_lines(health: Health) -> list[str]:
    """Return lines on the health of the service and the holder of each slot."""
    lines = [
        (
            f"{health.status}: elasticflow {health.version}, engine {health.engine}, process {health.pid}, "
            f"since {local_moment(health.started_at)}, {health.live_jobs} live jobs"
        ),
        f"state directory {health.state_dir}",
        *([] if health.leadership is None else _leadership_lines(health.role, health.leadership)),
        *(f"problem: {problem}" for problem in health.problems),
    ]
    for slot in health.slots:
        holder = slot.job_id or (f"busy: {slot.busy}" if slot.busy else "free")
        leaves = "" if slot.draining_until is None else f"; the node goes away at {local_moment(slot.draining_until)}"
        avoided = ""
        if slot.avoided_until is not None:
            why = "a device failed" if slot.avoided_for == "device" else "a worker was slow"
            avoided = f"; avoided until {local_moment(slot.avoided_until)}: {why}"
        lines.append(f"  {slot.node_id}:{slot.index}  {holder}{leaves}{avoided}")
    return lines


def _leadership_lines(role: str | None, leadership: LeaderStatus) -> list[str]:
    """Return which part the service has that answered, who decides, and one line for each replica."""
    leader = f"the leader of epoch {leadership.epoch}"
    since = f"since {local_moment(leadership.elected_at)}, {_CHANGES.get(leadership.change or '', leadership.change)}"
    if role == "leader":
        decides = f"{leader}, {since}"
    elif leadership.leader is None:
        decides = f"{role}; no replica decides at this moment (epoch {leadership.epoch})"
    else:
        decides = f"{role}; {leader} is {leadership.leader}, {since}"
    failed_over = leadership.failed_over_at
    last = "no fail-over so far" if failed_over is None else f"last fail-over {local_moment(failed_over)}"
    return [f"role {decides}; {last}", *(_replica_line(replica) for replica in leadership.replicas)]


def _replica_line(replica: ReplicaStatus) -> str:
    where = f" on {replica.host}" if replica.host else ""
    reached = f" at {replica.url}" if replica.url else ""
    silent = f"; not heard of for {duration(replica.silent_s)}" if replica.is_gone else ""
    version = f", elasticflow {replica.version}" if replica.version else ""
    return f"  replica {replica.replica_id}{where}{reached}{version}: {replica.role}{silent}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
