"""Formats jobs, events and slots for a terminal."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import datetime
from itertools import groupby

from rich.console import Console
from rich.text import Text

from elasticflow_airflow.api import Event, Health, JobStatus, LeaderStatus, ReplicaStatus, SlotStatus, State
from elasticflow_airflow.api.submission import name_of
from elasticflow_airflow.cli.terminal.lines import say
from elasticflow_airflow.cli.terminal.tables import Column, print_table
from elasticflow_airflow.client.attention import doubt_of
from elasticflow_airflow.times import duration, local_moment, short_moment

_JOBS = (
    Column("job", key=True),
    Column("state"),
    *(Column(name, number=True) for name in ("workers", "step", "steps/s", "loss")),
    Column("deadline"),
    Column("projected"),
    Column("slack", number=True),
)
_JOBS_ON_A_TERMINAL = (
    Column("job", key=True),
    Column("task"),
    Column("state"),
    Column("done", number=True),
    Column("deadline"),
    Column("slack", number=True),
    Column("workers", number=True),
    Column("finish"),
)
_HASH, _SHORTEST_ID = 16, 6
_WIDE = 110
_WITHOUT_ROOM = 2
"""So many of the last columns are left out on a terminal that is not wide."""
_TASK_CHARACTERS, _TASK_CHARACTERS_NARROW = 40, 24
_CHANGES = {"start": "as the first", "hand-over": "by a hand-over", "fail-over": "by a fail-over"}
_STYLES = {"succeeded": "green", "failed": "red", "rejected": "red", "cancelled": "yellow", "running": "cyan"}


def print_jobs(jobs: Sequence[JobStatus]) -> None:
    """Print a table with one row per job: on a terminal with short ids and times, else with whole ones."""
    if not sys.stdout.isatty():
        print_table(_JOBS, [_job_row(job) for job in jobs])
        return
    now = time.time()
    ids = [job.job_id for job in jobs]
    shown = len(_JOBS_ON_A_TERMINAL) - (0 if _is_wide() else _WITHOUT_ROOM)
    print_table(_JOBS_ON_A_TERMINAL[:shown], [_short_row(job, ids, now)[:shown] for job in jobs])
    say(f"times in {datetime.now().astimezone():%Z}")


def short_id(job_id: str, others: Collection[str]) -> str:
    """Return the end of an id that no other job in the list has; every command accepts it. Whole if not a terminal."""
    if not sys.stdout.isatty():
        return job_id
    length = _SHORTEST_ID
    while length < _HASH and sum(other.endswith(job_id[-length:]) for other in others) > 1:
        length += 1
    return job_id[-length:]


def task_of(job: JobStatus) -> str:
    """Return the job's task as dag.task[index], its middle left out on a terminal if it is long."""
    name = name_of(job.identity.recurring_key)
    most = _TASK_CHARACTERS if _is_wide() else _TASK_CHARACTERS_NARROW
    if len(name) <= most or not sys.stdout.isatty():
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}…{name[-end:]}"


def _is_wide() -> bool:
    return Console().width >= _WIDE


def _short_row(job: JobStatus, ids: Collection[str], now: float) -> tuple[str | Text, ...]:
    done = "-" if not job.total_steps else f"{min(1.0, job.step / job.total_steps):.0%}"
    finish = job.result.finished_at if job.result else job.projected_finish_at
    return (
        short_id(job.job_id, ids),
        task_of(job),
        _state(job),
        done,
        "best effort" if job.best_effort else short_moment(job.deadline_at, now),
        _slack(job),
        str(job.workers) if not job.state.terminal else "-",
        short_moment(finish, now),
    )


def _state(job: JobStatus) -> Text:
    doubt = doubt_of(job)
    if doubt is None:
        return Text(str(job.state), style=_STYLES.get(str(job.state), "default"))
    return Text(f"{job.state}, {doubt.replace('_', ' ')}", style="red")


def _slack(job: JobStatus) -> str:
    """Return the slack of a job that has one: one that failed, was rejected or cancelled has none."""
    if job.state.terminal and job.state is not State.SUCCEEDED:
        return "-"
    slack_s = job.result.slack_s if job.result and job.result.slack_s is not None else job.slack_s
    return "-" if slack_s is None else duration(slack_s)


def _job_row(job: JobStatus) -> tuple[str | Text, ...]:
    total = "" if job.total_steps is None else f"/{job.total_steps}"
    return (
        job.job_id,
        _state(job),
        str(job.workers),
        f"{job.step}{total}",
        _number(job.steps_per_s),
        _number(job.loss),
        "best effort" if job.best_effort else local_moment(job.deadline_at),
        local_moment(job.result.finished_at if job.result else job.projected_finish_at),
        _slack(job),
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
    """Return lines on the health of the service, and on each node with the holders of its slots."""
    lines = [
        (
            f"{health.status}: elasticflow {health.version}, engine {health.engine}, process {health.pid}, "
            f"since {local_moment(health.started_at)}, {health.live_jobs} live jobs"
        ),
        f"state directory {health.state_dir}",
        *([] if health.leadership is None else leadership_lines(health.role, health.leadership)),
        *(f"problem: {problem}" for problem in health.problems),
    ]
    for _, slots in groupby(health.slots, lambda slot: slot.node_id):
        lines += _node_lines(list(slots))
    return lines


def _node_lines(slots: Sequence[SlotStatus]) -> list[str]:
    """Return one line for a node with the holders of its slots, and one for each slot that is avoided."""
    node = slots[0].node_id
    holders = Counter(slot.job_id or f"busy: {slot.busy}" for slot in slots if slot.job_id or slot.busy)
    held = sum(holders.values())
    ids = [slot.job_id for slot in slots if slot.job_id]
    named = ", ".join(
        f"{short_id(holder, ids) if holder in ids else holder} ({count})" for holder, count in holders.items()
    )
    until = [slot.draining_until for slot in slots if slot.draining_until is not None]
    leaves = f"; the node goes away at {local_moment(min(until))}" if until else ""
    lines = [f"  {node}  {held} of {len(slots)} slots in use{': ' if named else ''}{named}{leaves}"]
    for slot in slots:
        if slot.avoided_until is not None:
            why = "a device failed" if slot.avoided_for == "device" else "a worker was slow"
            lines.append(f"    {slot.node_id}:{slot.index} avoided until {local_moment(slot.avoided_until)}: {why}")
    return lines


def leadership_lines(role: str | None, leadership: LeaderStatus) -> list[str]:
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
