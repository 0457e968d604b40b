"""Establishes the desired state of the service on its machines by torchrun, and reports the actual state.

No essential state is in memory only: gangs are recorded before they are started (``records.py``), and their fate is
recorded in the supervisors' folders. May not import Airflow, torch or the store.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from elasticflow_airflow import bounds
from elasticflow_airflow.engines.job_files import JobFolders
from elasticflow_airflow.engines.local.files import worker_logs
from elasticflow_airflow.engines.local.files.errors import as_engine_errors, disk_errors, is_of_the_machine
from elasticflow_airflow.engines.local.files.generation_folder import StopOrder, SupervisorFolder
from elasticflow_airflow.engines.local.files.records import FileRecords, GangRecord, JobRecord, Records
from elasticflow_airflow.engines.local.machine import slots, stacks
from elasticflow_airflow.engines.local.machine.layout import NodeLayout, detect_nodes
from elasticflow_airflow.engines.local.machines import Machines, Trainer
from elasticflow_airflow.engines.local.node_facts import layout_of
from elasticflow_airflow.engines.local.node_manager import NodeManager
from elasticflow_airflow.engines.local.observing import Observer, is_steady
from elasticflow_airflow.engines.local.starting import Starter
from elasticflow_airflow.engines.local.workers.warm_pool import WarmPool
from elasticflow_airflow.engines.port import EngineError, EngineNode, GangObservation, GangSpec, GangState, LogChunk
from elasticflow_airflow.runtime.protocol import Membership, RescaleMode
from elasticflow_airflow.scheduler_core.model.values import Slot

WARM_LIMIT_S = 20.0
"""When a generation's imports have made no progress for this long, its predecessor is ordered to leave anyway."""
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


