"""How this machine is divided into nodes and slots: a slot is a GPU, or a share of the cores where there is none.

One machine may be presented as several virtual nodes, so that placement, spanning and migration really happen.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticflow_airflow.engines.local.gpus import Gpu, visible_gpus

MAX_DEFAULT_CPU_SLOTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """One slot. ``lock_name`` is the same in every service of this machine; ``cores`` empty: not pinned."""

    lock_name: str
    cores: tuple[int, ...] = ()
    threads: int = 1
    gpu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """One node, real or virtual, with its slots in order."""

    node_id: str
    slots: tuple[SlotLayout, ...]
    device: str
    device_type: str
    address: str = "127.0.0.1"


def parse_virtual_nodes(text: str) -> tuple[int, int]:
    """Read "4x2": 4 nodes of 2 slots. Raises ValueError."""
    nodes, _, slots = text.lower().partition("x")
    if not (nodes.isdigit() and slots.isdigit() and int(nodes) and int(slots)):
        raise ValueError(f'virtual nodes {text!r}: write NODESxSLOTS, for instance "4x2"')
    return int(nodes), int(slots)


def detect_nodes(
    slots: int | None = None, virtual_nodes: str | None = None, environ: Mapping[str, str] | None = None
) -> tuple[NodeLayout, ...]:
    """Divide this machine. ``slots`` defaults to all GPUs, or to the cores, at most four. Raises ValueError."""
    environ = os.environ if environ is None else environ
    gpus = visible_gpus(environ)
    cores = sorted(os.sched_getaffinity(0))
    if virtual_nodes:
        nodes, per_node = parse_virtual_nodes(virtual_nodes)
        if slots is not None and slots != nodes * per_node:
            raise ValueError(f"slots={slots} contradicts virtual nodes {virtual_nodes!r} ({nodes * per_node} slots)")
    else:
        nodes, per_node = 1, slots if slots is not None else len(gpus) or min(len(cores), MAX_DEFAULT_CPU_SLOTS)
    total = nodes * per_node
    if total < 1:
        raise ValueError(f"slots={slots}: a machine needs at least 1 slot")
    if gpus and total > len(gpus):
        raise ValueError(
            f"{total} slots were asked for, but {len(gpus)} GPUs are visible. Ask for fewer, or hide the GPUs "
            "(CUDA_VISIBLE_DEVICES='') to train on CPU slots."
        )
    layouts = _gpu_slots(gpus, total, len(cores)) if gpus else _cpu_slots(cores, total)
    names = ["local"] if nodes == 1 else [f"local{index}" for index in range(nodes)]
    return tuple(
        NodeLayout(
            node_id=name,
            slots=tuple(layouts[index * per_node : (index + 1) * per_node]),
            device="cuda" if gpus else "cpu",
            device_type=gpus[0].model if gpus else platform.machine(),
        )
        for index, name in enumerate(names)
    )


def _gpu_slots(gpus: Sequence[Gpu], total: int, cores: int) -> list[SlotLayout]:
    # Not pinned: a GPU worker's data loaders want whatever cores are free.
    threads = max(1, cores // len(gpus))
    return [SlotLayout(lock_name=f"gpu-{gpu.uuid}", threads=threads, gpu=gpu.uuid) for gpu in gpus[:total]]


def _cpu_slots(cores: Sequence[int], total: int) -> list[SlotLayout]:
    layouts = []
    for index in range(total):
        if total <= len(cores):
            share = tuple(cores[index * len(cores) // total : (index + 1) * len(cores) // total])
        else:
            share = (cores[index % len(cores)],)  # More slots than cores: they share.
        layouts.append(SlotLayout(lock_name=f"cpu-{index}", cores=share, threads=len(share)))
    return layouts
