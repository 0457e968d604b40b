"""Manages what runs on one machine: what only the machine itself can do or see (see ``machines.py``)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticflow_airflow.engines.local.bridge import prepare_bridge
from elasticflow_airflow.engines.local.files.generation_folder import Status, SupervisorFolder, SupervisorSpec
from elasticflow_airflow.engines.local.inherited_variables import inherited
from elasticflow_airflow.engines.local.machine import slots, stacks
from elasticflow_airflow.engines.local.machine.interpreter import InterpreterCheck
from elasticflow_airflow.engines.local.machine.layout import NodeLayout
from elasticflow_airflow.engines.local.machine.processes import ProcessId, group_led_by
from elasticflow_airflow.engines.local.machine.virtual_environments import Environments
from elasticflow_airflow.engines.local.machines import Trainer
from elasticflow_airflow.engines.local.node_facts import NodeFacts, layout_of, threads_env
from elasticflow_airflow.engines.local.workers.supervisor import EXIT_NOT_NEEDED
from elasticflow_airflow.engines.local.workers.warm_pool import WarmPool
from elasticflow_airflow.engines.port import EngineError, EngineNode, SlotsHeldError
from elasticflow_airflow.scheduler_core.model.values import Slot


class NodeManager:
    """One machine: its nodes and slots, and the processes of the service in ``state_dir`` there.

    The engine calls it with its lock held. ``pool``: processes that have done their imports, for new workers.
    """

    def __init__(
        self,
        state_dir: Path,
        nodes: Sequence[NodeLayout],
        lock_dir: Path,
        environ: Mapping[str, str],
        pool: WarmPool | None = None,
    ) -> None:
        slots.prepare_lock_dir(lock_dir)
        self._nodes = {node.node_id: node for node in nodes}
        self._state_dir, self._lock_dir = state_dir, lock_dir
        self._facts = NodeFacts(
            nodes=tuple(nodes),
            state_dir=str(state_dir),
            lock_dir=str(lock_dir),
            python=sys.executable,
            bridge=str(prepare_bridge(state_dir)),
            environ=inherited(environ),
        )
        self._interpreters = InterpreterCheck()
        self._environments = Environments(state_dir, environ, self._interpreters_in_use)
        self._pool = pool
        self._supervisors: dict[Path, subprocess.Popen[bytes]] = {}
        self._without_environment: dict[Path, SupervisorSpec] = {}
        """By folder, supervisors whose start waits for their environment."""
        slot = next((slot for node in nodes for slot in node.slots), None)
        if pool is not None and slot is not None:
            # For the most common jobs: the service's interpreter and default environment.
            pool.warm(sys.executable, self._facts.worker_env({}) | threads_env(slot))

    @property
    def nodes(self) -> Mapping[str, NodeLayout]:
        """Its nodes."""
        return self._nodes

    def facts(self, node_id: str = "") -> NodeFacts:  # noqa: ARG002  (the same for all)
        """Return what is constant here."""
        return self._facts

    def clock_offset_s(self, node_id: str) -> float:  # noqa: ARG002
        """Return 0: there is one clock."""
        return 0.0

    def want_nodes(self, count: int, unneeded: Collection[str]) -> None:
        """Do nothing: this machine is there."""

    def inventory(self, has_gang: Callable[[str], bool]) -> tuple[EngineNode, ...]:
        """See :func:`look_at_nodes`."""
        return look_at_nodes(self._nodes.values(), self._lock_dir, self._state_dir, has_gang)

    def problems(self) -> list[str]:
        """Return nothing: it is this machine."""
        return []

    def check_slots(self, wanted: Iterable[Slot]) -> None:
        """Raise SlotsHeldError when any of the slots is held."""
        holders = {slot: self.holder(slot) for slot in wanted}
        held = {slot: slots.describe(holder) for slot, holder in holders.items() if holder is not None}
        if held:
            raise SlotsHeldError(held)

    def check_interpreter(
        self,
        python: str,
        job_env: Mapping[str, str],
        node_ids: Iterable[str] = (),  # noqa: ARG002  (there is one machine)
    ) -> None:
        """Raise EngineError when workers cannot be started with this interpreter."""
        self._interpreters.check(python, self._facts.worker_env(job_env))

    def prepare_environment(self, python: str, requirements: tuple[str, ...]) -> bool:
        """Return whether an environment is there; otherwise have it built (see the port)."""
        return self._environments.is_ready(python, requirements)

    def _interpreters_in_use(self) -> set[str]:
        found = set()
        for path in self._state_dir.glob("jobs/*/*/supervisors/*/spec.json"):
            # What a script has damaged runs no more.
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
                found.add(SupervisorFolder(path.parent).read_spec().python)
        return found

    def holder(self, slot: Slot) -> dict[str, Any] | None:
        """Return the holder of a slot, as it has described itself; None when the slot is free."""
        return slots.holder_of(self._lock_dir, layout_of(slot, self._nodes).lock_name)

    def publish(self, incarnation_dir: Path) -> None:
        """Do nothing: the engine and the workers have the same folder."""

    def changes(self, incarnation_dir: Path) -> None:
        """Return None: supervisors and workers write there themselves."""

    def expect(self, folders: Iterable[SupervisorFolder]) -> None:
        """Do nothing: their folders are here."""

    def renew_lease(self, folder: SupervisorFolder) -> None:
        """Touch the lease."""
        folder.renew()

    # -- supervisors ------------------------------------------------------------------------------------------------

    def spawn(self, node_id: str, folder: SupervisorFolder, secret_env: Mapping[str, str]) -> None:
        """Start the supervisor of a node, unless it is coming up. Raises EngineError if it did not come up before."""
        process = self._supervisors.get(folder.path)
        if process is not None and process.poll() is None:
            return
        if process is not None and process.returncode > 0 and process.returncode != EXIT_NOT_NEEDED:
            del self._supervisors[folder.path]
            last = folder.last_words().splitlines()[-3:]
            raise EngineError(f"the supervisor on {node_id} does not start: {' / '.join(last) or 'no output'}")
        spec = folder.read_spec()
        if spec.requirements and not self._environments.is_ready(spec.base_python, spec.requirements):
            self._without_environment[folder.path] = spec
            return
        self._without_environment.pop(folder.path, None)
        self._supervisors[folder.path] = self._spawn(folder, spec, secret_env)

    def _spawn(
        self, folder: SupervisorFolder, spec: SupervisorSpec, secret_env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        folder.renew()
        pool = None
        if self._pool is not None:
            pool = self._pool.take(spec.python, {**spec.env, **spec.workers[0].env}, secret_env)
        channel = () if pool is None else (pool.fileno(),)
        with folder.open_log() as log, pool or contextlib.nullcontext():
            process = subprocess.Popen(
                [
                    *(
                        sys.executable,
                        "-P",
                        "-m",
                        "elasticflow_airflow.engines.local.workers.supervisor",
                        str(folder.path),
                    ),
                    *map(str, channel),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=folder.path,
                env={**self._facts.environ, "PYTHONPATH": self._facts.bridge},
                pass_fds=channel,
                start_new_session=True,
            )
        assert process.stdin is not None
        # Secrets are passed by pipe, not on disk or in the arguments. The supervisor keeps them while it lives.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps({"secret_env": dict(secret_env)}).encode())
        return process

    def is_coming_up(self, folder: SupervisorFolder) -> bool:
        """Return whether a supervisor started by this object is running, even if it has not written anything yet.

        Or its environment is being built.
        """
        waiting = self._without_environment.get(folder.path)
        if waiting is not None and self._environments.is_being_built(waiting.base_python, waiting.requirements):
            return True
        process = self._supervisors.get(folder.path)
        return process is not None and process.poll() is None

    def reap(self) -> None:
        """Reap supervisors that have ended."""
        for path, process in list(self._supervisors.items()):
            if process.poll() is not None and os.path.lexists(path / "status.json"):
                del self._supervisors[path]

    def supervisors(self) -> list[tuple[ProcessId, SupervisorFolder]]:
        """Return the supervisors of this folder that hold slots."""
        every = (Slot(node.node_id, index) for node in self._nodes.values() for index in range(len(node.slots)))
        holders = [self.holder(slot) for slot in every]
        ours = [holder for holder in holders if holder and holder.get("state_dir") == str(self._state_dir)]
        found = []
        for pid in {number_in(holder, "pid") for holder in ours} - {0}:
            process, folder = ProcessId.of(pid), _folder_of(pid)
            if process is not None and folder is not None:
                found.append((process, folder))
        return found

    def kill_supervisors(self) -> None:
        """Kill the supervisors of this folder that hold slots, and those that are coming up."""
        for process, _ in self.supervisors():
            process.kill()
        for started in self._supervisors.values():
            started.kill()

    def let_go(self) -> None:
        """Forget the processes without ending them: they are meant to outlive the service."""
        for process in self._supervisors.values():
            process.poll()
            # Otherwise the interpreter warns that they are still running.
            process.returncode = process.returncode or 0
        self._supervisors.clear()
        self._environments.close()
        if self._pool is not None:
            self._pool.close()

    # -- processes --------------------------------------------------------------------------------------------------

    def is_alive(self, folder: SupervisorFolder, status: Status) -> bool:  # noqa: ARG002  (its pid says it)
        """Return whether the process exists that wrote this status."""
        return status.supervisor is not None and status.supervisor.is_alive()

    def was_given_up(self, folder: SupervisorFolder) -> bool:  # noqa: ARG002
        """Return False: this machine answers."""
        return False

    def end_leftovers(self, supervisors: Iterable[tuple[SupervisorFolder, Status | None]]) -> bool:
        """Kill leftover processes of dead supervisors; True if there were any. Nearly always the kernel did before."""
        left = False
        for _, status in supervisors:
            for worker in status.workers.values() if status is not None else ():
                processes = [worker.agent] if worker.agent is not None and worker.agent.is_alive() else []
                if worker.trainer is not None:
                    processes += group_led_by(worker.trainer)
                for process in processes:
                    process.kill()
                    left = True
        return left

    def stacks(self, trainers: Mapping[str, Trainer]) -> Mapping[str, str]:
        """Return the stacks of the threads of these trainers, by worker id; may be called without the engine's lock."""
        return stacks.ask({worker: (trainer.process, trainer.stacks_file) for worker, trainer in trainers.items()})

    # -- gangs whose files cannot be read ---------------------------------------------------------------------------
    # A supervisor holds the locks of its slots for as long as its workers may be alive; it works in its own folder.

    def held_by(self, job_id: str, wanted: Sequence[Slot] | None = None) -> dict[Slot, dict[str, Any]]:
        """Return the slots (of ``wanted``, if given) that a job's supervisors hold, with each lock's holder entry."""
        found = {}
        for node in self._nodes.values():
            for index in range(len(node.slots)):
                slot = Slot(node.node_id, index)
                holder = self.holder(slot) if wanted is None or slot in wanted else None
                if holder and holder.get("job_id") == job_id and holder.get("state_dir") == str(self._state_dir):
                    found[slot] = holder
        return found

    def renew(self, job_id: str) -> None:
        """Renew the leases of a job's supervisors."""
        for pid in self._pids(job_id):
            folder = _folder_of(pid)
            if folder is not None:
                folder.renew()

    def ask_to_leave(self, job_id: str) -> None:
        """Make a job's supervisors save and leave, by SIGTERM, when no order file reaches them."""
        for pid in self._pids(job_id):
            process = ProcessId.of(pid)
            if process is not None and _folder_of(pid) is not None:
                process.kill(signal.SIGTERM)

    def latest(self, job_id: str) -> int:
        """Return the highest running generation of a job; 0 when there is none."""
        return max((number_in(holder, "generation") for holder in self.held_by(job_id).values()), default=0)

    def running(self, job_id: str) -> list[tuple[int, int, list[Slot]]]:
        """Return (incarnation, generation, slots) of each running gang of a job; incarnation 0 where it is unknown."""
        by_generation: dict[int, list[tuple[Slot, dict[str, Any]]]] = {}
        for slot, holder in sorted(self.held_by(job_id).items()):
            by_generation.setdefault(number_in(holder, "generation"), []).append((slot, holder))
        return [
            (_incarnation_of(number_in(held[0][1], "pid")), generation, [slot for slot, _ in held])
            for generation, held in sorted(by_generation.items())
        ]

    def _pids(self, job_id: str) -> set[int]:
        return {number_in(holder, "pid") for holder in self.held_by(job_id).values()} - {0}


