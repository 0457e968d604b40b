"""Divides this machine into nodes and slots: a slot is a GPU or, without GPUs, a share of the CPU cores.

One machine can be presented as several virtual nodes, so that placement, spanning and migration really happen.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from elasticflow_airflow.engines.local.machine.gpus import Gpu, visible_gpus

logger = logging.getLogger("elasticflow.engine")

MAX_DEFAULT_CPU_SLOTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """One slot. All services of this machine use the same ``lock_name``; ``cores`` empty: not pinned."""

    lock_name: str
    cores: tuple[int, ...] = ()
    threads: int = 1
    gpu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLayout:
    """One node, real or virtual, with its slots in order.

    Its workers are reached by those of other nodes at ``address``, through the network interface ``interface``.
    """

    node_id: str
    slots: tuple[SlotLayout, ...]
    device: str
    device_type: str
    address: str = "127.0.0.1"
    interface: str = "lo"


def parse_virtual_nodes(text: str) -> tuple[int, int]:
    """Parse "4x2" as 4 nodes of 2 slots each. Raises ValueError."""
    nodes, _, slots = text.lower().partition("x")
    if not (nodes.isdigit() and slots.isdigit() and int(nodes) and int(slots)):
        raise ValueError(f'virtual nodes {text!r}: write NODESxSLOTS, for instance "4x2"')
    return int(nodes), int(slots)


def detect_nodes(
    slots: int | None = None, virtual_nodes: str | None = None, environ: Mapping[str, str] | None = None
) -> tuple[NodeLayout, ...]:
    """Divide this machine. ``slots`` defaults to all GPUs, or else to the cores (at most 4). Raises ValueError."""
    environ = os.environ if environ is None else environ
    gpus = _of_one_model(visible_gpus(environ), explicit="CUDA_VISIBLE_DEVICES" in environ)
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


def _of_one_model(gpus: Sequence[Gpu], *, explicit: bool) -> Sequence[Gpu]:
    """Return the GPUs of the most common model, so that the same training gives the same weights on all of them.

    Raises ValueError when the user explicitly named GPUs of several models.
    """
    models = [gpu.model for gpu in gpus]
    if len(set(models)) < 2:
        return gpus
    if explicit:
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES names GPUs of different models ({', '.join(sorted(set(models)))}): a job that moves "
            "between them would not train the same weights, nor at one speed. Name those of one model"
        )
    most = max(models, key=models.count)
    left_out = sorted({model for model in models if model != most})
    logger.warning(
        "%d GPUs (%s) are used; of other models, and left out: %s. CUDA_VISIBLE_DEVICES names others",
        models.count(most),
        most,
        ", ".join(left_out),
    )
    return [gpu for gpu in gpus if gpu.model == most]


def _gpu_slots(gpus: Sequence[Gpu], total: int, cores: int) -> list[SlotLayout]:
    # Not pinned: the data loaders of a GPU worker should use any free cores.
    threads = max(1, cores // len(gpus))
    return [
        # Older drivers use slashes in the names of MIG instances.
        SlotLayout(lock_name=f"gpu-{gpu.uuid.replace('/', '-')}", threads=threads, gpu=gpu.uuid)
        for gpu in gpus[:total]
    ]


def _cpu_slots(cores: Sequence[int], total: int) -> list[SlotLayout]:
    layouts = []
    for index in range(total):
        if total <= len(cores):
            share = tuple(cores[index * len(cores) // total : (index + 1) * len(cores) // total])
        else:
            share = (cores[index % len(cores)],)  # More slots than cores: they share.
        layouts.append(SlotLayout(lock_name=f"cpu-{index}", cores=share, threads=len(share)))
    return layouts