class TorchrunEngine:
    """The engine port over machines that run torchrun workers. Thread-safe; one object per state directory.

    ``records``: where the gangs are on record; by default in files of the state directory. ``code_root``: below it is
    the code of jobs, ``snapshots``; by default the state directory. ``log_archive`` keeps the logs of jobs that are
    over. Raises EngineError when the state directory, or the records, cannot be used.
    """

    def __init__(
        self,
        name: str,
        state_dir: Path,
        machines: Machines,
        files: JobFolders,
        *,
        records: Records | None = None,
        code_root: Path | None = None,
        log_archive: worker_logs.LogArchive | None = None,
        log_segment_bytes: int = worker_logs.SEGMENT_BYTES,
        log_segments: int = worker_logs.KEEP_SEGMENTS,
    ) -> None:
        self._name = name
        self._state_dir = state_dir.resolve()
        self._records: Records = FileRecords(self._state_dir) if records is None else records
        self._archive = log_archive
        self._files = files
        self._lock = threading.RLock()
        self._asking = threading.Lock()
        self._jobs: dict[str, JobRecord] = {}
        self._saved: dict[str, dict[str, Any]] = {}
        """By job id, its record as it was last saved."""
        self._machines = machines
        self._starter = Starter(
            machines, self._state_dir, code_root or self._state_dir, (log_segment_bytes, log_segments)
        )
        self._observer = Observer(machines, self._save)
        self._called_off: set[tuple[str, int]] = set()
        """Generations that will never start, and whose supervisors were told."""
        self._damaged: dict[str, str] = {}
        """By job id: why its record cannot be read, for jobs whose gangs may still run."""
        with disk_errors(self._state_dir):
            self._load()
            machines.expect(folder for job in self._jobs.values() for folder in _on_record(job))
        for job in self._jobs.values():
            self._keep_logs(job)

    @property
    def name(self) -> str:
        """Short name for logs."""
        return self._name

    @property
    def files(self) -> JobFolders:
        """The job folders."""
        return self._files

    # The port.

    def inventory(self) -> tuple[EngineNode, ...]:
        """Return the present nodes; slots held by supervisors that are not on record here are busy."""
        with self._lock:
            return self._machines.inventory(self._has_gang)

    def want_nodes(self, count: int, unneeded: Collection[str]) -> None:
        """Tell whoever provides machines what is wanted."""
        with self._lock:
            self._machines.want_nodes(count, unneeded)

    def problems(self) -> list[str]:
        """Return why machines cannot be used."""
        return self._machines.problems()

    def latest(self, job_id: str) -> int:
        """Return the highest generation ever applied for a job; 0 when there is none."""
        with self._lock:
            return self._jobs[job_id].latest if job_id in self._jobs else self._machines.latest(job_id)

    def apply(self, spec: GangSpec) -> None:
        """Start, keep or replace the gang of a job (see the port)."""
        with self._lock, as_engine_errors(spec.incarnation_dir):
            if spec.job_id in self._damaged:
                raise EngineError(f"{self._damaged[spec.job_id]}; its gang is still there")
            job = self._jobs.get(spec.job_id) or JobRecord(job_id=spec.job_id)
            with self._published(job):
                self._renew(job)
                gang = self._accepted(job, spec)
                if gang is not None and not (gang.dropped or gang.told or gang.never_came):
                    self._advance(job, gang, spec)

    def stop(self, job_id: str, grace_s: float, reason: str = "") -> None:
        """Order all workers of the job to save and leave."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                if job_id in self._damaged:
                    self._machines.ask_to_leave(job_id)
                return
            with as_engine_errors(self._state_dir), self._published(job):
                if self._mark_told(job, before=job.latest + 1):
                    self._save(job)
                for gang in job.gangs.values():
                    self._tell(job, gang, job.latest, StopOrder(grace_s, reason))

    def renew(self, job_id: str) -> None:
        """Renew the lease of the job's supervisors."""
        with self._lock:
            job = self._jobs.get(job_id)
            with as_engine_errors(self._state_dir):
                if job is not None:
                    self._renew(job)
                elif job_id in self._damaged:
                    self._machines.renew(job_id)

    def prepare_environment(self, python: str, requirements: tuple[str, ...]) -> bool:
        """Have an environment built where it is missing (see the port)."""
        with self._lock, as_engine_errors(self._state_dir):
            return self._machines.prepare_environment(python, requirements)

    def observe(self) -> tuple[GangObservation, ...]:
        """Return every gang that is not forgotten, with its reports since the previous successful call."""
        with self._lock, disk_errors(self._state_dir):
            self._machines.reap()
            self._note_kept_logs()
            found: list[GangObservation] = []
            for _, job in sorted(self._jobs.items()):
                # Newest first: once its members train in it, the earlier ones have ended.
                newest_first = sorted(job.gangs.values(), key=lambda gang: -gang.generation)
                gangs = [self._look_at(job, gang) for gang in newest_first]
                found += reversed(self._follow_up(job, gangs))
            for job_id, trouble in list(self._damaged.items()):
                running = self._observer.observe_unrecorded(job_id, trouble)
                found += running
                if not running:
                    self._put_away(job_id)
            self._observer.handed_over()
            return tuple(found)

    def _look_at(self, job: JobRecord, gang: GangRecord) -> GangObservation:
        """Observe one gang. A problem with its files becomes the ``trouble`` of this job only."""
        troubles: list[str] = []
        with self._trouble_of_one(troubles):
            return self._observer.observe(job, gang)
        return self._observer.unread(job, gang, troubles[0])

    def _follow_up(self, job: JobRecord, gangs: list[GangObservation]) -> list[GangObservation]:
        """End workers that are overdue to leave, and serve gangs that wait for others to leave."""
        others_ended = all(gang.state is GangState.ENDED for gang in gangs[1:])
        dropped = {(job.job_id, gang.generation) for gang in job.gangs.values() if gang.dropped}
        if gangs and is_steady(gangs[0]) and others_ended and dropped <= self._called_off:
            return gangs  # Nobody is to leave, nobody waits, and the look at it has ordered nothing.
        troubles: list[str] = []
        with self._trouble_of_one(troubles), self._published(job):
            self._end_stragglers(job)
            # After observing: only then does a new engine know which gangs train. They may go on until others are warm.
            for gang in job.gangs.values():
                if gang.dropped:
                    self._end_warm_up(gang, "another generation has replaced it")
                    if all(gang.folder(node_id).has_order() for node_id in gang.nodes):
                        self._called_off.add((job.job_id, gang.generation))
                elif not gang.started and not gang.in_place:
                    self._tell_earlier(job, gang)
        return [replace(gang, trouble=gang.trouble or troubles[0]) for gang in gangs] if troubles else gangs

    @contextlib.contextmanager
    def _trouble_of_one(self, troubles: list[str]) -> Iterator[None]:
        """Collect errors caused by the files of one job; errors of the machine itself propagate."""
        try:
            yield
        except (MemoryError, EngineError):  # The latter: the records cannot be written, or are another service's.
            raise
        except Exception as error:  # A script can have written anything into them.
            if isinstance(error, OSError) and is_of_the_machine(error, self._state_dir):
                raise
            troubles.append(f"what its folder holds cannot be read or written: {error or type(error).__name__}")

    def forget(self, job_id: str) -> None:
        """Drop the ended gangs of a job; files stay and logs remain readable."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                self._forget_damaged(job_id)
                return
            ended = [gang.generation for gang in job.gangs.values() if self._observer.has_ended(job, gang)]
            for generation in ended:
                self._observer.forget(job, job.gangs.pop(generation))
                self._called_off.discard((job_id, generation))
            if ended:
                with as_engine_errors(self._state_dir):
                    self._save(job)
                self._keep_logs(job)

    def _forget_damaged(self, job_id: str) -> None:
        if job_id in self._damaged and not self._machines.held_by(job_id):
            with as_engine_errors(self._state_dir):
                self._put_away(job_id)

    def _keep_logs(self, job: JobRecord) -> None:
        """Have the logs of a job without gangs kept where the next engine finds them, if they are not yet."""
        if self._archive is not None and not job.gangs:
            for incarnation in job.incarnation_dirs.keys() - job.archived:
                self._archive.keep(Path(job.incarnation_dirs[incarnation]))

    def _note_kept_logs(self) -> None:
        """Note of which incarnations the logs are kept."""
        for folder in () if self._archive is None else self._archive.kept():
            job = self._jobs.get(folder.parent.name)
            if job is not None:
                job.archived |= {number for number, path in job.incarnation_dirs.items() if path == str(folder)}
                self._save(job)

    def read_log(self, job_id: str, incarnation: int, worker_id: str, offset: int, limit: int) -> LogChunk:
        """Read a worker's log across rotations. Raises KeyError for a worker that never existed."""
        with self._lock:
            job = self._jobs.get(job_id)
            folder = job.incarnation_dirs.get(incarnation) if job is not None else None
            if job is None or folder is None:
                raise KeyError(f"job {job_id} has no incarnation {incarnation}")
            having = [g for g in job.gangs.values() if worker_id in g.worker_ids and g.incarnation == incarnation]
            gang = having[0] if having else None
            living = any(not self._observer.has_ended(job, g) for g in having)
        logs_dir = Path(folder) / "logs"
        # A name with a slash would escape the folder.
        is_name = _JOB_ID.fullmatch(worker_id) is not None
        if is_name and incarnation in job.archived and self._archive is not None:
            with as_engine_errors(logs_dir):
                if not worker_logs.segments(logs_dir, worker_id):
                    self._archive.fetch(Path(folder), worker_id)
        if not is_name or (not living and not worker_logs.segments(logs_dir, worker_id)):
            known = gang is not None and gang.started
            if not known:
                raise KeyError(f"job {job_id} (incarnation {incarnation}) has no worker {worker_id!r}")
        with as_engine_errors(logs_dir):
            found = worker_logs.read(logs_dir, worker_id, offset, limit)
        next_offset = found.start_offset + len(found.data)
        return LogChunk(found.data, found.start_offset, next_offset, found.at_end and not living)

    def stacks(self, job_id: str) -> Mapping[str, str]:
        """Return the stacks of the trainer's threads of each live worker of a job."""
        trainers: dict[str, Trainer] = {}
        with self._lock:
            job = self._jobs.get(job_id)
            for gang in job.gangs.values() if job is not None else ():
                if job is not None and gang.started and not self._observer.has_ended(job, gang):
                    with as_engine_errors(self._state_dir):
                        trainers |= self._observer.trainers(gang)
        if not self._asking.acquire(timeout=stacks.LIMIT_S):
            raise EngineError("the stacks of other workers are being asked for; ask again in a moment")
        try:
            with as_engine_errors(self._state_dir):
                return self._machines.stacks(trainers)
        finally:
            self._asking.release()

    def close(self) -> None:
        """Release the engine; supervisors and their workers continue."""
        with self._lock:
            self._machines.let_go()

    # Accepting a generation.

    def _check(self, spec: GangSpec) -> None:
        session = spec.session
        if not _JOB_ID.fullmatch(spec.job_id):
            raise EngineError(f"job id {spec.job_id!r} cannot be a file name")
        if not spec.placement:
            raise EngineError(f"job {spec.job_id}: generation {spec.generation} has no slots; use stop()")
        if len(set(spec.placement)) != len(spec.placement):
            raise EngineError(f"job {spec.job_id}: a slot is placed twice in {list(spec.placement)}")
        for slot in spec.placement:
            layout_of(slot, self._machines.nodes)
        code_dir = Path(session.code_dir)
        if session.script is not None and not (code_dir / session.script).is_file():
            raise EngineError(f"script {session.script!r} is not in the code snapshot {code_dir}")
        if session.working_dir is not None and not Path(session.working_dir).is_dir():
            raise EngineError(f"working_dir {session.working_dir!r} is not a folder on this machine")
        if session.progress_regex is not None:
            problem = bounds.pattern_problem(session.progress_regex)
            if problem is not None:
                raise EngineError(f"progress_regex {problem}")
        if not spec.requirements:  # Otherwise its environment was checked when it was built.
            self._machines.check_interpreter(spec.python, spec.env, {slot.node_id for slot in spec.placement})

    def _accepted(self, job: JobRecord, spec: GangSpec) -> GangRecord | None:
        """Return the gang of a generation, accepted now or before; None when it is stale, or ended and forgotten."""
        if spec.generation < job.latest:
            return None
        gang = job.gangs.get(spec.generation)
        if gang is not None or spec.generation == job.latest:
            return gang
        self._check(spec)
        if spec.mode is RescaleMode.RESTART:
            # No worker is ordered to leave for slots that others hold.
            own = {slot for earlier in job.gangs.values() for slot in earlier.placement}
            self._machines.check_slots(slot for slot in spec.placement if slot not in own)
        return self._accept(job, spec)

    def _advance(self, job: JobRecord, gang: GangRecord, spec: GangSpec) -> None:
        """Bring a gang closer to its workers' training, as far as the earlier ones allow."""
        if gang.in_place:
            self._change_in_place(job, gang, spec)
        elif gang.started:
            self._starter.go(gang, spec)
            self._starter.start_supervisors(gang, spec)
        elif self._fence_is_open(job, spec):
            self._machines.check_slots(spec.placement)
            self._starter.warm_up(gang, spec)
            gang.started = True
            self._save(job)
            self._starter.go(gang, spec)
        else:
            self._starter.warm_up(gang, spec)
            self._tell_earlier(job, gang)

    def _accept(self, job: JobRecord, spec: GangSpec) -> GangRecord:
        gang = GangRecord(
            generation=spec.generation,
            incarnation=spec.incarnation,
            incarnation_dir=str(spec.incarnation_dir),
            placement=spec.placement,
            plain=spec.session.progress_regex is not None or spec.session.progress_file is not None,
            grace_s=spec.grace_s,
            reason=spec.reason,
            chain=spec.generation,
        )
        if spec.mode is RescaleMode.IN_PLACE:
            self._inherit(job, gang, spec)
        spec.incarnation_dir.mkdir(parents=True, exist_ok=True)
        job.latest = spec.generation
        job.incarnation_dirs[spec.incarnation] = str(spec.incarnation_dir)
        job.gangs[spec.generation] = gang
        for earlier in job.gangs.values():
            earlier.dropped = earlier.dropped or (earlier is not gang and not earlier.started)
        self._save(job)
        return gang

    # Changing in place.

    def _inherit(self, job: JobRecord, gang: GangRecord, spec: GangSpec) -> None:
        """Determine which workers continue in the new generation and which are lost.

        Raises EngineError when no gang runs that could change, or no worker is left.
        """
        before = [g for g in job.gangs.values() if g.started and not g.told and g.incarnation == spec.incarnation]
        if not before or self._observer.has_ended(job, before[-1]):
            raise EngineError(f"job {spec.job_id}: no gang of this incarnation runs that could be changed in place")
        chain = [g for g in before if g.chain == before[-1].chain and not self._observer.has_ended(job, g)]
        trains = next((g for g in reversed(chain) if g.adopted or not g.in_place), chain[0])
        # A joining worker that is not in the newest plan has turned back, though it may not have ended yet.
        may_stay = {*trains.worker_ids, *chain[-1].worker_ids}
        living: dict[Slot, str] = {}
        lost: set[str] = set()
        for earlier in chain:
            for worker in self._observer.workers(earlier):
                if worker.exit_code is not None or worker.worker_id in spec.lost:
                    lost.add(worker.worker_id)
                elif worker.worker_id in may_stay:
                    living[worker.slot] = worker.worker_id
        if not set(trains.worker_ids) - lost:
            raise EngineError(f"job {spec.job_id}: no worker is left that could go on in place")
        gang.chain = chain[-1].chain
        gang.capable = True
        gang.ids = tuple(
            living.get(slot, f"g{gang.generation:06d}-r{rank:03d}") for rank, slot in enumerate(spec.placement)
        )
        gang.lost = tuple(sorted(lost))

    def _change_in_place(self, job: JobRecord, gang: GangRecord, spec: GangSpec) -> None:
        """Publish the plan, start the joining workers and kill the lost ones. Idempotent."""
        for earlier in job.gangs.values():
            for rank, worker_id in enumerate(earlier.worker_ids):
                if worker_id in gang.lost:
                    earlier.folder_of(rank).order_kill([worker_id])
        if not gang.started:
            self._machines.check_slots(slot for rank, slot in enumerate(gang.placement) if gang.is_born(rank))
            self._starter.warm_up(gang, spec)
            gang.started = True
            self._save(job)
        self._starter.go(gang, spec)
        self._starter.start_supervisors(gang, spec)

    def _end_stragglers(self, job: JobRecord) -> None:
        """Kill workers that a completed change has left out and that have not left within the grace period."""
        for gang in job.gangs.values():
            successor = self._observer.successor(job, gang)
            if successor is None or not self._observer.elapsed(job, successor, "leavers", successor.grace_s):
                continue
            for rank, worker_id in enumerate(gang.worker_ids):
                if worker_id not in successor.worker_ids and not self._is_in_later(job, successor, worker_id):
                    gang.folder_of(rank).order_kill([worker_id])

    @staticmethod
    def _is_in_later(job: JobRecord, gang: GangRecord, worker_id: str) -> bool:
        return any(g.generation > gang.generation and worker_id in g.worker_ids for g in job.gangs.values())

    def _mark_told(self, job: JobRecord, before: int) -> bool:
        """Mark gangs that must leave; return True if any changed. Callers save this before they send the order."""
        fresh = [
            gang
            for gang in job.gangs.values()
            if gang.generation < before and not (gang.told or gang.dropped) and not self._observer.has_ended(job, gang)
        ]
        for gang in fresh:
            gang.told, gang.dropped = gang.started, not gang.started
        return bool(fresh)

    def _tell_earlier(self, job: JobRecord, gang: GangRecord) -> None:
        """Order the earlier generations to leave once this one is warm; until then they can continue to train."""
        if not self._may_tell(job, gang):
            return
        if self._mark_told(job, before=gang.generation):
            self._save(job)
        folder = Path(gang.incarnation_dir)
        plan = Membership.read(folder)
        if plan is None or plan.generation < gang.generation:
            Membership(
                generation=gang.generation, mode=RescaleMode.RESTART, members=gang.members, reason=gang.reason
            ).write(folder)
        reason = f"generation {gang.generation} replaces it" + (f": {gang.reason}" if gang.reason else "")
        for earlier in job.gangs.values():
            if earlier.generation < gang.generation:
                same_plan = earlier.incarnation_dir == gang.incarnation_dir
                self._tell(job, earlier, None if same_plan else gang.generation, StopOrder(gang.grace_s, reason))

    def _may_tell(self, job: JobRecord, gang: GangRecord) -> bool:
        training = any(
            earlier.started and not earlier.told and self._observer.is_training(job, earlier)
            for earlier in job.gangs.values()
            if earlier.generation < gang.generation
        )
        return (
            not training
            # Supervisors not started because of a service crash are started by the next apply.
            or all(gang.folder(node_id).warm.exists() for node_id in gang.nodes)
            or self._observer.is_quiet(job, gang, WARM_LIMIT_S)
        )

    @staticmethod
    def _end_warm_up(gang: GangRecord, reason: str) -> None:
        """Tell the supervisors of a gang that will never start to leave, once: they may be warming up."""
        for node_id in gang.nodes:
            folder = gang.folder(node_id)
            if folder.has_spec() and not folder.has_order():
                folder.write_order(StopOrder(0.0, reason, kill=True))

    def _tell(self, job: JobRecord, gang: GangRecord, plan_generation: int | None, order: StopOrder) -> None:
        """Make a marked gang leave, by a plan without members (None: it has one already) and by a stop order."""
        if gang.dropped:
            self._end_warm_up(gang, order.reason)
        elif gang.told and not self._observer.has_ended(job, gang):
            try:
                self._plan_nobody(Path(gang.incarnation_dir), plan_generation, order.reason)
                gang.order(order)
            except (OSError, ValueError, TypeError, KeyError):
                self._machines.ask_to_leave(job.job_id)  # A script has damaged these files.
                raise

    @staticmethod
    def _plan_nobody(folder: Path, generation: int | None, reason: str) -> None:
        """Write a membership plan without members (None: one exists already)."""
        try:
            plan = Membership.read(folder)
        except (ValueError, TypeError, KeyError):
            plan = None
        if generation is not None and (plan is None or plan.members):
            Membership(generation=generation, mode=RescaleMode.RESTART, members=(), reason=reason).write(folder)

    def _fence_is_open(self, job: JobRecord, spec: GangSpec) -> bool:
        return all(
            gang.generation >= spec.generation
            or not gang.started
            or (gang.generation <= spec.cleared_generation and self._observer.has_ended(job, gang))
            for gang in job.gangs.values()
        )

    # Helpers.

    def _has_gang(self, job_id: str) -> bool:
        """Return whether a gang of the job that may hold slots is on record."""
        job = self._jobs.get(job_id)
        if job is None:
            return job_id in self._damaged
        return any(not self._observer.has_ended(job, gang) for gang in job.gangs.values())

    @contextlib.contextmanager
    def _published(self, job: JobRecord) -> Iterator[None]:
        """Have what is written in this block, even if it fails, reach the machines of the job's gangs."""
        try:
            yield
        finally:
            unfinished = [gang for gang in job.gangs.values() if not self._observer.was_seen_to_end(job, gang)]
            for folder in dict.fromkeys(gang.incarnation_dir for gang in unfinished):
                self._machines.publish(Path(folder))

    def _renew(self, job: JobRecord) -> None:
        problem: OSError | None = None
        for gang in job.gangs.values():
            if not self._observer.has_ended(job, gang):
                for folder in gang.folders.values():
                    try:
                        self._machines.renew_lease(folder)
                    except OSError as error:
                        problem = error  # Renew the others anyway.
        if problem is not None:
            raise problem

    def _load(self) -> None:
        """Load the records. An unreadable one is kept as damaged for as long as gangs of its job run."""
        found, damaged = self._records.load()
        for job_id, raw in found.items():
            try:
                self._jobs[job_id] = JobRecord.from_json(raw, self._state_dir)
                self._saved[job_id] = raw
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                damaged[job_id] = repr(error)
        for job_id, why in damaged.items():
            self._damaged[job_id] = f"the engine's record {self._records.where(job_id)} cannot be read: {why}"

    def _put_away(self, job_id: str) -> None:
        """Put away the unreadable record of a job without running gangs, so that it can still be inspected."""
        self._damaged.pop(job_id, None)
        self._records.put_away(job_id)

    def _save(self, job: JobRecord) -> None:
        """Store a record, first for good, then in memory. When that fails, memory is reset to what is stored."""
        raw = job.to_json(self._state_dir)
        try:
            self._records.save(job.job_id, raw)
        except (OSError, EngineError):
            before = self._saved.get(job.job_id)
            if before is None:
                self._jobs.pop(job.job_id, None)
            else:
                self._jobs[job.job_id] = JobRecord.from_json(before, self._state_dir)
            raise
        self._saved[job.job_id] = raw
        self._jobs[job.job_id] = job


