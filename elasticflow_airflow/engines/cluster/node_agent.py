"""The node agent: runs on a machine what the service has decided, and tells it what goes on there.

Nothing essential is in its memory: supervisors are processes of their own, and a new agent over the same folder finds
them. A script can write anything into its job's folder: what goes wrong there concerns that job alone.
It may not import Airflow, torch or the store.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import logging
import secrets
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from elasticflow_airflow.engines.cluster import job_folder
from elasticflow_airflow.engines.cluster.job_folder import Direction, Place, is_heartbeat
from elasticflow_airflow.engines.cluster.leave_notice import leaving_at
from elasticflow_airflow.engines.cluster.messages import (
    VERSION,
    EnvironmentAnswer,
    EnvironmentRequest,
    FilePart,
    Introduction,
    Probe,
    Pull,
    PullAnswer,
    Push,
    PushAnswer,
    Recall,
    RecallAnswer,
    Seal,
    SupervisorState,
)
from elasticflow_airflow.engines.cluster.recall import Recalled, files_here
from elasticflow_airflow.engines.cluster.shared_storage import answer_probe, open_shared_storage
from elasticflow_airflow.engines.job_files import remove
from elasticflow_airflow.engines.local.files.generation_folder import Status, SupervisorFolder, SupervisorSpec
from elasticflow_airflow.engines.local.files.last_read import LastRead, stamp_of
from elasticflow_airflow.engines.local.machine import stacks
from elasticflow_airflow.engines.local.machine.layout import NodeLayout
from elasticflow_airflow.engines.local.machine.processes import ProcessId, boot_id
from elasticflow_airflow.engines.local.node_manager import NodeManager
from elasticflow_airflow.engines.local.workers.warm_pool import WarmPool
from elasticflow_airflow.engines.port import EngineError
from elasticflow_airflow.runtime.protocol import Membership, ReportKind, membership_path, write_atomic
from elasticflow_airflow.scheduler_core.model.values import Slot

PART_BYTES = 256 * 1024
"""Most of one growing file in one answer."""
ANSWER_BYTES = 4 << 20
"""Most of all files in one answer, but for one that is larger; the rest comes with the next."""
LOOK_S, CALM_LOOK_S = 0.05, 0.5
"""Period with which a waiting request looks for changes, and where workers only train on (it is calm)."""
CALM_AFTER_S = 60.0
"""It is calm so many seconds after the last order of the service, or the last change that somebody waits for."""
REST_S = 10.0
"""An incarnation without a running supervisor is looked at for this long after the last change."""
ENDED_LATELY_S = 3600.0
"""At its start, an agent also tells of supervisors that have ended since this long: the one before may have died."""
CODE_REST_S = 24 * 3600.0
"""Code that no job uses is kept for this long after it came: the next run has probably the same."""
_UNREADABLE = b'{"unreadable": "a script has made something else of this file"}'
_TRASH = ".trash-"
_OF_PROGRESS = [f'"kind":"{kind}"'.encode() for kind in (ReportKind.PROGRESS, ReportKind.WORKER)]
_OF_TRAINING = [*_OF_PROGRESS, f'"kind":"{ReportKind.CHECKPOINT}"'.encode()]

logger = logging.getLogger("elasticflow.node")


class EarlierRequestError(Exception):
    """The request is from a service that another one has replaced, or older than one that was handled already."""


@dataclass(slots=True)
class _Seen:
    stamp: tuple[int, int, int]
    version: int


@dataclass(slots=True)
class _Watched:
    """One incarnation that has, or may get, supervisors here."""

    changed_s: float
    seen: dict[str, _Seen] = field(default_factory=dict)
    """By path, the files that are sent whole."""
    held: set[str] = field(default_factory=set)
    """Those that have changed, and whose time to be sent has not come."""
    given: dict[str, bytes] = field(default_factory=dict)
    """By path, what was sent here: it is not sent back."""
    workers: dict[str, set[str]] = field(default_factory=dict)
    """By supervisor folder, the ids of its workers."""


class NodeAgent:
    """What one machine does for the service. Thread-safe.

    ``state_dir`` is its own, ``shared_dir`` (a folder or URL) that of all nodes and the service. ``token`` is the
    secret that service and agents share. ``warm_imports`` as for the local engine; ``notice_file``: see
    ``leave_notice.py``. Raises OSError when the folders cannot be used, and ValueError when the epoch cannot be read.
    """

    def __init__(
        self,
        state_dir: Path,
        shared_dir: Path | str,
        nodes: Sequence[NodeLayout],
        lock_dir: Path,
        environ: Mapping[str, str],
        token: str,
        warm_imports: Sequence[str] | None = None,
        notice_file: Path | None = None,
    ) -> None:
        self._notice_file = notice_file
        self._root, self._storage = state_dir.resolve(), open_shared_storage(shared_dir)
        (self._root / "jobs").mkdir(mode=0o700, parents=True, exist_ok=True)
        pool = None if warm_imports is None else WarmPool(warm_imports, self._root / "pool")
        self._manager = NodeManager(self._root, nodes, lock_dir, environ, pool)
        self._seal = Seal(token)
        self._lock = threading.RLock()
        self._instance = secrets.token_hex(8)
        self._push_number = 0
        self._epoch_path = self._root / "epoch"
        self._epoch = self._epoch_on_disk = _read_epoch(self._epoch_path)
        """The highest epoch seen: a service with a lower one was replaced. On disk, since agents are started anew."""
        self._version = 1
        self._turn = 0
        self._told: tuple[object, ...] = ({}, {}, None)
        """The states of supervisors and slots, and when the machine goes away, in the last answer."""
        self._told_version = 0
        """As of which version they are so."""
        self._statuses, self._plans = LastRead[Status](), LastRead[Membership]()
        self._discarded: set[str] = set()
        """Incarnations whose files are to be deleted."""
        self._theirs: dict[str, int] = {}
        """By growing file, how much of it the service has."""
        self._stirred_s = time.monotonic()
        """When the service last ordered something, or something changed that somebody waits for (monotonic)."""
        self._is_behind = False
        """Whether there is more to tell than the last answer held."""
        self._aside = ThreadPoolExecutor(4, "elasticflow-node")
        """For what takes long: the lock is not held for it."""
        self._checks: dict[str, Future[None]] = {}
        """By interpreter, the checks that are under way."""
        self._complaints: set[str] = set()
        now_s = time.monotonic()
        self._watched = {
            incarnation: _Watched(now_s)
            for incarnation in job_folder.unfinished(self._root, self._manager.nodes, _ended_long_ago)
        }
        for trash in self._root.glob(f"{_TRASH}*"):
            self._aside.submit(remove, trash)

    def introduce(self) -> Introduction:
        """Return who this is."""
        return Introduction(
            version=VERSION,
            instance=self._instance,
            machine_id=_machine_id(),
            epoch=self._epoch,
            now_s=time.time(),
            shared_dir=self._storage.where,
            facts=self._manager.facts(),
            torch=_torch_version(),
        )

    def probe(self, probe: Probe) -> None:
        """Read from and write to the shared storage. Raises ValueError when it is another one, and OSError."""
        answer_probe(self._storage, probe.name, probe.content, self._instance)

    @property
    def root(self) -> Path:
        """Its state directory."""
        return self._root

    # -- what is to be

    def push(self, push: Push) -> PushAnswer:
        """Write files, renew leases and start supervisors; what is refused, and why, is in the answer.

        Raises EarlierRequestError, and OSError when the epoch cannot be kept.
        """
        with self._lock:
            self._check_epoch(push.epoch)
            self._keep_epoch()
            if push.number <= self._push_number:
                raise EarlierRequestError("a later request was handled before this one")
            self._push_number = push.number
            orders = [file for file in push.files if not _is_of_the_course(file.path)]
            if orders or push.starts or push.leaving_jobs or push.discarded:
                self._stirred_s = time.monotonic()
            answer = PushAnswer(instance=self._instance)
            for file in push.files:
                with self._refusing(answer.refused, file.path):
                    self._take(file)
            for folder in push.renewed:
                with self._refusing(answer.refused, folder):
                    self._supervisor(folder).renew()
                    self._watch(job_folder.incarnation_of(folder))
            for job_id in push.renewed_jobs:
                self._manager.renew(job_id)
            for job_id in push.leaving_jobs:
                self._manager.ask_to_leave(job_id)
            for start in push.starts:
                with self._refusing(answer.failures, start.path):
                    self._start(start.path, self._seal.open(start.sealed_env), answer)
            for incarnation in push.discarded:
                with self._refusing(answer.refused, incarnation):
                    if job_folder.place_of(f"{incarnation}/session.json") is None:
                        raise ValueError(f"{incarnation!r} is not the folder of an incarnation")
                    self._discarded.add(incarnation)
            self._discard()
            return answer

    @contextmanager
    def _refusing(self, refused: dict[str, str], what: str) -> Iterator[None]:
        """Note why something cannot be done: a script can have made anything of the files."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  (the answer says it, and the other parts of the request are handled)
            refused[what] = str(error) or type(error).__name__

    def _take(self, file: FilePart) -> None:
        place = job_folder.place_of(file.path)
        if place is None or place.direction is Direction.UP or place.node_id not in (None, *self._manager.nodes):
            raise ValueError(f"{file.path!r} is not a file that is sent here")
        watched = self._watch(place.incarnation)
        if place.worker_id is not None and place.worker_id in self._own_workers(place.incarnation):
            return
        self._storage.make_incarnation(self._root, place.incarnation)
        path = self._root / file.path
        if file.offset is not None:
            job_folder.write_part(path, file.offset, file.data)
        elif watched.given.get(file.path) != file.data and not self._knows_better(path, file.data):
            job_folder.write_whole(path, file.data)
            watched.given[file.path] = file.data

    @staticmethod
    def _knows_better(path: Path, data: bytes) -> bool:
        """Return whether a file need not be written.

        It has this content already, or a supervisor whose lease has expired has written a plan without members: the
        plan of the same generation must not bring them back.
        """
        if job_folder.read_whole(path) == data:
            return True
        if path.name != "membership.json":
            return False
        try:
            here = Membership.read(path.parent)
            return here is not None and not here.members and here.generation >= json.loads(data)["generation"]
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return False  # A script has damaged it.

    def _start(self, path: str, secret_env: Mapping[str, str], answer: PushAnswer) -> None:
        """Start a supervisor, or say in the answer what has to come first. Raises EngineError and others."""
        folder = self._supervisor(path)
        # Its files may have come long before, until the interpreter was checked or the code was there.
        self._watch(job_folder.incarnation_of(path))
        spec = folder.read_spec()
        code_dir = Path(spec.code_dir)
        if not code_dir.is_dir():
            if not code_dir.is_relative_to(self._root):
                raise EngineError(f"the code {code_dir} is not on {spec.node_id}: it must be on every node")
            answer.lacking[path] = str(code_dir.relative_to(self._root))
        elif not self._is_checked(spec):
            answer.waiting.append(path)
        elif folder.read_status() is None:
            (Path(spec.incarnation_dir) / "logs").mkdir(mode=0o700, exist_ok=True)
            self._manager.spawn(spec.node_id, folder, secret_env)

    def _is_checked(self, spec: SupervisorSpec) -> bool:
        """Return whether the check of an interpreter is over; it takes seconds, or a minute. Raises EngineError.

        One of an environment was checked when that was built.
        """
        if spec.requirements:
            return self._manager.prepare_environment(spec.base_python, spec.requirements)
        check = self._checks.get(spec.python)
        if check is None:
            check = self._aside.submit(self._manager.check_interpreter, spec.python, spec.env)
            self._checks[spec.python] = check
        if not check.done():
            return False
        del self._checks[spec.python]  # One that is good is known to be from now on.
        check.result()
        return True

    def prepare_environment(self, asked: EnvironmentRequest) -> EnvironmentAnswer:
        """Say whether an environment is there, and have it built otherwise."""
        try:
            python = asked.python or self._manager.facts().python
            return EnvironmentAnswer(ready=self._manager.prepare_environment(python, asked.requirements))
        except EngineError as error:
            return EnvironmentAnswer(failure=str(error))

    def _supervisor(self, path: str) -> SupervisorFolder:
        place = job_folder.place_of(f"{path}/spec.json")
        if place is None or place.node_id not in self._manager.nodes:
            raise ValueError(f"{path!r} is not the folder of a supervisor here")
        return SupervisorFolder(self._root / path)

    def _discard(self) -> None:
        """Delete incarnations, whose checkpoints are elsewhere, once nothing runs, and code that no other one uses."""
        over = {incarnation for incarnation in self._discarded if not self._runs(incarnation)}
        self._discarded -= over
        for incarnation in over:
            self._unwatch(incarnation)
            self._throw_away(self._root / incarnation)
        if over:
            used = {_code_of(path) for path in self._root.glob("jobs/*/*/supervisors/*/spec.json")}
            for code in (self._root / "snapshots").glob("*"):
                if str(code) not in used and time.time() - code.stat().st_mtime > CODE_REST_S:
                    self._throw_away(code)

    def _throw_away(self, folder: Path) -> None:
        """Take a folder out of the way at once, and delete it aside: it may be large."""
        trash = self._root / f"{_TRASH}{secrets.token_hex(8)}"
        try:
            folder.rename(trash)
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s cannot be deleted: %s", folder, error)
            return
        self._aside.submit(remove, trash)

    # -- what is

    def pull(self, pull: Pull) -> PullAnswer:
        """Return what has changed since a version. Raises EarlierRequestError."""
        with self._lock:
            self._check_epoch(pull.epoch)
            try:
                self._keep_epoch()
            except OSError as error:  # On a full disk the node is to be heard all the same; nothing is done by this.
                self._complain(self._epoch_path, error)
            if pull.version == 0:
                self._theirs.clear()
            self._theirs |= pull.sizes
            self._manager.reap()
            self._discard()
            supervisors = self._look_at_supervisors()
            holders = {
                node_id: [self._manager.holder(Slot(node_id, index)) for index in range(len(node.slots))]
                for node_id, node in self._manager.nodes.items()
            }
            files = self._changed_files(pull.version)
            # The service does not know of these ends: until it does, the supervisors count as running.
            for path in (path for watched in self._watched.values() for path in watched.held):
                if path.endswith("/status.json"):
                    supervisors[path.removesuffix("/status.json")] = SupervisorState.ALIVE
            leaves_at = leaving_at(self._notice_file)
            if self._told != (supervisors, holders, leaves_at):
                self._told = (supervisors, holders, leaves_at)
                self._version += 1
                self._told_version = self._version
            return PullAnswer(
                instance=self._instance,
                version=self._version,
                now_s=time.time(),
                files=files,
                supervisors=supervisors,
                holders=holders,
                leaving_at=leaves_at,
            )

    def is_urgent(self, answer: PullAnswer, version: int) -> bool:
        """Return whether somebody waits for what has changed since a version: not for signs of life and progress."""
        is_told = self._told_version > version
        if is_told or not all(_can_wait(file, _OF_TRAINING) for file in answer.files):
            self._stirred_s = time.monotonic()
        return is_told or not all(_can_wait(file, _OF_PROGRESS) for file in answer.files)

    @property
    def is_calm(self) -> bool:
        """Whether workers only train on, have done so for a while, and all of it has been told."""
        return not self._is_behind and time.monotonic() - self._stirred_s > CALM_AFTER_S

    @property
    def look_s(self) -> float:
        """Seconds until the next look for changes: each costs, for all jobs here, and mostly finds nothing."""
        return CALM_LOOK_S if self.is_calm else LOOK_S

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise EarlierRequestError("another service has taken over this node")
        if epoch > self._epoch:
            self._epoch, self._push_number = epoch, 0

    def _keep_epoch(self) -> None:
        """Write the epoch to disk before anything is done in it. Raises OSError."""
        if self._epoch != self._epoch_on_disk:
            write_atomic(self._epoch_path, f"{self._epoch}\n".encode())
            self._epoch_on_disk = self._epoch

    def recall(self, recall: Recall) -> RecallAnswer:
        """Return what is here of jobs, as much as an answer holds. Raises EarlierRequestError, and OSError.

        From then on a service of a lower epoch changes nothing here, so that this remains true.
        """
        with self._lock:
            self._check_epoch(recall.epoch)
            self._keep_epoch()
            self._manager.reap()
            nodes = self._manager.nodes
            running = job_folder.unfinished(self._root, nodes, job_folder.has_ended) - self._discarded
            lately = job_folder.unfinished(self._root, nodes, _ended_long_ago) - self._discarded - running
            answer = RecallAnswer(instance=self._instance, version=self._version, ended=sorted(lately))
            if not recall.after:
                self._theirs.clear()
                for incarnation in lately:
                    self._watched[incarnation] = _Watched(time.monotonic())  # All of it is told by pulling.
            size = 0
            for incarnation in sorted(name for name in running if name > recall.after):
                if size >= ANSWER_BYTES:
                    return answer
                watched = self._watch(incarnation)
                answer.last = incarnation
                try:
                    found = self._recalled(incarnation, watched)
                except Exception as error:  # noqa: BLE001  (its script has damaged something: the others are told)
                    self._complain(self._root / incarnation, error)
                    watched.seen.clear()
                    continue
                answer.files += found.files
                answer.copies += found.copies
                size += sum(len(part.data) for part in (*found.files, *found.copies))
            answer.last, answer.version = None, self._version
            return answer

    def _recalled(self, incarnation: str, watched: _Watched) -> Recalled:
        """Return what is here of an incarnation; whatever of it changes later, or is left out, is told by pulling."""
        whole, _ = self._look_at(incarnation, watched)
        found = files_here(self._root, incarnation, self._manager.nodes, self._own_workers(incarnation))
        watched.held |= {path for path in whole if path[-12:] == "/status.json"} - {part.path for part in found.files}
        return found

    def _look_at_supervisors(self) -> dict[str, SupervisorState]:
        """Look before the files are read: what a supervisor wrote before it died is then among them."""
        found: dict[str, SupervisorState] = {}
        for incarnation in self._watched:
            for _, path in job_folder.supervisor_folders(self._root, incarnation, self._manager.nodes):
                state = self._state_of(SupervisorFolder(self._root / path))
                if state is not None:
                    found[path] = state
        return found

    def _state_of(self, folder: SupervisorFolder) -> SupervisorState | None:
        """Return the state of a supervisor; None when it has ended and said so."""
        try:
            status = self._statuses.get(folder.status_file, folder.read_status)
            if status is None:
                return SupervisorState.COMING if self._manager.is_coming_up(folder) else SupervisorState.DEAD
            if status.ended:
                return None
            if self._manager.is_alive(folder, status):
                return SupervisorState.ALIVE
            left = self._manager.end_leftovers([(folder, status)])
            return SupervisorState.DYING if left else SupervisorState.DEAD
        except Exception as error:  # noqa: BLE001  (a script has damaged it: the slots say whether its workers live)
            self._complain(folder.path, error)
            return SupervisorState.ALIVE if self._holds_slots(folder) else SupervisorState.DEAD

    def _holds_slots(self, folder: SupervisorFolder) -> bool:
        job_id, generation = folder.path.parents[2].name, int(folder.path.name[1:].partition("-")[0])
        return any(holder.get("generation") == generation for holder in self._manager.held_by(job_id).values())

    def _runs(self, incarnation: str) -> bool:
        folders = job_folder.supervisor_folders(self._root, incarnation, self._manager.nodes)
        states = [self._state_of(SupervisorFolder(self._root / path)) for _, path in folders]
        return any(state not in (None, SupervisorState.DEAD) for state in states)

    def _changed_files(self, version: int) -> list[FilePart]:
        """Return changed files, as much as an answer holds; each time another incarnation comes first."""
        answer: list[FilePart] = []
        room = ANSWER_BYTES
        self._turn += 1
        incarnations = list(self._watched)
        first = self._turn % max(1, len(incarnations))
        for incarnation in incarnations[first:] + incarnations[:first]:
            watched = self._watched[incarnation]
            try:
                parts = self._changed_of(incarnation, watched, version, room)
            except Exception as error:  # noqa: BLE001  (its script has damaged something: the others are told)
                self._complain(self._root / incarnation, error)
                continue
            answer += parts
            room -= sum(len(part.data) for part in parts)
            if not watched.held and time.monotonic() - watched.changed_s > REST_S and not self._runs(incarnation):
                self._unwatch(incarnation)
        self._is_behind = room < PART_BYTES or any(watched.held for watched in self._watched.values())
        return answer

    def _watch(self, incarnation: str) -> _Watched:
        """Look at an incarnation from now on: the service has just sent something for it."""
        watched = self._watched.setdefault(incarnation, _Watched(0.0))
        watched.changed_s = time.monotonic()
        return watched

    def _unwatch(self, incarnation: str) -> None:
        self._watched.pop(incarnation, None)
        self._plans.forget(membership_path(self._root / incarnation))
        for _, path in job_folder.supervisor_folders(self._root, incarnation, self._manager.nodes):
            self._statuses.forget(SupervisorFolder(self._root / path).status_file)

    def _changed_of(self, incarnation: str, watched: _Watched, version: int, room: int) -> list[FilePart]:
        answer: list[FilePart] = []
        whole, growing = self._look_at(incarnation, watched)
        whole = [path for path in whole if watched.seen[path].version > version or path in watched.held]
        statuses = {path: job_folder.read_whole(self._root / path) for path in whole if path[-12:] == "/status.json"}
        behind: set[str] = set()
        for path, place in growing:
            size, theirs = self._size(path), self._theirs.get(path, 0)
            if size <= theirs:
                continue
            watched.changed_s = time.monotonic()
            data = job_folder.read_part(self._root / path, theirs, min(PART_BYTES, max(room, 0)))
            if data:
                room -= len(data)
                answer.append(FilePart(path=path, data=data, offset=theirs))
            if theirs + len(data) < size and place.worker_id is not None:
                behind.add(place.worker_id)
        for path in whole:
            content = statuses[path] if path in statuses else job_folder.read_whole(self._root / path)
            if content is None and path not in statuses:
                continue
            if content is None:
                content = _UNREADABLE  # The service is to find the status unreadable, too.
            if (room < len(content) and room < ANSWER_BYTES) or (behind and behind & _ended_workers(content)):
                watched.held.add(path)  # The end of a worker is told after all that it has said.
                continue
            if path in watched.held:
                watched.held.discard(path)
                self._version += 1
                watched.seen[path].version = self._version
            room -= len(content)
            answer.append(FilePart(path=path, data=content))
        return answer

    def _look_at(self, incarnation: str, watched: _Watched) -> tuple[list[str], list[tuple[str, Place]]]:
        """Return the files that are sent whole, with new versions for changed ones, and those that grow."""
        own = self._own_workers(incarnation)
        paths = job_folder.files_up(self._root, incarnation, self._manager.nodes)
        if sum(map(is_heartbeat, paths)) < 2 and self._is_alone(incarnation):
            paths = [path for path in paths if not is_heartbeat(path)]  # Nobody compares it with those of others.
        whole, growing = [], []
        for path in paths:
            place, stamp = job_folder.place_of(path), stamp_of(f"{self._root}/{path}")
            if place is None or stamp is None or (place.worker_id is not None and place.worker_id not in own):
                continue
            if place.grows:
                growing.append((path, place))
                continue
            before = watched.seen.get(path)
            if before is None or before.stamp != stamp:
                given = watched.given.get(path)
                if given is not None and job_folder.read_whole(self._root / path) == given:
                    continue
                self._version += 1
                watched.seen[path] = _Seen(stamp, self._version)
                watched.changed_s = time.monotonic()
            whole.append(path)
        return whole, growing

    def _is_alone(self, incarnation: str) -> bool:
        """Return whether the plan of a job has one worker at most."""
        folder = self._root / incarnation
        try:
            plan = self._plans.get(membership_path(folder), lambda: Membership.read(folder))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            return False  # A script has damaged it.
        return plan is not None and len(plan.members) < 2

    def _own_workers(self, incarnation: str) -> set[str]:
        """Return the ids of the workers that were started here."""
        known = self._watched[incarnation].workers if incarnation in self._watched else {}
        for _, path in job_folder.supervisor_folders(self._root, incarnation, self._manager.nodes):
            if path not in known:
                try:
                    spec = SupervisorFolder(self._root / path).read_spec()
                    known[path] = {str(worker.worker_id) for worker in spec.workers}
                except (OSError, ValueError, TypeError, RecursionError):
                    continue  # It is still on its way, or a script has damaged it.
        return set(itertools.chain.from_iterable(known.values()))

    def _size(self, path: str) -> int:
        stamp = stamp_of(f"{self._root}/{path}")
        return 0 if stamp is None else min(stamp[2], job_folder.LARGEST_GROWN_BYTES)

    def _complain(self, path: Path, error: Exception) -> None:
        """Log what is wrong with a job's files, once."""
        said = f"{path}: {error or type(error).__name__}"
        if said not in self._complaints and len(self._complaints) < 1000:
            self._complaints.add(said)
            logger.warning("what a job's folder holds cannot be used: %s", said)

    def stacks(self, trainers: Mapping[str, tuple[Mapping[str, object] | None, str]]) -> dict[str, str]:
        """Return the stacks of trainers here, by worker id (see the port)."""
        asked: dict[str, tuple[ProcessId | None, Path]] = {}
        with self._lock:
            for worker_id, (process, path) in trainers.items():
                incarnation = job_folder.incarnation_of(path)
                if path != f"{incarnation}/stacks/{worker_id}.txt" or worker_id not in self._own_workers(incarnation):
                    raise ValueError(f"{path!r} is not the file for the stacks of a worker here")
                asked[worker_id] = (ProcessId.from_json(None if process is None else dict(process)), self._root / path)
        return stacks.ask(asked)

    def running(self) -> list[tuple[ProcessId, SupervisorFolder]]:
        """Return the supervisors that hold slots here."""
        return self._manager.supervisors()

    def kill_everything(self) -> None:
        """Kill all supervisors here; the kernel kills their workers with them."""
        with self._lock:
            self._manager.kill_supervisors()

    def close(self) -> None:
        """Release everything; supervisors go on."""
        with self._lock:
            self._manager.let_go()
        self._aside.shutdown(wait=False, cancel_futures=True)


