"""Observing generations: from the files of supervisors and workers to what the engine says.

Part of the local engine. What it remembers (offsets, reports heard) is rebuilt from the files by a new object; an
observation of an ended gang is kept, so that thousands of old ones cost nothing.
"""

from __future__ import annotations

import heapq
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from elasticflow_airflow.engines.local.files.generation_folder import Status, StopOrder, SupervisorFolder
from elasticflow_airflow.engines.local.files.records import GangRecord, JobRecord
from elasticflow_airflow.engines.local.holding import SlotHolders, lost_unseen, unseen_workers
from elasticflow_airflow.engines.local.judge import GangVerdict, Heard, all_trainers_there, judge_ended, judge_living
from elasticflow_airflow.engines.local.machine.processes import ProcessId, group_led_by
from elasticflow_airflow.engines.port import GangObservation, GangOutcome, GangState, WorkerObservation
from elasticflow_airflow.runtime.protocol import Report, read_some_reports, report_path, stacks_path

SETTLED_S = 30.0
"""A script that has shown no session for so long counts as running without one."""
START_LIMIT_S = 30.0
"""A supervisor that has written nothing for so long never will."""


class Observer:
    """Looks at gangs. ``is_coming_up`` tells supervisors that were just started; ``save`` keeps a changed record."""

    def __init__(
        self,
        is_coming_up: Callable[[SupervisorFolder], bool],
        save: Callable[[JobRecord], None],
        holders: SlotHolders,
    ) -> None:
        self._is_coming_up, self._save, self._holders = is_coming_up, save, holders
        self._last: dict[tuple[str, int], GangObservation] = {}
        """What was observed last of gangs that have not ended, without the reports."""
        self._were_held: set[tuple[str, int]] = set()
        """Gangs whose files cannot be read, and whose supervisors have held their slots."""
        self._heard: dict[tuple[str, int], Heard] = {}
        self._offsets: dict[tuple[str, int, str], int] = {}
        self._ended: dict[tuple[str, int], GangObservation] = {}
        self._first_seen_s: dict[tuple[str, int, str], float] = {}
        self._signs: dict[tuple[str, int], tuple[list[int], float]] = {}
        """What was last seen of imports that get on, and since when."""

    def forget(self, job: JobRecord, gang: GangRecord) -> None:
        """Drop what is remembered of an ended gang."""
        key = (job.job_id, gang.generation)
        self._ended.pop(key, None)
        self._heard.pop(key, None)
        self._signs.pop(key, None)
        self._last.pop(key, None)
        self._were_held.discard(key)
        for member in gang.members:
            self._offsets.pop((job.job_id, gang.generation, member.worker_id), None)
        for what in [known for known in self._first_seen_s if known[:2] == key]:
            del self._first_seen_s[what]

    def observe(self, job: JobRecord, gang: GangRecord) -> GangObservation:
        """Look at one gang; its reports are those that came since the last look."""
        key = (job.job_id, gang.generation)
        if key in self._ended:
            return self._ended[key]
        statuses = read_statuses(gang)
        # Statuses first: whoever has ended then has no report to add.
        verdict_of_end = self._end_of(job, gang, statuses)
        reports = self._new_reports(job, gang)
        heard = self._heard.setdefault(key, Heard())
        heard.take(reports)
        if heard.in_place and not gang.capable:
            gang.capable = True
            self._save(job)
        if verdict_of_end is None:
            verdict = judge_living(gang, statuses, heard, self._settled(job, gang, statuses))
            if not gang.started:
                verdict = GangVerdict(GangState.PENDING)
            elif self.successor(job, gang) is not None:
                verdict = GangVerdict(GangState.LEAVING)
            elif verdict.state is GangState.RUNNING and gang.in_place and not gang.adopted:
                gang.adopted = True
                self._save(job)
        elif isinstance(verdict_of_end, GangVerdict):
            verdict = verdict_of_end
        else:
            verdict = judge_ended(gang, statuses, verdict_of_end, heard)
        observation = GangObservation(
            job_id=job.job_id,
            incarnation=gang.incarnation,
            generation=gang.generation,
            state=verdict.state,
            outcome=verdict.outcome,
            workers=observe_workers(gang, statuses) if gang.started else (),
            reports=reports,
            failure=verdict.failure,
            failed_rank=verdict.failed_rank,
        )
        if verdict.state is GangState.ENDED:
            self._last.pop(key, None)
            self._ended[key] = replace(observation, reports=())
        else:
            self._last[key] = replace(observation, reports=())
        return observation

    def unread(self, job: JobRecord, gang: GangRecord, trouble: str) -> GangObservation:
        """What is known of a gang whose files cannot be read: where it stands, if it still does."""
        key = (job.job_id, gang.generation)
        if key in self._ended:
            return self._ended[key]
        before = self._last.get(key)
        if before is None:
            before = GangObservation(
                job_id=job.job_id,
                incarnation=gang.incarnation,
                generation=gang.generation,
                state=GangState.STARTING if gang.started else GangState.PENDING,
                outcome=None,
                workers=unseen_workers(gang.placement, gang.worker_ids) if gang.started else (),
            )
        if not self._is_there(job, gang):
            return lost_unseen(before, trouble)
        return replace(before, state=GangState.LEAVING if gang.told else before.state, trouble=trouble)

    def _is_there(self, job: JobRecord, gang: GangRecord) -> bool:
        """Whether supervisors of a gang may be there, by the slots that they hold: its files say nothing."""
        key = (job.job_id, gang.generation)
        if gang.dropped or gang.never_came:
            return False
        if self._holders.of(job.job_id, gang.placement):
            self._were_held.add(key)
            return True
        coming = any(self._is_coming_up(folder) for folder in gang.folders.values())
        return coming or (key not in self._were_held and not self.elapsed(job, gang, "unread", START_LIMIT_S))

    def workers_of(self, gang: GangRecord) -> tuple[WorkerObservation, ...]:
        """Look at its members alone."""
        return observe_workers(gang, read_statuses(gang))

    def successor(self, job: JobRecord, gang: GangRecord) -> GangRecord | None:
        """The newest later generation to which this one has changed in place."""
        later = [
            g for g in job.gangs.values() if g.generation > gang.generation and g.adopted and g.chain == gang.chain
        ]
        return max(later, key=lambda g: g.generation, default=None)

    def is_training(self, job: JobRecord, gang: GangRecord) -> bool:
        """Whether its workers were heard to train (or are plain, and there)."""
        heard = self._heard.get((job.job_id, gang.generation))
        return gang.plain or (heard is not None and bool(heard.started))

    def has_ended(self, job: JobRecord, gang: GangRecord) -> bool:
        """Whether no process of it is left and none will come."""
        if (job.job_id, gang.generation) in self._ended:
            return True
        try:
            return self._end_of(job, gang, read_statuses(gang)) is not None
        except (OSError, ValueError, TypeError, AttributeError):
            return not self._is_there(job, gang)

    def _end_of(
        self, job: JobRecord, gang: GangRecord, statuses: Mapping[str, Status | None]
    ) -> GangVerdict | list[str] | None:
        """None while a process is left; else the nodes that were lost, or the verdict on a gang that never ran."""
        if gang.dropped:
            return GangVerdict(GangState.ENDED, GangOutcome.STOPPED)
        if gang.never_came:
            return GangVerdict(GangState.ENDED, GangOutcome.LOST, gang.never_came)
        if not gang.started:
            return None
        successor = self.successor(job, gang)
        if successor is not None:
            # Its members train on elsewhere; what is left of it is whoever has not gone yet.
            gone_on = {w for g in job.gangs.values() if g.generation >= successor.generation for w in g.worker_ids}
            left = [w for w in observe_workers(gang, statuses) if w.worker_id not in gone_on and w.exit_code is None]
            return None if left else GangVerdict(GangState.ENDED, GangOutcome.STOPPED)
        waiting: list[str] = []
        lost: list[str] = []
        for node_id, status in statuses.items():
            if status is None:
                waiting.append(node_id)
            elif not status.ended:
                alive = status.supervisor is not None and status.supervisor.is_alive()
                (waiting if alive else lost).append(node_id)
        # Read again what seemed lost: it may have written its last word between reading and looking.
        lost = [n for n in lost if (again := gang.folders[n].read_status()) is None or not again.ended]
        if lost and waiting and gang.capable:
            _end_leftovers(statuses[node_id] for node_id in lost)  # the others go on without them
        elif lost and waiting:
            gang.order(StopOrder(0.0, f"the supervisor on {lost[0]} died", kill=True))
        if not lost and waiting and all(statuses[node_id] is None for node_id in waiting):
            return self._given_up(job, gang, waiting)
        if waiting or _end_leftovers(statuses[node_id] for node_id in lost):
            return None
        return lost

    def _given_up(self, job: JobRecord, gang: GangRecord, waiting: list[str]) -> GangVerdict | None:
        """Judge supervisors of which nothing was ever seen: a crash of the service may have come before them."""
        for node_id in waiting:
            if self._is_coming_up(gang.folders[node_id]):
                return None
            if not self.elapsed(job, gang, f"start {node_id}", START_LIMIT_S):
                return None
        if gang.in_place and len(waiting) < len(gang.folders):
            return None  # Those who train have lost nothing.
        if len(waiting) < len(gang.folders):
            gang.order(StopOrder(0.0, f"no supervisor came up on {waiting[0]}", kill=True))
            return None
        gang.never_came = f"no supervisor came up on {', '.join(waiting)}"
        self._save(job)
        return GangVerdict(GangState.ENDED, GangOutcome.LOST, gang.never_came)

    def _settled(self, job: JobRecord, gang: GangRecord, statuses: Mapping[str, Status | None]) -> bool:
        return all_trainers_there(gang, statuses) and self.elapsed(job, gang, "settle", SETTLED_S)

    def elapsed(self, job: JobRecord, gang: GangRecord, what: str, limit_s: float) -> bool:
        """Whether so much time has passed since this was asked first."""
        now_s = time.monotonic()
        return now_s - self._first_seen_s.setdefault((job.job_id, gang.generation, what), now_s) > limit_s

    def is_quiet(self, job: JobRecord, gang: GangRecord, limit_s: float) -> bool:
        """Whether the imports of a gang that warms up have not got on for so long.

        On a busy machine they take minutes, and nobody is served by a predecessor that leaves before they are done.
        """
        key, now_s = (job.job_id, gang.generation), time.monotonic()
        signs = [gang.folder(node_id).warming_stamp() for node_id in gang.nodes]
        if self._signs.get(key, ([], 0.0))[0] != signs:
            self._signs[key] = (signs, now_s)
        return now_s - self._signs[key][1] > limit_s

    def _new_reports(self, job: JobRecord, gang: GangRecord) -> tuple[Report, ...]:
        """All new reports of a gang: in the order of each worker, and merged by time between them."""
        streams, offsets = [], {}
        for member in gang.members:
            key = (job.job_id, gang.generation, member.worker_id)
            path = report_path(Path(gang.incarnation_dir), gang.generation, member.worker_id)
            found, offsets[key] = read_some_reports(path, self._offsets.get(key, 0))
            # A script may write anything into its own file.
            streams.append([report for report, _ in found if report.worker_id == member.worker_id])
        self._offsets |= offsets
        return tuple(heapq.merge(*streams, key=lambda report: report.at_s))


