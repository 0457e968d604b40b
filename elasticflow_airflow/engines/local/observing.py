"""Observes generations: turns the files of supervisors and workers into the engine's observations.

Part of the local engine. A new object rebuilds its state (offsets, reports read) from the files; the observation of an
ended gang is cached, so that thousands of old ones cost nothing.
"""

from __future__ import annotations

import heapq
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from elasticflow_airflow.engines.local.files.generation_folder import Status, StopOrder, SupervisorFolder
from elasticflow_airflow.engines.local.files.last_read import LastRead
from elasticflow_airflow.engines.local.files.records import GangRecord, JobRecord
from elasticflow_airflow.engines.local.gang_state import (
    GangVerdict,
    Heard,
    all_trainers_there,
    judge_ended,
    judge_living,
)
from elasticflow_airflow.engines.local.machines import Changes, Machines, Trainer
from elasticflow_airflow.engines.port import GangObservation, GangOutcome, GangState, WorkerObservation
from elasticflow_airflow.runtime.protocol import (
    MOST_BYTES_A_LOOK,
    Report,
    ReportKind,
    read_some_reports,
    report_path,
    stacks_path,
)
from elasticflow_airflow.scheduler_core.model.values import Slot

SETTLED_S = 30.0
"""A script that has started no session for this long counts as running without one."""
START_LIMIT_S = 30.0
"""A supervisor that has written nothing for this long is considered never to come up."""
_OF_THE_COURSE = {ReportKind.PROGRESS, ReportKind.WORKER}
"""Kinds of reports that tell nothing about the state of a gang."""
_UNREAD = -1
"""Instead of the number of the last reports, where there are more."""