def _ended_long_ago(path: Path) -> bool:
    try:
        status = SupervisorFolder(path).read_status()
        since_s = time.time() - (path / "status.json").stat().st_mtime
    except Exception:  # noqa: BLE001  (a script has damaged it, or it has not begun)
        return False
    return status is not None and status.ended and since_s > ENDED_LATELY_S


def _read_epoch(path: Path) -> int:
    """Return the epoch on disk; 0 before any service came. Raises OSError, and ValueError when it is damaged."""
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        return 0
    if not text.isdecimal():
        raise ValueError(f"{path} does not hold the number of a service: remove it once no former service is running")
    return int(text)


def _code_of(spec: Path) -> str | None:
    try:
        found = json.loads(job_folder.read_whole(spec) or b"{}").get("code_dir")
    except (ValueError, AttributeError, RecursionError):
        return None  # A script has damaged it.
    return found if isinstance(found, str) else None


def _is_of_the_course(path: str) -> bool:
    """Return whether a file that comes from other nodes only says that their workers go on, or how."""
    return is_heartbeat(path) or path.split("/")[3:4] == ["reports"]


def _can_wait(file: FilePart, kinds: Sequence[bytes]) -> bool:
    """Return whether a file only says that workers go on, and there is not more of it than fits into an answer.

    ``kinds``: of reports that say no more, as they stand in the file.
    """
    if len(file.data) >= PART_BYTES:
        return False
    folder = file.path.split("/")[3]
    if folder == "reports":
        return sum(file.data.count(kind) for kind in kinds) == file.data.count(b"\n")
    return folder == "logs" or is_heartbeat(file.path)


def _ended_workers(status: bytes) -> set[str]:
    """Return the workers that a status says have ended."""
    try:
        workers = json.loads(status)["workers"]
        return {worker_id for worker_id, worker in workers.items() if worker["ended"]}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return set()


def _torch_version() -> str | None:
    try:
        return importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None


def _machine_id() -> str:
    """Return an id that stays the same when the machine, or the carrier of this agent, is started again."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        if path.is_file() and (text := path.read_text().strip()):
            return text
    return boot_id()