def _on_record(job: JobRecord) -> Iterator[SupervisorFolder]:
    """Return the folders of the supervisors that may run."""
    for gang in job.gangs.values():
        if gang.started and not (gang.dropped or gang.never_came):
            yield from gang.folders.values()


class LocalEngine(TorchrunEngine):
    """The engine port on this machine.

    ``nodes`` defaults to what :func:`detect_nodes` finds; ``slot_lock_dir`` is shared by all services of this user.
    ``pool`` None: every job imports for itself. Otherwise a process that has done the pool's imports waits for jobs of
    the service's interpreter from now on, and one is kept for every other interpreter after its first use; the pool
    ends with the engine. Raises EngineError when the state directory cannot be used.
    """

    def __init__(
        self,
        state_dir: Path,
        nodes: Sequence[NodeLayout] | None = None,
        slot_lock_dir: Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        log_segment_bytes: int = worker_logs.SEGMENT_BYTES,
        log_segments: int = worker_logs.KEEP_SEGMENTS,
        pool: WarmPool | None = None,
    ) -> None:
        resolved = state_dir.resolve()
        with disk_errors(resolved):
            manager = NodeManager(
                resolved,
                detect_nodes() if nodes is None else nodes,
                slot_lock_dir or slots.default_lock_dir(),
                os.environ if environ is None else environ,
                pool,
            )
        super().__init__(
            "local",
            state_dir,
            manager,
            JobFolders(state_dir / "jobs"),
            log_segment_bytes=log_segment_bytes,
            log_segments=log_segments,
        )