class Observer:
    """Observes gangs; ``save`` stores a changed record."""

    def __init__(self, machines: Machines, save: Callable[[JobRecord], None]) -> None:
        self._machines, self._save = machines, save
        self._statuses = LastRead[Status]()
        self._last: dict[tuple[str, int], GangObservation] = {}
        """Last observations of gangs that have not ended, without the reports."""
        self._were_held: set[tuple[str, int]] = set()
        """Gangs whose files cannot be read and whose supervisors were seen to hold their slots."""
        self._heard: dict[tuple[str, int], Heard] = {}
        self._offsets: dict[tuple[str, int, str], int] = {}
        self._unsent: dict[tuple[str, int], tuple[Report, ...]] = {}
        """Reports that were read, but not handed over yet: whatever fails after reading must not lose them."""
        self._ended: dict[tuple[str, int], GangObservation] = {}
        self._first_seen_s: dict[tuple[str, int, str], float] = {}
        self._known: dict[tuple[str, int], Changes] = {}
        """What had changed when a gang was looked at last."""
        self._signs: dict[tuple[str, int], tuple[list[int], float]] = {}
        """Last progress stamps of the imports, and the time (monotonic) since when they are unchanged."""

    def forget(self, job: JobRecord, gang: GangRecord) -> None:
        """Drop the state kept for an ended gang."""
        key = (job.job_id, gang.generation)
        self._ended.pop(key, None)
        self._heard.pop(key, None)
        self._signs.pop(key, None)
        self._last.pop(key, None)
        self._known.pop(key, None)
        self._unsent.pop(key, None)
        self._were_held.discard(key)
        for folder in gang.folders.values():
            self._statuses.forget(folder.status_file)
        for member in gang.members:
            self._offsets.pop((job.job_id, gang.generation, member.worker_id), None)
        for what in [known for known in self._first_seen_s if known[:2] == key]:
            del self._first_seen_s[what]

    def observe(self, job: JobRecord, gang: GangRecord) -> GangObservation:
        """Observe one gang; its reports are all those since the last call of ``handed_over``."""
        key = (job.job_id, gang.generation)
        if key in self._ended:
            return replace(self._ended[key], reports=self._unsent.get(key, ()))
        changes = self._machines.changes(Path(gang.incarnation_dir))
        if changes is not None and self._goes_on_as_before(job, gang, changes):
            news = self._unsent.get(key)
            return replace(self._last[key], reports=news) if news else self._last[key]
        statuses = self._read_statuses(gang)
        # Read statuses first: a worker that has ended by then adds no more reports.
        verdict_of_end = self._end_of(job, gang, statuses)
        _, are_all = self._take_reports(job, gang)
        heard = self._heard[key]
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
        elif self._has_handed_over(job, gang, heard):
            verdict = GangVerdict(GangState.LEAVING)
        else:
            verdict = judge_ended(gang, statuses, verdict_of_end, heard)
        observation = GangObservation(
            job_id=job.job_id,
            incarnation=gang.incarnation,
            generation=gang.generation,
            state=verdict.state,
            outcome=verdict.outcome,
            workers=self.workers(gang, statuses) if gang.started else (),
            reports=self._unsent.get(key, ()),
            failure=verdict.failure,
            failed_rank=verdict.failed_rank,
        )
        if verdict.state is GangState.ENDED:
            self._last.pop(key, None)
            self._ended[key] = replace(observation, reports=())
        else:
            self._last[key] = replace(observation, reports=())
            if changes is not None:
                self._known[key] = changes if are_all else changes._replace(reports=_UNREAD)
        return observation

    def _goes_on_as_before(self, job: JobRecord, gang: GangRecord, changes: Changes) -> bool:
        """Return whether all workers train as they did at the last look; takes what they report meanwhile."""
        if not self._is_unchanged(job, gang, changes):
            return False
        key = (job.job_id, gang.generation)
        if self._known[key].reports == changes.reports:
            return True
        kinds, are_all = self._take_reports(job, gang)
        if kinds <= _OF_THE_COURSE:
            self._known[key] = changes if are_all else changes._replace(reports=_UNREAD)
            return True
        del self._known[key]  # The look that they need may fail.
        return False

    def _is_unchanged(self, job: JobRecord, gang: GangRecord, changes: Changes | None) -> bool:
        """Return whether all workers trained at the last look, and no state has changed since."""
        key = (job.job_id, gang.generation)
        last, known = self._last.get(key), self._known.get(key)
        if last is None or known is None or changes is None or known.states != changes.states:
            return False
        return is_steady(last) and gang.generation == job.latest  # What becomes of others depends on later ones.

    def _take_reports(self, job: JobRecord, gang: GangRecord) -> tuple[set[ReportKind], bool]:
        """Read new reports, to be handed over; return their kinds, and whether there are no more of them."""
        key = (job.job_id, gang.generation)
        news, are_all = self._new_reports(job, gang)
        if news:
            self._unsent[key] = self._unsent.get(key, ()) + news
        self._heard.setdefault(key, Heard()).take(news)
        return {report.kind for report in news}, are_all

    def handed_over(self) -> None:
        """Note that the reports of all observations so far have reached the caller, who gets them once."""
        self._unsent.clear()

    def unread(self, job: JobRecord, gang: GangRecord, trouble: str) -> GangObservation:
        """Return what is known of a gang whose files cannot be read: its last state, or that it has ended."""
        key = (job.job_id, gang.generation)
        reports = self._unsent.get(key, ())
        if key in self._ended:
            return replace(self._ended[key], reports=reports)
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
        before = replace(before, reports=reports)
        if not self._is_there(job, gang):
            return lost_unseen(before, trouble)
        return replace(before, state=GangState.LEAVING if gang.told else before.state, trouble=trouble)

    def observe_unrecorded(self, job_id: str, trouble: str) -> list[GangObservation]:
        """Return the running gangs of a job whose record cannot be read."""
        return [
            GangObservation(
                job_id=job_id,
                incarnation=incarnation,
                generation=generation,
                state=GangState.RUNNING,
                outcome=None,
                workers=unseen_workers(held),
                trouble=trouble,
            )
            for incarnation, generation, held in self._machines.running(job_id)
        ]

    def _is_there(self, job: JobRecord, gang: GangRecord) -> bool:
        """Return whether a gang with unreadable files may have supervisors, judging by the slots held."""
        key = (job.job_id, gang.generation)
        if gang.dropped or gang.never_came:
            return False
        if self._machines.held_by(job.job_id, gang.placement):
            self._were_held.add(key)
            return True
        coming = any(self._machines.is_coming_up(folder) for folder in gang.folders.values())
        return coming or (key not in self._were_held and not self.elapsed(job, gang, "unread", START_LIMIT_S))

    def successor(self, job: JobRecord, gang: GangRecord) -> GangRecord | None:
        """Return the newest later generation to which this one has changed in place; None when there is none."""
        later = [
            g for g in job.gangs.values() if g.generation > gang.generation and g.adopted and g.chain == gang.chain
        ]
        return max(later, key=lambda g: g.generation, default=None)

    def _has_handed_over(self, job: JobRecord, gang: GangRecord, heard: Heard) -> bool:
        """Return whether all workers have left for those of a change in place of which nothing is heard yet.

        What became of the training is known when those are heard of, or have ended.
        """
        return (
            not gang.told
            and heard.left >= set(gang.worker_ids)
            and any(
                g.generation > gang.generation and g.chain == gang.chain and g.in_place and not g.adopted
                for g in job.gangs.values()
                if not (g.dropped or g.never_came or self.was_seen_to_end(job, g))
            )
        )

    def is_training(self, job: JobRecord, gang: GangRecord) -> bool:
        """Return whether a worker has reported ``started``; always True for a plain script."""
        heard = self._heard.get((job.job_id, gang.generation))
        return gang.plain or (heard is not None and bool(heard.started))

    def was_seen_to_end(self, job: JobRecord, gang: GangRecord) -> bool:
        """Return whether an observation has told the gang's end; looks at nothing."""
        return (job.job_id, gang.generation) in self._ended

    def has_ended(self, job: JobRecord, gang: GangRecord) -> bool:
        """Return whether a gang has no process left and none will be started."""
        if self.was_seen_to_end(job, gang):
            return True
        try:
            if self._is_unchanged(job, gang, self._machines.changes(Path(gang.incarnation_dir))):
                return False
            return self._end_of(job, gang, self._read_statuses(gang)) is not None
        except (OSError, ValueError, TypeError, AttributeError):
            return not self._is_there(job, gang)

    def _end_of(
        self, job: JobRecord, gang: GangRecord, statuses: dict[str, Status | None]
    ) -> GangVerdict | list[str] | None:
        """Return None while a process is left; otherwise the lost nodes, or a verdict that is certain already.

        Replaces a status by the last one, if that was written meanwhile.
        """
        if gang.dropped:
            return GangVerdict(GangState.ENDED, GangOutcome.STOPPED)
        if gang.never_came:
            return GangVerdict(GangState.ENDED, GangOutcome.LOST, gang.never_came)
        if not gang.started:
            return None
        successor = self.successor(job, gang)
        if successor is not None:
            # Its members train in later generations; only workers that have not left yet remain.
            gone_on = {w for g in job.gangs.values() if g.generation >= successor.generation for w in g.worker_ids}
            left = [
                worker
                for worker in self.workers(gang, statuses)
                if worker.worker_id not in gone_on
                and worker.exit_code is None
                and not (gang.is_born(worker.rank) and self._never_comes(job, gang, worker.slot.node_id, statuses))
            ]
            return None if left else GangVerdict(GangState.ENDED, GangOutcome.STOPPED)
        waiting: list[str] = []
        lost: list[str] = []
        for node_id, status in statuses.items():
            if status is None:
                (lost if self._machines.was_given_up(gang.folders[node_id]) else waiting).append(node_id)
            elif not status.ended:
                alive = self._machines.is_alive(gang.folders[node_id], status)
                (waiting if alive else lost).append(node_id)
        # Reread the status of lost supervisors: one may have written its final status after the first read.
        for node_id in list(lost):
            again = self._read_status(gang.folders[node_id])
            if again is not None and again.ended:
                lost.remove(node_id)
                statuses[node_id] = _of_members(again, gang)
        dead = [(gang.folders[node_id], statuses[node_id]) for node_id in lost]
        if lost and waiting and gang.capable:
            self._machines.end_leftovers(dead)  # the others continue without them
        elif lost and waiting:
            gang.order(StopOrder(0.0, f"the supervisor on {lost[0]} died", kill=True))
        if not lost and waiting and all(statuses[node_id] is None for node_id in waiting):
            return self._given_up(job, gang, waiting, statuses)
        if waiting or self._machines.end_leftovers(dead):
            return None
        return lost

    def _never_comes(
        self, job: JobRecord, gang: GangRecord, node_id: str, statuses: Mapping[str, Status | None]
    ) -> bool:
        """Return whether a supervisor has never written anything: the service may have died before it started it.

        What counts is for how long nobody has been starting it: on a busy cluster a start may take longer.
        """
        what = f"start {node_id}"
        if statuses[node_id] is not None or self._machines.is_coming_up(gang.folders[node_id]):
            self._first_seen_s.pop((job.job_id, gang.generation, what), None)
            return False
        return self.elapsed(job, gang, what, START_LIMIT_S)

    def _given_up(
        self, job: JobRecord, gang: GangRecord, waiting: list[str], statuses: Mapping[str, Status | None]
    ) -> GangVerdict | list[str] | None:
        """Judge a gang of which only supervisors are left that never wrote anything."""
        if not all(self._never_comes(job, gang, node_id, statuses) for node_id in waiting):
            return None
        if gang.in_place and len(waiting) < len(gang.folders):
            return []  # Those who trained have ended, and were not affected.
        if len(waiting) < len(gang.folders):
            gang.order(StopOrder(0.0, f"no supervisor came up on {waiting[0]}", kill=True))
            return None
        gang.never_came = f"no supervisor came up on {', '.join(waiting)}"
        self._save(job)
        return GangVerdict(GangState.ENDED, GangOutcome.LOST, gang.never_came)

    def _settled(self, job: JobRecord, gang: GangRecord, statuses: Mapping[str, Status | None]) -> bool:
        return all_trainers_there(gang, statuses) and self.elapsed(job, gang, "settle", SETTLED_S)

    def elapsed(self, job: JobRecord, gang: GangRecord, what: str, limit_s: float) -> bool:
        """Return whether ``limit_s`` has passed since the first call for this gang and ``what``."""
        now_s = time.monotonic()
        return now_s - self._first_seen_s.setdefault((job.job_id, gang.generation, what), now_s) > limit_s

    def is_quiet(self, job: JobRecord, gang: GangRecord, limit_s: float) -> bool:
        """Return whether the imports of a gang that is warming up have made no progress for ``limit_s``.

        On a busy machine imports take minutes, and nothing is gained if the predecessor leaves before they are done.
        """
        key, now_s = (job.job_id, gang.generation), time.monotonic()
        signs = [gang.folder(node_id).warming_stamp() for node_id in gang.nodes]
        if self._signs.get(key, ([], 0.0))[0] != signs:
            self._signs[key] = (signs, now_s)
        return now_s - self._signs[key][1] > limit_s

    def workers(
        self, gang: GangRecord, statuses: Mapping[str, Status | None] | None = None
    ) -> tuple[WorkerObservation, ...]:
        """Return each member as given by the statuses. The kernel kills the workers of a supervisor that has died."""
        statuses = self._read_statuses(gang) if statuses is None else statuses
        folders = gang.folders
        orphaned = {
            key
            for key, status in statuses.items()
            if status is not None and not status.ended and not self._machines.is_alive(folders[key], status)
        }
        known = {
            worker_id: (worker, key in orphaned)
            for key, status in statuses.items()
            for worker_id, worker in (status.workers.items() if status is not None else ())
        }
        unseen = {key for key, status in statuses.items() if status is None}
        given_up = {folders[key] for key in unseen if self._machines.was_given_up(folders[key])}
        found = []
        for rank, slot in enumerate(gang.placement):
            worker_id = gang.worker_id(rank)
            worker, is_orphaned = known.get(worker_id, (None, False))
            trainer = worker.trainer if worker is not None else None
            exit_code = worker.exit_code if worker is not None else None
            is_given_up = bool(given_up) and gang.folder_of(rank) in given_up
            if is_given_up or (worker is not None and not worker.ended and is_orphaned):
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

    def trainers(self, gang: GangRecord) -> dict[str, Trainer]:
        """Return the trainer of each member that has not ended."""
        statuses = [status for status in self._read_statuses(gang).values() if status is not None]
        known = {worker_id: worker for status in statuses for worker_id, worker in status.workers.items()}
        found: dict[str, Trainer] = {}
        for member in gang.members:
            worker = known.get(member.worker_id)
            if worker is None or not worker.ended:
                path = stacks_path(Path(gang.incarnation_dir), member.worker_id)
                found[member.worker_id] = Trainer(member.node_id, None if worker is None else worker.trainer, path)
        return found

    def _read_statuses(self, gang: GangRecord) -> dict[str, Status | None]:
        """Return the last statuses of the supervisors of a gang's members, restricted to these members."""
        found = {}
        for key, folder in gang.folders.items():
            status = self._read_status(folder)
            found[key] = None if status is None else _of_members(status, gang)
        return found

    def _read_status(self, folder: SupervisorFolder) -> Status | None:
        return self._statuses.get(folder.status_file, folder.read_status)

    def _new_reports(self, job: JobRecord, gang: GangRecord) -> tuple[tuple[Report, ...], bool]:
        """Return new reports of a gang: in order for each worker, and merged by time across workers.

        Also returns whether there are no more of them: of a long file, a part is read at a time.
        """
        streams, offsets, are_all = [], {}, True
        for member in gang.members:
            key = (job.job_id, gang.generation, member.worker_id)
            path = report_path(Path(gang.incarnation_dir), gang.generation, member.worker_id)
            begin = self._offsets.get(key, 0)
            found, offsets[key] = read_some_reports(path, begin)
            are_all = are_all and offsets[key] < begin + MOST_BYTES_A_LOOK
            offset_s = self._machines.clock_offset_s(member.node_id)
            # A script can write anything into its own file.
            own = [report for report, _ in found if report.worker_id == member.worker_id]
            streams.append([replace(report, at_s=report.at_s + offset_s) for report in own] if offset_s else own)
        self._offsets |= offsets
        return tuple(heapq.merge(*streams, key=lambda report: report.at_s)), are_all


def is_steady(gang: GangObservation) -> bool:
    """Return whether all workers of a gang train."""
    trains = gang.state is GangState.RUNNING and not gang.trouble
    return trains and all(worker.pid is not None and worker.exit_code is None for worker in gang.workers)


def unseen_workers(placement: Sequence[Slot], ids: Sequence[str] = ()) -> tuple[WorkerObservation, ...]:
    """Return workers of which only the slots are known."""
    return tuple(
        WorkerObservation(worker_id=name, rank=rank, slot=slot, pid=None, exit_code=None, log_name=name)
        for rank, slot in enumerate(placement)
        for name in (ids[rank] if ids else f"unknown-r{rank:03d}",)
    )


def lost_unseen(before: GangObservation, trouble: str) -> GangObservation:
    """Return the observation of a gang that has no process left and whose outcome cannot be read."""
    return GangObservation(
        job_id=before.job_id,
        incarnation=before.incarnation,
        generation=before.generation,
        state=GangState.ENDED,
        outcome=GangOutcome.LOST,
        workers=before.workers,
        reports=before.reports,
        failure=trouble,
        trouble=trouble,
    )


def _of_members(status: Status, gang: GangRecord) -> Status:
    """Return a status without workers that are not in this generation."""
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
