"""Derives a gang's state from what supervisors wrote and workers reported. Pure except for reading logs.

Rules: a lost supervisor explains every failure of its peers; nothing that happens after the workers were ordered to
leave is a failure, nor is leaving for others in a change in place; status 0 is success only if rank 0 reported
``finished`` or has no session. A plain script that was ordered to leave but ended before it got a signal does not know
of the order: it has finished.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from elasticflow_airflow.engines.local.files import worker_logs
from elasticflow_airflow.engines.local.files.generation_folder import Status, WorkerStatus
from elasticflow_airflow.engines.local.files.records import GangRecord
from elasticflow_airflow.engines.port import GangOutcome, GangState
from elasticflow_airflow.runtime.protocol import Report, ReportKind

TAIL_BYTES = 4096
TAIL_LINES = 25


@dataclass(slots=True)
class Heard:
    """The reports of one gang's workers so far, reduced to what the verdict needs."""

    started: set[int] = field(default_factory=set)
    in_place: bool = False
    """Whether the session can change in place."""
    finished: bool = False
    left: set[str] = field(default_factory=set)
    """By worker id, those that left because a plan without them is being followed, or because they were told to."""
    causes: dict[str, tuple[float, str]] = field(default_factory=dict)
    """By worker id: time and message of its last failure report."""

    def take(self, reports: Iterable[Report]) -> None:
        """Process new reports."""
        for report in reports:
            if report.kind is ReportKind.STARTED:
                self.started.add(report.rank)
                self.in_place = self.in_place or bool(report.data.get("in_place"))
            elif report.kind is ReportKind.FINISHED and report.rank == 0:
                self.finished = True
            elif report.kind is ReportKind.STOPPED:
                self.left.add(report.worker_id)
            elif report.kind in (ReportKind.FAILED, ReportKind.OUT_OF_MEMORY):
                self.causes[report.worker_id] = (report.at_s, str(report.data.get("message", report.kind)))


@dataclass(frozen=True, slots=True)
class GangVerdict:
    """State of a gang and, if it has ended, its outcome."""

    state: GangState
    outcome: GangOutcome | None = None
    failure: str | None = None
    failed_rank: int | None = None


def judge_living(gang: GangRecord, statuses: Mapping[str, Status | None], heard: Heard, settled: bool) -> GangVerdict:
    """Judge a gang that has not ended. ``settled``: its trainers have run long enough for a session to show up."""
    if gang.told or any(status is not None and status.told for status in statuses.values()):
        return GangVerdict(GangState.LEAVING)
    everybody = all_trainers_there(gang, statuses)
    ranks = set(range(len(gang.placement)))
    sessionless = not gang.in_place and (gang.plain or (settled and not heard.started))
    if heard.started >= ranks or (everybody and sessionless):
        return GangVerdict(GangState.RUNNING)
    return GangVerdict(GangState.STARTING)


def all_trainers_there(gang: GangRecord, statuses: Mapping[str, Status | None]) -> bool:
    """Return whether every worker has a trainer process."""
    trainers = [
        worker.trainer
        for status in statuses.values()
        if status is not None
        for worker in status.workers.values()
        if worker.trainer is not None
    ]
    return len(trainers) == len(gang.placement)