def look_at_nodes(
    nodes: Iterable[NodeLayout], lock_dir: Path, state_dir: Path, has_gang: Callable[[str], bool] = lambda _: True
) -> tuple[EngineNode, ...]:
    """Return this machine's nodes to offer (see :func:`offer`)."""
    return tuple(
        offer(node, [slots.holder_of(lock_dir, slot.lock_name) for slot in node.slots], str(state_dir), has_gang)
        for node in nodes
    )


def offer(
    node: NodeLayout, holders: Sequence[Mapping[str, Any] | None], state_dir: str, has_gang: Callable[[str], bool]
) -> EngineNode:
    """Return a node to offer; slots held by supervisors of a service in another state directory are busy.

    ``has_gang`` tells whether the service in this directory has a gang of a job on record. Slots held by other
    supervisors of this directory are left over from a lost state, and are busy, too.
    """
    busy = {}
    for index, holder in enumerate(holders):
        if holder is not None and holder.get("state_dir") != state_dir:
            busy[index] = slots.describe(holder)
        elif holder is not None and not has_gang(str(holder.get("job_id"))):
            busy[index] = (
                f"{slots.describe(holder)}, which has no record of it: it leaves by itself when its lease ends, or"
                f" now with kill {holder.get('pid')}"
            )
    return EngineNode(
        node_id=node.node_id, slots=len(node.slots), device=node.device, device_type=node.device_type, busy=busy
    )


def _folder_of(pid: int) -> SupervisorFolder | None:
    """Return the folder of a supervisor, which is its working directory; None when it has ended."""
    try:
        path = Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return None
    return SupervisorFolder(path) if path.parent.name == "supervisors" else None


def _incarnation_of(pid: int) -> int:
    folder = _folder_of(pid)
    name = "" if folder is None else folder.path.parent.parent.name
    return int(name[1:]) if name[:1] == "i" and name[1:].isdecimal() else 0


def number_in(holder: Mapping[str, Any], name: str) -> int:
    """Return a positive number that the holder of a slot has written of itself; 0 when there is none."""
    value = holder.get(name)
    return value if type(value) is int and 0 < value < 1 << 31 else 0
