"""An engine without processes: gangs run in modelled time, for tests of the service and for trying things out.

It implements the port exactly (fence, generations, leases, at-least-once reports) and can inject failures: workers
that die, gangs that are lost, calls that raise, a crash before or after any call. State that a real machine keeps when
the service is killed (the gangs) is in a :class:`FakeWorld`, separate from state that the service loses (which reports
it has seen).
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from elasticflow_airflow.engines.fake.behaviour import FakeBehaviour
from elasticflow_airflow.engines.fake.change_in_place import advance_job, base_of, begin, die, give_up, hang, staying_of
from elasticflow_airflow.engines.fake.gang import (
    CheckpointWriter,
    FakeGang,
    write_fake_checkpoint,
)
from elasticflow_airflow.engines.fake.journal import Journal
from elasticflow_airflow.engines.job_files import JobFolders
from elasticflow_airflow.engines.port import (
    EngineError,
    EngineNode,
    GangObservation,
    GangOutcome,
    GangSpec,
    LogChunk,
    SlotsHeldError,
)
from elasticflow_airflow.runtime.protocol import RescaleMode
from elasticflow_airflow.scheduler_core.model.values import Slot

__all__ = ["BEHAVIOUR_ENV", "FakeBehaviour", "FakeEngine", "FakeWorld", "fake_nodes"]

BEHAVIOUR_ENV = "ELASTICFLOW_FAKE"
"""Variable in a job's environment: a JSON object of the FakeBehaviour fields that this job overrides."""

CallHook = Callable[[str, str, str], None]
"""(method, job id or "", "before" or "after"): called around every engine call; may raise to model a crash."""


@dataclass(slots=True)
class FakeWorld:
    """The machines and the gangs on them. Survives restarts of the service, as an object or as a file."""

    jobs_dir: Path
    """Folder of the job files."""
    nodes: dict[str, EngineNode]
    clock: Callable[[], float] = time.time
    behaviour: FakeBehaviour = field(default_factory=FakeBehaviour)
    behaviours: dict[str, FakeBehaviour] = field(default_factory=dict)
    """By job id; other jobs use ``behaviour``."""
    state_file: Path | None = None
    write_checkpoint: CheckpointWriter = write_fake_checkpoint
    gangs: dict[tuple[str, int], FakeGang] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    troubles: dict[str, str] = field(default_factory=dict)
    """By job id: why its gangs cannot be observed, as if its script had damaged their files."""
    environment_s: float = 0.0
    """How long it takes to build an environment."""
    environments: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    """By interpreter and requirements: when they were asked for first."""
    journal: Journal | None = None
    """Stores the gangs in ``state_file``; None: they are not stored."""

    def __post_init__(self) -> None:
        if self.state_file is not None:
            self.journal = Journal(self.state_file)
            for gang in self.journal.read():
                self.gangs[gang.spec.job_id, gang.spec.generation] = gang

    def of(self, job_id: str) -> list[FakeGang]:
        """Return all gangs of a job, oldest generation first."""
        return sorted((gang for (owner, _), gang in self.gangs.items() if owner == job_id), key=_generation)

    def advance(self, job_id: str | None = None) -> None:
        """Advance all gangs to the present, or only those of ``job_id``."""
        now_s = self.clock()
        gangs: dict[str, list[FakeGang]] = {}
        for (owner, _), gang in self.gangs.items():
            if job_id is None or owner == job_id:
                gangs.setdefault(owner, []).append(gang)
        for its in gangs.values():
            advance_job(sorted(its, key=_generation), now_s, self.write_checkpoint)

    def on_slots(self, slots: Collection[Slot], but: str) -> list[FakeGang]:
        """Return the gangs of jobs other than ``but`` placed on any of these slots, advanced to the present."""
        wanted = frozenset(slots)
        found = [gang for gang in self.gangs.values() if not wanted.isdisjoint(gang.spec.placement)]
        others = [gang for gang in found if gang.spec.job_id != but]
        for job_id in {gang.spec.job_id for gang in others}:
            self.advance(job_id)
        return others

    def standing(self, job_id: str) -> list[object]:
        """Return a value that changes with every change of a job's gangs except those of time and leases."""
        return [
            (gang.spec.generation, gang.phase, gang.leave_s, gang.spec.cleared_generation) for gang in self.of(job_id)
        ]

    def next_turn_s(self) -> float:
        """Return the time of the next spontaneous event other than progress; infinity: never."""
        return min((gang.next_turn_s() for gang in self.gangs.values()), default=math.inf)

    def save(self, job_id: str | None = None) -> None:
        """Write all changes to the state file, if there is one; with ``job_id``, only those of its gangs."""
        if self.journal is not None:
            self.journal.write(self.gangs, None if job_id is None else [key for key in self.gangs if key[0] == job_id])