def judge_ended(gang: GangRecord, statuses: Mapping[str, Status | None], lost: list[str], heard: Heard) -> GangVerdict:
    """Judge a gang without processes; ``lost`` are the nodes whose supervisor died before its final status."""
    known = [status for status in statuses.values() if status is not None]
    told = gang.told or any(status.told for status in known)
    if lost:
        nodes = ", ".join(lost)
        return GangVerdict(
            GangState.ENDED, GangOutcome.LOST, f"the supervisor on {nodes} died, and its workers with it"
        )
    if any(status.failed for status in known):
        return _judge_failed(gang, known, heard)
    unstarted = next((status for status in known if status.failure is not None), None)
    if unstarted is not None:
        # If another holder took a slot first, the job is not at fault.
        outcome = GangOutcome.LOST if unstarted.slot_held else GangOutcome.FAILED
        return GangVerdict(GangState.ENDED, outcome, unstarted.failure)
    if heard.finished:
        return GangVerdict(GangState.ENDED, GangOutcome.FINISHED)
    if told and gang.plain and _ended_well_by_itself(gang, known):
        return GangVerdict(GangState.ENDED, GangOutcome.FINISHED)
    if told or (gang.in_place and not heard.started):
        return GangVerdict(GangState.ENDED, GangOutcome.STOPPED)  # the latter: a change that was never completed
    if any(_died(worker) for status in known for worker in status.workers.values()):
        return _judge_failed(gang, known, heard)  # None of the workers that survive a death is left.
    if gang.plain or not heard.started:
        return GangVerdict(GangState.ENDED, GangOutcome.FINISHED)
    if heard.left >= set(gang.worker_ids):
        return GangVerdict(GangState.ENDED, GangOutcome.STOPPED)  # for others that were lost before they said anything
    text = "the script ended with status 0 before its session reported that it is finished"
    return GangVerdict(GangState.ENDED, GangOutcome.FAILED, _with_tail(text, gang, gang.worker_id(0)), None)


def _judge_failed(gang: GangRecord, statuses: Iterable[Status], heard: Heard) -> GangVerdict:
    worker_id, worker = culprit(statuses, heard)
    # A supervisor knows the rank with which a worker was started; in this generation it may have another.
    rank = gang.worker_ids.index(worker_id) if worker_id in gang.worker_ids else worker.rank
    text = describe_failure(gang, worker_id, rank, worker.exit_code, heard)
    return GangVerdict(GangState.ENDED, GangOutcome.FAILED, text, rank)


def _died(worker: WorkerStatus) -> bool:
    return worker.ended and not worker.signalled and (worker.exit_code is None or worker.exit_code < 0)


def _ended_well_by_itself(gang: GangRecord, statuses: Iterable[Status]) -> bool:
    workers = [worker for status in statuses for worker in status.workers.values()]
    return len(workers) == len(gang.placement) and all(w.exit_code == 0 and not w.signalled for w in workers)


def culprit(statuses: Iterable[Status], heard: Heard) -> tuple[str, WorkerStatus]:
    """Return the worker that failed first.

    When one worker dies, its peers fail in their next collective, often within the same tick. A worker killed by
    a foreign signal, or one that ended without a report, precedes any that reported an exception. Then the earliest
    reported cause wins, then the lowest rank.
    """

    def order(item: tuple[str, WorkerStatus]) -> tuple[bool, bool, float, int]:
        worker_id, worker = item
        code = worker.exit_code or 0
        said_s = heard.causes[worker_id][0] if worker_id in heard.causes else float("inf")
        return (worker.signalled or code == 0, code > 0 and worker_id in heard.causes, said_s, worker.rank)

    return min((item for status in statuses for item in status.workers.items()), key=order)


def describe_failure(gang: GangRecord, worker_id: str, rank: int, exit_code: int | None, heard: Heard) -> str:
    """Describe how a worker ended by itself, with the last lines of its log."""
    if exit_code is None:
        how = "ended, nobody knows how"
    elif exit_code < 0:
        how = f"was killed by {_signal_name(-exit_code)}"
        if exit_code == -signal.SIGKILL:
            how += " (kill -9; when nobody did that, the kernel did, for lack of memory)"
    else:
        how = f"exited with status {exit_code}"
    _, cause = heard.causes.get(worker_id, (0.0, ""))
    text = f"rank {rank} ({worker_id}) {how}" + (f": {cause}" if cause else "")
    return _with_tail(text, gang, worker_id)


def _with_tail(text: str, gang: GangRecord, worker_id: str) -> str:
    try:
        raw = worker_logs.tail(Path(gang.incarnation_dir) / "logs", worker_id, TAIL_BYTES).decode(errors="replace")
    except (OSError, ValueError) as error:
        return f"{text}\nIts log cannot be read: {error}"
    lines = raw.rstrip().splitlines()[-TAIL_LINES:]
    if not lines:
        return text
    return "\n".join([text, f"Last lines of the log of {worker_id}:", *(f"  {line}" for line in lines)])


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
