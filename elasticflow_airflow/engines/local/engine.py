"""The local engine: brings about on this machine what the service says should be, and tells what is.

It keeps nothing in memory that matters: gangs are on disk before they are started (``records.py``), and what became
of them is in the supervisors' folders. May not import Airflow, torch or the store.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from elasticflow_airflow.engines.local import logs, slots
from elasticflow_airflow.engines.local.bridge import prepare_bridge
from elasticflow_airflow.engines.local.environment import inherited, worker_environment
from elasticflow_airflow.engines.local.folder import (
    Order,
    Status,
    SupervisorFolder,
    SupervisorSpec,
    WorkerSpec,
)
from elasticflow_airflow.engines.local.interpreter import InterpreterCheck
from elasticflow_airflow.engines.local.judge import Heard, Verdict, all_trainers_there, judge_ended, judge_living
from elasticflow_airflow.engines.local.layout import NodeLayout, SlotLayout, detect_nodes
from elasticflow_airflow.engines.local.processes import members_of_group
from elasticflow_airflow.engines.local.records import GangRecord, JobRecord
from elasticflow_airflow.engines.port import (
    EngineError,
    EngineNode,
    GangObservation,
    GangOutcome,
    GangSpec,
    GangState,
    LogChunk,
    WorkerObservation,
)
from elasticflow_airflow.runtime.protocol import (
    Membership,
    Report,
    RescaleMode,
    read_reports,
    report_path,
)
from elasticflow_airflow.scheduler_core.values import Slot

SETTLED_S = 30.0
"""A script that has shown no session for so long counts as running without one."""
START_LIMIT_S = 30.0
"""A supervisor that has written nothing for so long never will."""
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")


class LocalEngine:
    """The engine port on this machine. Thread-safe; one object per state directory.

    ``nodes`` default to what :func:`detect_nodes` finds; ``slot_lock_dir`` is shared by all services of this user.
    Raises EngineError when the state directory cannot be used.
    """

    def __init__(
        self,
        state_dir: Path,
        nodes: Sequence[NodeLayout] | None = None,
        slot_lock_dir: Path | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        log_segment_bytes: int = logs.SEGMENT_BYTES,
        log_segments: int = logs.KEEP_SEGMENTS,
    ) -> None:
        self._state_dir = state_dir.resolve()
        self._records_dir = self._state_dir / "engine"
        self._nodes = {node.node_id: node for node in (nodes if nodes is not None else detect_nodes())}
        self._lock_dir = slot_lock_dir or slots.default_lock_dir()
        self._environ = dict(os.environ if environ is None else environ)
        self._log_limits = (log_segment_bytes, log_segments)
        self._lock = threading.RLock()
        self._interpreters = InterpreterCheck()
        self._jobs: dict[str, JobRecord] = {}
        self._heard: dict[tuple[str, int], Heard] = {}
        self._offsets: dict[tuple[str, str], int] = {}
        self._ended: dict[tuple[str, int], GangObservation] = {}
        self._first_seen_s: dict[tuple[str, int, str], float] = {}
        self._supervisors: dict[Path, subprocess.Popen[bytes]] = {}
        with _disk_errors(self._state_dir):
            self._records_dir.mkdir(parents=True, exist_ok=True)
            slots.prepare_lock_dir(self._lock_dir)
            self._bridge = prepare_bridge(self._state_dir)
            for path in sorted(self._records_dir.glob("*.json")):
                record = JobRecord.load(path)
                if record is not None:
                    self._jobs[record.job_id] = record

    @property
    def name(self) -> str:
        """Short name for logs."""
        return "local"

    # The port.

    def inventory(self) -> tuple[EngineNode, ...]:
        """This machine's nodes; slots that another service's supervisors hold are busy."""
        nodes = []
        for node in self._nodes.values():
            busy = {}
            for index, slot in enumerate(node.slots):
                holder = slots.holder_of(self._lock_dir, slot.lock_name)
                if holder is not None and holder.get("state_dir") != str(self._state_dir):
                    busy[index] = slots.describe(holder)
            nodes.append(
                EngineNode(
                    node_id=node.node_id,
                    slots=len(node.slots),
                    device=node.device,
                    device_type=node.device_type,
                    busy=busy,
                )
            )
        return tuple(nodes)

    def apply(self, spec: GangSpec) -> None:
        """Start, keep or replace the gang of a job (see the port)."""
        with self._lock, _disk_errors(spec.incarnation_dir):
            job = self._jobs.get(spec.job_id) or JobRecord(job_id=spec.job_id)
            self._renew(job)
            if spec.generation < job.latest:
                return
            gang = job.gangs.get(spec.generation)
            if gang is None:
                if spec.generation == job.latest:
                    return  # It ended and was forgotten.
                self._check(spec)
                gang = self._accept(job, spec)
            if gang.dropped or gang.told or gang.never_came:
                return
            self._tell_earlier(job, gang, spec)
            if gang.started:
                self._start_supervisors(gang, spec)
            elif self._fence_is_open(job, spec):
                self._check_slots(spec)
                self._start(job, gang, spec)

    def stop(self, job_id: str, grace_s: float, reason: str = "") -> None:
        """Tell all workers of the job to save and leave."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return
            with _disk_errors(self._state_dir):
                self._mark_told(job, before=job.latest + 1)
                for gang in job.gangs.values():
                    if gang.told and not self._has_ended(job, gang):
                        self._write_empty_plan(gang, job.latest, reason)
                        self._order(gang, Order(grace_s, reason))

    def renew(self, job_id: str) -> None:
        """Renew the lease of the job's supervisors."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is not None:
                with _disk_errors(self._state_dir):
                    self._renew(job)

    def observe(self) -> tuple[GangObservation, ...]:
        """Every gang that is not forgotten, with what it reported since the last time."""
        with self._lock:
            for folder, process in list(self._supervisors.items()):
                if process.poll() is not None and (folder / "status.json").exists():
                    del self._supervisors[folder]
            return tuple(
                self._observe(job, gang)
                for _, job in sorted(self._jobs.items())
                for _, gang in sorted(job.gangs.items())
            )

    def forget(self, job_id: str) -> None:
        """Drop the ended gangs of a job; files stay, logs can still be read."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return
            ended = [gang.generation for gang in job.gangs.values() if self._has_ended(job, gang)]
            for generation in ended:
                del job.gangs[generation]
                self._ended.pop((job_id, generation), None)
                self._heard.pop((job_id, generation), None)
            if ended:
                with _disk_errors(self._records_dir):
                    self._save(job)

    def read_log(self, job_id: str, incarnation: int, worker_id: str, offset: int, limit: int) -> LogChunk:
        """Read a worker's log, across its rotations. Raises KeyError for a worker that never was."""
        with self._lock:
            job = self._jobs.get(job_id)
            folder = job.incarnation_dirs.get(incarnation) if job is not None else None
            if job is None or folder is None:
                raise KeyError(f"job {job_id} has no incarnation {incarnation}")
            gang = next((g for g in job.gangs.values() if worker_id in [m.worker_id for m in g.members]), None)
            living = gang is not None and gang.incarnation == incarnation and not self._has_ended(job, gang)
        logs_dir = Path(folder) / "logs"
        # A name with a slash would leave the folder.
        if not _JOB_ID.fullmatch(worker_id) or (not living and not logs.segments(logs_dir, worker_id)):
            known = gang is not None and gang.incarnation == incarnation and gang.started
            if not known:
                raise KeyError(f"job {job_id} (incarnation {incarnation}) has no worker {worker_id!r}")
        found = logs.read(logs_dir, worker_id, offset, limit)
        next_offset = found.start_offset + len(found.data)
        return LogChunk(found.data, found.start_offset, next_offset, found.at_end and not living)

    def close(self) -> None:
        """Let go; supervisors and their workers go on."""
        with self._lock:
            for process in self._supervisors.values():
                process.poll()
                # They outlive us on purpose; without this the interpreter warns about it.
                process.returncode = process.returncode or 0
            self._supervisors.clear()

    # Accepting a generation.

    def _check(self, spec: GangSpec) -> None:
        session = spec.session
        if not _JOB_ID.fullmatch(spec.job_id):
            raise EngineError(f"job id {spec.job_id!r} cannot be a file name")
        if spec.mode is RescaleMode.IN_PLACE:
            raise EngineError("the local engine changes a gang by restart only; apply it with mode restart")
        if not spec.placement:
            raise EngineError(f"job {spec.job_id}: generation {spec.generation} has no slots; use stop()")
        if len(set(spec.placement)) != len(spec.placement):
            raise EngineError(f"job {spec.job_id}: a slot is placed twice in {list(spec.placement)}")
        for slot in spec.placement:
            self._layout(slot)
        code_dir = Path(session.code_dir)
        if session.script is not None and not (code_dir / session.script).is_file():
            raise EngineError(f"script {session.script!r} is not in the code snapshot {code_dir}")
        if session.working_dir is not None and not Path(session.working_dir).is_dir():
            raise EngineError(f"working_dir {session.working_dir!r} is not a folder on this machine")
        if session.progress_regex is not None:
            try:
                groups = re.compile(session.progress_regex).groups
            except re.error as error:
                raise EngineError(f"progress_regex={session.progress_regex!r} is no pattern: {error}") from error
            if not groups:
                raise EngineError(
                    f"progress_regex={session.progress_regex!r} has no group: write (?P<step>\\d+) where the step is"
                )
        self._interpreters.check(spec.python, self._worker_env(spec))

    def _accept(self, job: JobRecord, spec: GangSpec) -> GangRecord:
        gang = GangRecord(
            generation=spec.generation,
            incarnation=spec.incarnation,
            incarnation_dir=str(spec.incarnation_dir),
            placement=spec.placement,
            plain=spec.session.progress_regex is not None or spec.session.progress_file is not None,
            grace_s=spec.grace_s,
        )
        spec.incarnation_dir.mkdir(parents=True, exist_ok=True)
        job.latest = spec.generation
        job.incarnation_dirs[spec.incarnation] = str(spec.incarnation_dir)
        job.gangs[spec.generation] = gang
        self._jobs[spec.job_id] = job
        self._mark_told(job, before=spec.generation)
        return gang

    def _mark_told(self, job: JobRecord, before: int) -> None:
        """Write down who must leave, before anybody is told."""
        for gang in job.gangs.values():
            if gang.generation < before and not self._has_ended(job, gang):
                gang.told = gang.started
                gang.dropped = not gang.started
        self._save(job)

    def _tell_earlier(self, job: JobRecord, gang: GangRecord, spec: GangSpec) -> None:
        plan = Membership.read(spec.incarnation_dir)
        if plan is None or plan.generation < gang.generation:
            Membership(generation=gang.generation, mode=spec.mode, members=gang.members, reason=spec.reason).write(
                spec.incarnation_dir
            )
        reason = f"generation {spec.generation} replaces it" + (f": {spec.reason}" if spec.reason else "")
        for earlier in job.gangs.values():
            if earlier.told and earlier.generation < gang.generation and not self._has_ended(job, earlier):
                if earlier.incarnation_dir != gang.incarnation_dir:
                    self._write_empty_plan(earlier, gang.generation, reason)
                self._order(earlier, Order(spec.grace_s, reason))

    def _write_empty_plan(self, gang: GangRecord, generation: int, reason: str) -> None:
        folder = Path(gang.incarnation_dir)
        plan = Membership.read(folder)
        if plan is None or plan.members:
            Membership(generation=generation, mode=RescaleMode.RESTART, members=(), reason=reason).write(folder)

    def _order(self, gang: GangRecord, order: Order) -> None:
        for node_id in gang.nodes:
            self._folder(gang, node_id).write_order(order)

    def _fence_is_open(self, job: JobRecord, spec: GangSpec) -> bool:
        return all(
            gang.generation >= spec.generation
            or not gang.started
            or (gang.generation <= spec.cleared_generation and self._has_ended(job, gang))
            for gang in job.gangs.values()
        )

    # Starting it.

    def _check_slots(self, spec: GangSpec) -> None:
        for slot in spec.placement:
            holder = slots.holder_of(self._lock_dir, self._layout(slot).lock_name)
            if holder is not None:
                raise EngineError(f"slot {slot.node_id}:{slot.index} is held by {slots.describe(holder)}")

    def _start(self, job: JobRecord, gang: GangRecord, spec: GangSpec) -> None:
        spec.session.write()
        (spec.incarnation_dir / "logs").mkdir(exist_ok=True)
        Membership(generation=gang.generation, mode=spec.mode, members=gang.members, reason=spec.reason).write(
            spec.incarnation_dir
        )
        for node_id in gang.nodes:
            folder = self._folder(gang, node_id)
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.write_spec(self._supervisor_spec(gang, spec, node_id))
        gang.started = True
        self._save(job)
        self._start_supervisors(gang, spec)

    def _start_supervisors(self, gang: GangRecord, spec: GangSpec) -> None:
        """Start supervisors that never were there. One that wrote a status was, and is never started again."""
        for node_id in gang.nodes:
            folder = self._folder(gang, node_id)
            process = self._supervisors.get(folder.path)
            if folder.read_status() is not None or (process is not None and process.poll() is None):
                continue
            if process is not None:
                del self._supervisors[folder.path]
                last = folder.log.read_text(errors="replace").strip().splitlines()[-3:]
                raise EngineError(f"the supervisor on {node_id} does not start: {' / '.join(last) or 'no output'}")
            self._supervisors[folder.path] = self._spawn(folder, spec)

    def _spawn(self, folder: SupervisorFolder, spec: GangSpec) -> subprocess.Popen[bytes]:
        folder.renew()
        with folder.log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "elasticflow_airflow.engines.local.supervisor", str(folder.path)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder.path,
                env={**inherited(self._environ), "PYTHONPATH": str(self._bridge)},
                start_new_session=True,
            )
        assert process.stdin is not None
        # Secrets go over the pipe: neither on disk nor in the arguments. It holds them for as long as it lives.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps({"secret_env": dict(spec.secret_env)}).encode())
        return process

    def _supervisor_spec(self, gang: GangRecord, spec: GangSpec, node_id: str) -> SupervisorSpec:
        workers = tuple(
            WorkerSpec(
                worker_id=gang.worker_id(rank),
                rank=rank,
                slot_index=slot.index,
                lock_name=self._layout(slot).lock_name,
                env=self._slot_env(slot, spec),
                fork_trainer=self._layout(slot).gpu is None,
            )
            for rank, slot in enumerate(spec.placement)
            if slot.node_id == node_id
        )
        return SupervisorSpec(
            job_id=spec.job_id,
            incarnation=spec.incarnation,
            generation=spec.generation,
            node_id=node_id,
            world_size=len(spec.placement),
            incarnation_dir=str(spec.incarnation_dir),
            state_dir=str(self._state_dir),
            lock_dir=str(self._lock_dir),
            python=spec.python,
            env=self._worker_env(spec),
            workers=workers,
            lease_s=spec.lease_s,
            grace_s=spec.grace_s,
            address=self._nodes[node_id].address,
            progress_regex=spec.session.progress_regex,
            progress_file=spec.session.progress_file,
            log_segment_bytes=self._log_limits[0],
            log_segments=self._log_limits[1],
        )

    def _worker_env(self, spec: GangSpec) -> dict[str, str]:
        return worker_environment(self._environ, spec.env, str(self._bridge))

    def _slot_env(self, slot: Slot, spec: GangSpec) -> dict[str, str]:
        """What ties a worker to its slot. A thread count that the user set stays."""
        layout = self._layout(slot)
        threads = str(layout.threads)
        env = {name: threads for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name not in spec.env}
        env["ELASTICFLOW_CORES"] = ",".join(map(str, layout.cores))
        # Its own device first: cuda:0 is right. Then the job's others, so that peer-to-peer copies work.
        others = [self._layout(other).gpu for other in spec.placement if other != slot]
        env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for gpu in (layout.gpu, *others) if gpu)
        if layout.gpu and "NCCL_SOCKET_IFNAME" not in spec.env:
            env["NCCL_SOCKET_IFNAME"] = "lo"
        return env

    # Observing it.

    def _observe(self, job: JobRecord, gang: GangRecord) -> GangObservation:
        key = (job.job_id, gang.generation)
        if key in self._ended:
            return self._ended[key]
        statuses = {node_id: _status(self._folder(gang, node_id)) for node_id in gang.nodes}
        # Statuses first: whoever has ended then has no report to add.
        verdict_of_end = self._end_of(job, gang, statuses)
        reports = self._new_reports(job, gang)
        heard = self._heard.setdefault(key, Heard())
        heard.take(reports)
        if verdict_of_end is None:
            verdict = judge_living(gang, statuses, heard, self._settled(job, gang, statuses))
            if not gang.started:
                verdict = Verdict(GangState.PENDING)
        elif isinstance(verdict_of_end, Verdict):
            verdict = verdict_of_end
        else:
            verdict = judge_ended(gang, statuses, verdict_of_end, heard)
        observation = GangObservation(
            job_id=job.job_id,
            incarnation=gang.incarnation,
            generation=gang.generation,
            state=verdict.state,
            outcome=verdict.outcome,
            workers=self._worker_observations(gang, statuses) if gang.started else (),
            reports=reports,
            failure=verdict.failure,
            failed_rank=verdict.failed_rank,
        )
        if verdict.state is GangState.ENDED:
            self._ended[key] = _without_reports(observation)
        return observation

    def _has_ended(self, job: JobRecord, gang: GangRecord) -> bool:
        if (job.job_id, gang.generation) in self._ended:
            return True
        statuses = {node_id: _status(self._folder(gang, node_id)) for node_id in gang.nodes}
        return self._end_of(job, gang, statuses) is not None

    def _end_of(
        self, job: JobRecord, gang: GangRecord, statuses: Mapping[str, Status | None]
    ) -> Verdict | list[str] | None:
        """None while a process is left; else the nodes that were lost, or the verdict on a gang that never ran."""
        if gang.dropped:
            return Verdict(GangState.ENDED, GangOutcome.STOPPED)
        if gang.never_came:
            return Verdict(GangState.ENDED, GangOutcome.LOST, gang.never_came)
        if not gang.started:
            return None
        waiting: list[str] = []
        lost: list[str] = []
        for node_id, status in statuses.items():
            if status is None:
                waiting.append(node_id)
            elif not status.ended:
                alive = status.supervisor is not None and status.supervisor.is_alive()
                (waiting if alive else lost).append(node_id)
        # Read again what seemed lost: it may have written its last word between reading and looking.
        lost = [n for n in lost if (again := _status(self._folder(gang, n))) is None or not again.ended]
        if lost and waiting:
            self._order(gang, Order(0.0, f"the supervisor on {lost[0]} died", kill=True))
        if not lost and waiting and all(statuses[node_id] is None for node_id in waiting):
            return self._given_up(job, gang, waiting)
        if waiting or _end_leftovers(statuses[node_id] for node_id in lost):
            return None
        return lost

    def _given_up(self, job: JobRecord, gang: GangRecord, waiting: list[str]) -> Verdict | None:
        """Judge supervisors of which nothing was ever seen: a crash of the service may have come before them."""
        for node_id in waiting:
            process = self._supervisors.get(self._folder(gang, node_id).path)
            if process is not None and process.poll() is None:
                return None
            if not self._elapsed(job, gang, f"start {node_id}", START_LIMIT_S):
                return None
        if len(waiting) < len(gang.nodes):
            self._order(gang, Order(0.0, f"no supervisor came up on {waiting[0]}", kill=True))
            return None
        gang.never_came = f"no supervisor came up on {', '.join(waiting)}"
        self._save(job)
        return Verdict(GangState.ENDED, GangOutcome.LOST, gang.never_came)

    def _settled(self, job: JobRecord, gang: GangRecord, statuses: Mapping[str, Status | None]) -> bool:
        return all_trainers_there(gang, statuses) and self._elapsed(job, gang, "settle", SETTLED_S)

    def _elapsed(self, job: JobRecord, gang: GangRecord, what: str, limit_s: float) -> bool:
        now_s = time.monotonic()
        return now_s - self._first_seen_s.setdefault((job.job_id, gang.generation, what), now_s) > limit_s

    def _new_reports(self, job: JobRecord, gang: GangRecord) -> tuple[Report, ...]:
        """All new reports of a gang: in the order of each worker, and merged by time between them."""
        streams = []
        for member in gang.members:
            key = (job.job_id, member.worker_id)
            path = report_path(Path(gang.incarnation_dir), gang.generation, member.worker_id)
            stream = []
            for report, offset in read_reports(path, self._offsets.get(key, 0)):
                stream.append(report)
                self._offsets[key] = offset
            streams.append(stream)
        return tuple(heapq.merge(*streams, key=lambda report: report.at_s))

    def _worker_observations(
        self, gang: GangRecord, statuses: Mapping[str, Status | None]
    ) -> tuple[WorkerObservation, ...]:
        found = []
        for rank, slot in enumerate(gang.placement):
            worker_id = gang.worker_id(rank)
            status = statuses[slot.node_id]
            worker = status.workers.get(worker_id) if status is not None else None
            trainer = worker.trainer if worker is not None else None
            found.append(
                WorkerObservation(
                    worker_id=worker_id,
                    rank=rank,
                    slot=slot,
                    pid=trainer.pid if trainer is not None and worker is not None and not worker.ended else None,
                    exit_code=worker.exit_code if worker is not None else None,
                    log_name=worker_id,
                )
            )
        return tuple(found)

    # Small things.

    def _renew(self, job: JobRecord) -> None:
        for gang in job.gangs.values():
            if gang.started and not self._has_ended(job, gang):
                for node_id in gang.nodes:
                    self._folder(gang, node_id).renew()

    def _layout(self, slot: Slot) -> SlotLayout:
        node = self._nodes.get(slot.node_id)
        if node is None or not 0 <= slot.index < len(node.slots):
            there = ", ".join(f"{n.node_id} ({len(n.slots)} slots)" for n in self._nodes.values())
            raise EngineError(f"there is no slot {slot.node_id}:{slot.index}; there are {there}")
        return node.slots[slot.index]

    def _folder(self, gang: GangRecord, node_id: str) -> SupervisorFolder:
        return SupervisorFolder.of(Path(gang.incarnation_dir), gang.generation, node_id)

    def _save(self, job: JobRecord) -> None:
        job.save(self._records_dir / f"{job.job_id}.json")