def fake_nodes(nodes: int = 1, slots: int = 4) -> tuple[EngineNode, ...]:
    """Return equal modelled nodes."""
    return tuple(EngineNode(node_id=f"node{i}", slots=slots, device="cpu", device_type="fake") for i in range(nodes))


def _generation(gang: FakeGang) -> int:
    return gang.spec.generation


class FakeEngine:
    """The engine port over a :class:`FakeWorld`. Thread-safe.

    ``FakeEngine(fake_nodes(2, 4), jobs_dir, clock=clock)`` creates its own world; ``engine.restarted()`` is what a
    restarted service would see. With ``state_file`` the world also survives the process.
    """

    def __init__(
        self,
        nodes: Sequence[EngineNode] | None = None,
        jobs_dir: Path | None = None,
        *,
        clock: Callable[[], float] = time.time,
        behaviour: FakeBehaviour | None = None,
        behaviours: Mapping[str, FakeBehaviour] | None = None,
        state_file: Path | None = None,
        write_checkpoint: CheckpointWriter = write_fake_checkpoint,
        on_call: CallHook | None = None,
        world: FakeWorld | None = None,
    ) -> None:
        if world is None:
            if jobs_dir is None:
                raise ValueError("jobs_dir is missing: where jobs have their files")
            world = FakeWorld(
                jobs_dir=jobs_dir,
                nodes={node.node_id: node for node in nodes or fake_nodes()},
                clock=clock,
                behaviour=behaviour or FakeBehaviour(),
                behaviours=dict(behaviours or {}),
                state_file=state_file,
                write_checkpoint=write_checkpoint,
            )
        self.world = world
        self.on_call = on_call
        self._errors: dict[str, list[EngineError]] = {}
        self._delivered: dict[tuple[str, int], int] = {}

    def restarted(self) -> FakeEngine:
        """Return a new engine over the same world, as after a service restart: all reports are delivered again."""
        return FakeEngine(world=self.world, on_call=self.on_call)

    @property
    def name(self) -> str:
        """Short name for logs."""
        return "fake"

    @property
    def files(self) -> JobFolders:
        """The job folders."""
        return JobFolders(self.world.jobs_dir)

    # The port.

    def inventory(self) -> tuple[EngineNode, ...]:
        """Return the present nodes."""
        self._call("inventory", "", "before")
        with self.world.lock:
            nodes = tuple(self.world.nodes.values())
        self._call("inventory", "", "after")
        return nodes

    def want_nodes(self, count: int, unneeded: Collection[str]) -> None:
        """Do nothing: nobody provides machines."""

    def problems(self) -> list[str]:
        """Return nothing: its nodes are always usable."""
        return []

    def prepare_environment(self, python: str, requirements: tuple[str, ...]) -> bool:
        """Return whether an environment is there: ``world.environment_s`` after it was asked for (see the port)."""
        self._call("prepare_environment", "", "before")
        for line in requirements:
            _, is_file, path = line.partition(" @ file://")
            if is_file and not Path(path).exists():
                raise EngineError(
                    f"the environment for requirements= could not be built: {line}: there is no such file"
                )
        with self.world.lock:
            asked_at = self.world.environments.setdefault((python, requirements), self.world.clock())
            return self.world.clock() >= asked_at + self.world.environment_s

    def apply(self, spec: GangSpec) -> None:
        """Start, keep or replace the gang of a job (see the port)."""
        self._call("apply", spec.job_id, "before")
        with self.world.lock:
            before = self.world.standing(spec.job_id)
            self._apply(spec)
            if self.world.standing(spec.job_id) != before:  # leases and changes of other jobs are saved by observe()
                self.world.save(spec.job_id)
        self._call("apply", spec.job_id, "after")

    def latest(self, job_id: str) -> int:
        """Return the highest generation on record; 0 when there is none."""
        with self.world.lock:
            return max((gang.spec.generation for gang in self.world.of(job_id)), default=0)

    def stop(self, job_id: str, grace_s: float, reason: str = "") -> None:
        """Order all workers of the job to save and leave."""
        json.dumps(reason)  # Real engines write it into a file.
        self._call("stop", job_id, "before")
        with self.world.lock:
            self.world.advance(job_id)
            for gang in self.world.of(job_id):
                gang.leave(self.world.clock(), grace_s)
            self.world.advance(job_id)
            self.world.save(job_id)
        self._call("stop", job_id, "after")

    def renew(self, job_id: str) -> None:
        """Renew the lease of the job's gangs."""
        self._call("renew", job_id, "before")
        with self.world.lock:
            self._renew(job_id)
        self._call("renew", job_id, "after")

    def observe(self) -> tuple[GangObservation, ...]:
        """Return every gang, with the reports that this engine object has not delivered yet."""
        self._call("observe", "", "before")
        with self.world.lock:
            self.world.advance()
            observations = []
            for key, gang in sorted(self.world.gangs.items()):
                if key[0] in self.world.troubles:
                    observations.append(replace(gang.observation(()), trouble=self.world.troubles[key[0]]))
                    continue
                fresh = tuple(gang.reports[self._delivered.get(key, 0) :])
                self._delivered[key] = len(gang.reports)
                observations.append(gang.observation(fresh))
            self.world.save()
        self._call("observe", "", "after")
        return tuple(observations)

    def forget(self, job_id: str) -> None:
        """Drop the ended gangs of a job."""
        self._call("forget", job_id, "before")
        with self.world.lock:
            self.world.advance(job_id)
            for gang in self.world.of(job_id):
                if gang.phase == "ended":
                    del self.world.gangs[job_id, gang.spec.generation]
                    self._delivered.pop((job_id, gang.spec.generation), None)
            self.world.save(job_id)
        self._call("forget", job_id, "after")

    def read_log(self, job_id: str, incarnation: int, worker_id: str, offset: int, limit: int) -> LogChunk:
        """Return the reports of a worker as text. Raises KeyError for a worker that never existed."""
        self._call("read_log", job_id, "before")
        with self.world.lock:
            self.world.advance()
            homes = [
                gang
                for gang in self.world.of(job_id)
                if gang.spec.incarnation == incarnation
                and gang.started
                and worker_id in [gang.worker_id(rank) for rank in range(gang.workers)]
            ]
            if not homes:
                raise KeyError(f"job {job_id} (incarnation {incarnation}) has no worker {worker_id!r}")
            text = "".join(
                f"{report.kind} step={report.step} {json.dumps(dict(report.data))}\n"
                for gang in homes
                for report in gang.reports
                if report.worker_id == worker_id
            ).encode()
            data = text[offset : offset + limit]
            lives = any(gang.worker_id(rank) == worker_id for gang in homes for rank in gang.living())
            at_end = not lives and offset + len(data) >= len(text)
        self._call("read_log", job_id, "after")
        return LogChunk(data, min(offset, len(text)), min(offset, len(text)) + len(data), at_end)

    def stacks(self, job_id: str) -> Mapping[str, str]:
        """Return a made-up stack for each live worker of a job, in the format of real ones."""
        with self.world.lock:
            self.world.advance()
            return {
                gang.worker_id(rank): "Current thread 0x0000000000000001 (most recent call first):\n"
                f'  File "{gang.spec.session.script or gang.spec.session.module}", line 1 in {gang.phase}\n'
                for gang in self.world.of(job_id)
                if gang.started
                for rank in gang.living()
            }

    def close(self) -> None:
        """Do nothing; the world continues."""

    # Interventions by tests.

    def fail_worker(self, job_id: str, rank: int = 0, exit_code: int = -9, message: str = "killed") -> None:
        """Let one worker of the training gang die, and the gang with it unless it can continue in place."""
        with self.world.lock:
            gang = self._running(job_id)
            gangs, worker_id = self.world.of(job_id), gang.worker_id(rank)
            if not die(gangs, worker_id, exit_code):
                gang.end(GangOutcome.FAILED, exit_code, f"rank {rank}: {message}", rank)
            self.world.save()

    def kill_worker(self, job_id: str, worker: str | int) -> None:
        """Kill a worker (its id, or its rank in the training gang). Raises KeyError when no such worker is alive."""
        with self.world.lock:
            gang = self._running(job_id)
            names = [gang.worker_id(rank) for rank in range(gang.workers)]
            worker_id = names[worker] if isinstance(worker, int) else worker
            if worker_id in names and worker_id not in gang.dead:
                self.fail_worker(job_id, names.index(worker_id))
            else:
                die(self.world.of(job_id), worker_id, -9)
            self.world.save()

    def hang_worker(self, job_id: str, rank: int) -> None:
        """Let a worker of the training gang hang, until a plan lists it as lost and it is killed."""
        with self.world.lock:
            gang = self._running(job_id)
            hang(self.world.of(job_id), gang, rank)
            self.world.save()

    def fail_joiner(self, job_id: str, exit_code: int = -9) -> None:
        """Kill a worker that is joining a training in place. Raises KeyError when none is joining."""
        with self.world.lock:
            self.world.advance()
            for gang in self.world.of(job_id):
                if gang.phase == "joining":
                    born = f"g{gang.spec.generation:06d}-"
                    joiner = next(name for name in reversed(gang.members) if name.startswith(born))
                    die([gang], joiner, exit_code)
                    self.world.save()
                    return
        raise KeyError(f"job {job_id} has no worker that is joining")

    def lose(self, job_id: str, message: str = "the supervisor is gone") -> None:
        """Let the newest generation's supervisor die, and its workers with it."""
        with self.world.lock:
            self._running(job_id).end(GangOutcome.LOST, -9, message)
            self.world.save()

    def spoil(self, job_id: str, trouble: str = "status.json does not hold what it should") -> None:
        """Make the files of a job unreadable from now on; its workers are not affected."""
        with self.world.lock:
            self.world.troubles[job_id] = trouble

    def set_busy(self, node_id: str, index: int, holder: str | None) -> None:
        """Mark a slot as held by a foreign holder; None releases it."""
        with self.world.lock:
            node = self.world.nodes[node_id]
            busy = {i: who for i, who in node.busy.items() if i != index}
            if holder is not None:
                busy[index] = holder
            self.world.nodes[node_id] = replace(node, busy=busy)

    def announce_leave(self, node_id: str, at: float | None) -> None:
        """Announce that a node goes away (UTC seconds); None: it stays."""
        with self.world.lock:
            self.world.nodes[node_id] = replace(self.world.nodes[node_id], leaving_at=at)

    def remove_node(self, node_id: str) -> None:
        """Let a node die: it leaves the inventory and every gang on it is lost."""
        with self.world.lock:
            self.world.advance()
            del self.world.nodes[node_id]
            for gang in self.world.gangs.values():
                if any(gang.spec.placement[rank].node_id == node_id for rank in gang.living()):
                    gang.end(GangOutcome.LOST, -9, f"node {node_id} is gone")
            self.world.save()

    def add_node(self, node: EngineNode) -> None:
        """Add a node."""
        with self.world.lock:
            self.world.nodes[node.node_id] = node

    def fail_next(self, method: str, message: str) -> None:
        """Make the next call of a method raise EngineError."""
        self._errors.setdefault(method, []).append(EngineError(message))

    # Internal.

    def _call(self, method: str, job_id: str, when: str) -> None:
        if self.on_call:
            self.on_call(method, job_id, when)
        if when == "before" and self._errors.get(method):
            raise self._errors[method].pop(0)

    def _running(self, job_id: str) -> FakeGang:
        self.world.advance()
        changing = ("joining", "switching", "thinning", "ended")
        gangs = [gang for gang in self.world.of(job_id) if gang.started and gang.phase not in changing]
        if not gangs:
            raise KeyError(f"job {job_id} has no running gang")
        return gangs[-1]

    def _renew(self, job_id: str) -> None:
        gangs = self.world.of(job_id)
        advance_job(gangs, self.world.clock(), self.world.write_checkpoint)
        for gang in gangs:
            gang.lease_ends_s = self.world.clock() + gang.spec.lease_s

    def _apply(self, spec: GangSpec) -> None:
        self._renew(spec.job_id)
        gangs = self.world.of(spec.job_id)
        if gangs and spec.generation < gangs[-1].spec.generation:
            return
        self._check(spec)
        current = self.world.gangs.get((spec.job_id, spec.generation))
        if current is None:
            current = FakeGang(spec=spec, behaviour=self._behaviour(spec), now_s=self.world.clock())
            if spec.mode is RescaleMode.IN_PLACE:
                self._change(current, gangs)
            else:  # no worker is ordered to leave for slots that others hold
                self._check_slots(spec, *gangs)
            self.world.gangs[spec.job_id, spec.generation] = current
        current.spec = replace(current.spec, cleared_generation=spec.cleared_generation, lease_s=spec.lease_s)
        current.lease_ends_s = self.world.clock() + spec.lease_s
        if spec.mode is RescaleMode.IN_PLACE:
            self.world.advance(spec.job_id)
            return
        earlier = [gang for gang in gangs if gang.spec.generation < spec.generation]
        if not earlier and current.phase != "pending":
            return
        for gang in earlier:
            gang.leave(self.world.clock(), spec.grace_s)
        self.world.advance(spec.job_id)
        if current.phase == "pending" and all(
            gang.phase == "ended" and (not gang.started or gang.spec.generation <= spec.cleared_generation)
            for gang in earlier
        ):
            self._check_slots(spec)
            current.start(self.world.clock())

    def _check(self, spec: GangSpec) -> None:
        if not spec.placement:
            raise EngineError(f"job {spec.job_id}: generation {spec.generation} has no slots; use stop()")
        for slot in spec.placement:
            node = self.world.nodes.get(slot.node_id)
            if node is None or not 0 <= slot.index < node.slots:
                raise EngineError(f"job {spec.job_id}: there is no slot {slot.node_id}:{slot.index}")

    def _change(self, change: FakeGang, gangs: list[FakeGang]) -> None:
        """Let the training gang continue in ``change``; a change already in progress is abandoned."""
        spec, base = change.spec, base_of(gangs)
        if base is None:
            raise EngineError(f"job {spec.job_id}: no gang is there that could go on in place; apply it by restart")
        staying = staying_of(base, spec.lost)
        if not staying:
            raise EngineError(f"job {spec.job_id}: no worker is left that could go on in place; apply it by restart")
        given_up = [gang for gang in gangs if gang.phase in ("joining", "switching")]
        joining = tuple(slot for slot in spec.placement if slot not in staying)
        self._check_slots(replace(spec, placement=joining), base, *given_up)
        give_up(gangs, self.world.clock())
        begin(change, base, gangs, self.world.clock())

    def _check_slots(self, spec: GangSpec, *but: FakeGang) -> None:
        """Raise SlotsHeldError when others or gangs of this world that are not in ``but`` hold a slot."""
        for slot in spec.placement:
            holder = self.world.nodes[slot.node_id].busy.get(slot.index)
            if holder is not None:
                raise SlotsHeldError({slot: holder})
        ours = self.world.of(spec.job_id)
        for gang in (*self.world.on_slots(spec.placement, spec.job_id), *ours):
            taken = {gang.spec.placement[rank] for rank in gang.living()} & set(spec.placement)
            if taken and not any(gang is one for one in but):
                slot = min(taken)
                raise SlotsHeldError({slot: f"job {gang.spec.job_id}"})

    def _behaviour(self, spec: GangSpec) -> FakeBehaviour:
        behaviour = self.world.behaviours.get(spec.job_id, self.world.behaviour)
        raw = spec.env.get(BEHAVIOUR_ENV)
        if raw is None:
            return behaviour
        try:
            return behaviour.changed(json.loads(raw))
        except ValueError as error:
            raise EngineError(f"{BEHAVIOUR_ENV}={raw!r} is not a fake behaviour: {error}") from error
