"""What is constant about a machine: its nodes and slots, its folders, and the environment that its workers get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticflow_airflow.engines.local.inherited_variables import worker_environment
from elasticflow_airflow.engines.local.machine.layout import NodeLayout, SlotLayout
from elasticflow_airflow.engines.port import EngineError
from elasticflow_airflow.runtime.protocol import ADDRESS_ENV
from elasticflow_airflow.scheduler_core.model.values import Slot

_ON_GPUS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Defaults for GPU workers: matrix products are deterministic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """Facts about one machine, from which the specs of its supervisors are made.

    ``state_dir`` and ``lock_dir`` are paths on that machine. ``environ`` is the allowed part of the environment of its
    manager, ``bridge`` the folder through which workers find our runtime, ``python`` the manager's own interpreter.
    """

    nodes: tuple[NodeLayout, ...]
    state_dir: str
    lock_dir: str
    python: str
    bridge: str
    environ: Mapping[str, str]

    def node(self, node_id: str) -> NodeLayout:
        """Return one of its nodes. Raises KeyError."""
        return {node.node_id: node for node in self.nodes}[node_id]

    def worker_env(self, job_env: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of all workers of a job, without secrets."""
        return worker_environment(self.environ, job_env, self.bridge)

    def slot_env(self, slot: Slot, job_env: Mapping[str, str]) -> dict[str, str]:
        """Return the variables that bind a worker to its slot and node. What the user sets of them is kept."""
        node = self.node(slot.node_id)
        layout = node.slots[slot.index]
        defaults = {**threads_env(layout), "GLOO_SOCKET_IFNAME": node.interface}
        env = {name: value for name, value in defaults.items() if name not in job_env}
        env[ADDRESS_ENV] = node.address
        env["ELASTICFLOW_CORES"] = ",".join(map(str, layout.cores))
        # Only its own device: the devices of a job change while it trains, a script that uses every visible device
        # would use another worker's, and NCCL can copy between devices that a process does not see (since CUDA 10.1).
        env["CUDA_VISIBLE_DEVICES"] = layout.gpu or ""
        if layout.gpu:
            said = job_env.keys() | self.environ.keys()
            on_gpus = {**_ON_GPUS, "NCCL_SOCKET_IFNAME": node.interface}
            env |= {name: value for name, value in on_gpus.items() if name not in said}
        return env

    def path_here(self, path: Path, state_dir: Path) -> str:
        """Translate a path below the service's ``state_dir`` to this machine; others are the same everywhere."""
        return str(Path(self.state_dir) / path.relative_to(state_dir)) if path.is_relative_to(state_dir) else str(path)

    def path_there(self, path: Path, state_dir: Path) -> str:
        """Translate a path of this machine to the service: the inverse of :meth:`path_here`."""
        here = Path(self.state_dir)
        return str(state_dir / path.relative_to(here)) if path.is_relative_to(here) else str(path)


def threads_env(layout: SlotLayout) -> dict[str, str]:
    """Return the variables that limit a worker's threads to those of its slot."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(layout.threads))


def layout_of(slot: Slot, nodes: Mapping[str, NodeLayout]) -> SlotLayout:
    """Return a slot's lock, cores and device. Raises EngineError when there is no such slot."""
    node = nodes.get(slot.node_id)
    if node is None or not 0 <= slot.index < len(node.slots):
        there = ", ".join(f"{n.node_id} ({len(n.slots)} slots)" for n in nodes.values())
        raise EngineError(f"there is no slot {slot.node_id}:{slot.index}; there are {there or 'no nodes at all'}")
    return node.slots[slot.index]