def _status(folder: SupervisorFolder) -> Status | None:
    return folder.read_status()


def _end_leftovers(statuses: Iterator[Status | None] | Sequence[Status | None]) -> bool:
    """Kill what a dead supervisor left; True while something is left. The kernel was there first, nearly always."""
    left = False
    for status in statuses:
        for worker in status.workers.values() if status is not None else ():
            processes = [worker.agent] if worker.agent is not None and worker.agent.is_alive() else []
            if worker.trainer is not None:
                # The group's number stays taken while a member lives; a younger leader is somebody else.
                group = members_of_group(worker.trainer.pid)
                processes += [p for p in group if p.pid != worker.trainer.pid or p == worker.trainer]
            for process in processes:
                process.kill()
                left = True
    return left


def _without_reports(observation: GangObservation) -> GangObservation:
    return GangObservation(
        job_id=observation.job_id,
        incarnation=observation.incarnation,
        generation=observation.generation,
        state=observation.state,
        outcome=observation.outcome,
        workers=observation.workers,
        failure=observation.failure,
        failed_rank=observation.failed_rank,
    )


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn what the disk refuses into an error that says where and what to do."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "the disk is full: free some space, or move the state directory ([elasticflow] state_dir)"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            advice = f"uid {os.getuid()} may not write there: check owner and mode, or set another state directory"
        else:
            advice = os.strerror(error.errno) if error.errno else "see the cause"
        raise EngineError(f"cannot write {where}: {advice} ({error})") from error