def read_statuses(gang: GangRecord) -> dict[str, Status | None]:
    """What the supervisors of its members wrote last, as far as it is about its members."""
    found = {}
    for key, folder in gang.folders.items():
        status = folder.read_status()
        found[key] = None if status is None else _of_members(status, gang)
    return found


def _of_members(status: Status, gang: GangRecord) -> Status:
    """A status without the workers that are not of this generation."""
    members = {worker_id: worker for worker_id, worker in status.workers.items() if worker_id in gang.worker_ids}
    if len(members) == len(status.workers):
        return status
    failed = any(w.ended and w.exit_code not in (0, None) and not w.signalled for w in members.values())
    return replace(
        status,
        workers=members,
        failed=status.failed and failed,
        ended=status.ended or (bool(members) and all(worker.ended for worker in members.values())),
    )


def observe_workers(gang: GangRecord, statuses: Mapping[str, Status | None]) -> tuple[WorkerObservation, ...]:
    """What the statuses say of each member. One whose supervisor has died is dead: the kernel saw to that."""
    known = {w: (worker, status) for status in statuses.values() if status for w, worker in status.workers.items()}
    found = []
    for rank, slot in enumerate(gang.placement):
        worker_id = gang.worker_id(rank)
        worker, status = known.get(worker_id, (None, None))
        trainer = worker.trainer if worker is not None else None
        exit_code = worker.exit_code if worker is not None else None
        orphaned = status is not None and not (status.supervisor is not None and status.supervisor.is_alive())
        if status is not None and worker is not None and not worker.ended and orphaned and not status.ended:
            exit_code = -signal.SIGKILL
        lives = worker is not None and not worker.ended and exit_code is None
        found.append(
            WorkerObservation(
                worker_id=worker_id,
                rank=rank,
                slot=slot,
                pid=trainer.pid if trainer is not None and lives else None,
                exit_code=exit_code,
                log_name=worker_id,
            )
        )
    return tuple(found)


def trainers_of(gang: GangRecord) -> dict[str, tuple[ProcessId | None, Path]]:
    """The trainer of each member that has not ended, None while there is none yet, and the file of its stacks."""
    known = {w: worker for status in read_statuses(gang).values() if status for w, worker in status.workers.items()}
    found: dict[str, tuple[ProcessId | None, Path]] = {}
    for worker_id in gang.worker_ids:
        worker = known.get(worker_id)
        if worker is None or not worker.ended:
            path = stacks_path(Path(gang.incarnation_dir), worker_id)
            found[worker_id] = (None if worker is None else worker.trainer, path)
    return found


def _end_leftovers(statuses: Iterable[Status | None]) -> bool:
    """Kill what a dead supervisor left; True while something is left. The kernel was there first, nearly always."""
    left = False
    for status in statuses:
        for worker in status.workers.values() if status is not None else ():
            processes = [worker.agent] if worker.agent is not None and worker.agent.is_alive() else []
            if worker.trainer is not None:
                processes += group_led_by(worker.trainer)
            for process in processes:
                process.kill()
                left = True
    return left
