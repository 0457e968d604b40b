"""Starts a generation: writes the files that its supervisors read, and starts the supervisor processes.

Part of the local engine; knows nothing about earlier or later generations.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from elasticflow_airflow.engines.local.bridge import prepare_bridge
from elasticflow_airflow.engines.local.environment import inherited, worker_environment
from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder, SupervisorSpec, WorkerSpec
from elasticflow_airflow.engines.local.files.records import GangRecord
from elasticflow_airflow.engines.local.machine import slots
from elasticflow_airflow.engines.local.machine.layout import NodeLayout, SlotLayout
from elasticflow_airflow.engines.local.workers.supervisor import EXIT_NOT_NEEDED
from elasticflow_airflow.engines.local.workers.warm_pool import WarmPool
from elasticflow_airflow.engines.port import EngineError, GangSpec, SlotsHeldError
from elasticflow_airflow.runtime.protocol import Membership, RescaleMode
from elasticflow_airflow.scheduler_core.model.values import Slot

_ON_GPUS = {"NCCL_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Defaults for GPU workers: all communicate on this machine, and matrix products are deterministic."""


class Starter:
    """Starts supervisors and keeps track of those that it started itself."""

    def __init__(
        self,
        state_dir: Path,
        nodes: Sequence[NodeLayout],
        lock_dir: Path,
        environ: Mapping[str, str],
        log_limits: tuple[int, int],
        pool: WarmPool | None = None,
    ) -> None:
        self.nodes = {node.node_id: node for node in nodes}
        self._state_dir, self._lock_dir = state_dir, lock_dir
        self._environ, self._log_limits = dict(environ), log_limits
        self._bridge = prepare_bridge(state_dir)
        self._pool = pool
        self._supervisors: dict[Path, subprocess.Popen[bytes]] = {}

    def is_coming_up(self, folder: SupervisorFolder) -> bool:
        """Return whether a supervisor started by this object is running, even if it has not written anything yet."""
        process = self._supervisors.get(folder.path)
        return process is not None and process.poll() is None

    def reap(self) -> None:
        """Reap supervisors that have ended."""
        for path, process in list(self._supervisors.items()):
            if process.poll() is not None and os.path.lexists(path / "status.json"):
                del self._supervisors[path]

    def let_go(self) -> None:
        """Forget the processes without ending them: they are meant to outlive the service."""
        for process in self._supervisors.values():
            process.poll()
            # Otherwise the interpreter warns that they are still running.
            process.returncode = process.returncode or 0
        self._supervisors.clear()
        if self._pool is not None:
            self._pool.close()

    def warm_pool(self) -> None:
        """Warm up the pool for the most common jobs: the service's interpreter and default environment."""
        slot = next((slot for node in self.nodes.values() for slot in node.slots), None)
        if self._pool is not None and slot is not None:
            env = worker_environment(self._environ, {}, str(self._bridge))
            self._pool.warm(sys.executable, env | _threads_of(slot))

    def check_slots(self, wanted: Iterable[Slot]) -> None:
        """Raise SlotsHeldError when any of the slots is held."""
        holders = {slot: slots.holder_of(self._lock_dir, self.layout(slot).lock_name) for slot in wanted}
        held = {slot: slots.describe(holder) for slot, holder in holders.items() if holder is not None}
        if held:
            raise SlotsHeldError(held)

    def warm_up(self, gang: GangRecord, spec: GangSpec) -> None:
        """Start supervisors that do the imports and then wait: the previous generation may still train."""
        (spec.incarnation_dir / "logs").mkdir(exist_ok=True)
        for node_id in gang.nodes:
            folder = gang.folder(node_id)
            if not folder.has_spec():
                folder.path.mkdir(parents=True, exist_ok=True)
                folder.write_spec(self._supervisor_spec(gang, spec, node_id))
        self.start_supervisors(gang, spec)

    def go(self, gang: GangRecord, spec: GangSpec) -> None:
        """Let the generation start, once: the files that workers read are written before supervisors may go."""
        plan = Membership.read(spec.incarnation_dir) if gang.in_place else None
        told = plan is not None and plan.generation >= gang.generation
        if (told or not gang.in_place) and all(gang.folder(node_id).go.exists() for node_id in gang.nodes):
            return
        spec.session.write()
        Membership(
            generation=gang.generation,
            mode=RescaleMode.IN_PLACE if gang.in_place else RescaleMode.RESTART,
            members=gang.members,
            reason=spec.reason,
            lost=gang.lost,
        ).write(spec.incarnation_dir)
        for node_id in gang.nodes:
            gang.folder(node_id).go.touch()

    def start_supervisors(self, gang: GangRecord, spec: GangSpec) -> None:
        """Start missing supervisors. One that has written a status did run, and is never started again."""
        for node_id in gang.nodes:
            folder = gang.folder(node_id)
            process = self._supervisors.get(folder.path)
            if folder.read_status() is not None or (process is not None and process.poll() is None):
                continue
            if process is not None and process.returncode > 0 and process.returncode != EXIT_NOT_NEEDED:
                del self._supervisors[folder.path]
                last = folder.last_words().splitlines()[-3:]
                raise EngineError(f"the supervisor on {node_id} does not start: {' / '.join(last) or 'no output'}")
            self._supervisors[folder.path] = self._spawn(folder, spec)

    def _spawn(self, folder: SupervisorFolder, spec: GangSpec) -> subprocess.Popen[bytes]:
        folder.renew()
        pool = None
        if self._pool is not None:
            first = folder.read_spec()
            pool = self._pool.take(first.python, {**first.env, **first.workers[0].env}, spec.secret_env)
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
                env={**inherited(self._environ), "PYTHONPATH": str(self._bridge)},
                pass_fds=channel,
                start_new_session=True,
            )
        assert process.stdin is not None
        # Secrets are passed by pipe, not on disk or in the arguments. The supervisor keeps them while it lives.
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(json.dumps({"secret_env": dict(spec.secret_env)}).encode())
        return process

    def _supervisor_spec(self, gang: GangRecord, spec: GangSpec, node_id: str) -> SupervisorSpec:
        workers = tuple(
            WorkerSpec(
                worker_id=gang.worker_id(rank),
                rank=rank,
                slot_index=slot.index,
                lock_name=self.layout(slot).lock_name,
                env=self._slot_env(slot, spec),
                fork_trainer=self.layout(slot).gpu is None,
            )
            for rank, slot in enumerate(spec.placement)
            if slot.node_id == node_id and gang.is_born(rank)
        )
        return SupervisorSpec(
            job_id=spec.job_id,
            incarnation=spec.incarnation,
            generation=spec.generation,
            chain=gang.chain or spec.generation,
            node_id=node_id,
            world_size=len(spec.placement),
            incarnation_dir=str(spec.incarnation_dir),
            state_dir=str(self._state_dir),
            lock_dir=str(self._lock_dir),
            python=spec.python,
            env=self.worker_env(spec),
            workers=workers,
            lease_s=spec.lease_s,
            grace_s=spec.grace_s,
            address=self.nodes[node_id].address,
            progress_regex=spec.session.progress_regex,
            progress_file=spec.session.progress_file,
            log_segment_bytes=self._log_limits[0],
            log_segments=self._log_limits[1],
        )

    def worker_env(self, spec: GangSpec) -> dict[str, str]:
        """Return the environment of all workers of a job, without secrets."""
        return worker_environment(self._environ, spec.env, str(self._bridge))

    def _slot_env(self, slot: Slot, spec: GangSpec) -> dict[str, str]:
        """Return the variables that bind a worker to its slot. A thread count set by the user is kept."""
        layout = self.layout(slot)
        env = {name: threads for name, threads in _threads_of(layout).items() if name not in spec.env}
        env["ELASTICFLOW_CORES"] = ",".join(map(str, layout.cores))
        # Only its own device: the devices of a job change while it trains, a script that uses every visible device
        # would use another worker's, and NCCL can copy between devices that a process does not see (since CUDA 10.1).
        env["CUDA_VISIBLE_DEVICES"] = layout.gpu or ""
        if layout.gpu:
            said = spec.env.keys() | self._environ.keys()
            env |= {name: value for name, value in _ON_GPUS.items() if name not in said}
        return env

    def layout(self, slot: Slot) -> SlotLayout:
        """Return the slot's lock, cores and device. Raises EngineError when there is no such slot."""
        node = self.nodes.get(slot.node_id)
        if node is None or not 0 <= slot.index < len(node.slots):
            there = ", ".join(f"{n.node_id} ({len(n.slots)} slots)" for n in self.nodes.values())
            raise EngineError(f"there is no slot {slot.node_id}:{slot.index}; there are {there}")
        return node.slots[slot.index]


def _threads_of(layout: SlotLayout) -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(layout.threads))
