"""Finds the NVIDIA GPUs of this machine through the driver's own library, without importing torch.

A partitioned GPU (MIG) counts as its instances: each is a device of its own, and a process sees at most one.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("elasticflow.engine")

_NAME_BYTES = 96
_DRIVER_NOT_LOADED = 9
"""NVML status for a library without a GPU: not worth a warning."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device: its UUID, as accepted in CUDA_VISIBLE_DEVICES, and its model."""

    uuid: str
    model: str


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as counted by the driver; ``instances`` None: it is not partitioned."""

    gpu: Gpu
    instances: tuple[Gpu, ...] | None = None

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """The devices that processes can use."""
        return (self.gpu,) if self.instances is None else self.instances


def visible_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES does not hide; empty without a driver. Raises ValueError."""
    return choose_visible(_ask_driver(), environ)


def choose_visible(cards: Sequence[Card], environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Select cards as CUDA_VISIBLE_DEVICES does, in its order: by number, UUID or UUID prefix.

    As in CUDA, an entry that matches no device, or more than one, ends the list; a device named twice empties it. The
    number or UUID of a partitioned GPU stands for all of its instances. Raises ValueError when numbers are ambiguous.
    """
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(device for card in cards for device in card.devices)
    entries = [part.strip() for part in wanted.split(",")]
    chosen: list[Gpu] = []
    for entry in entries:
        named = _named_by(entry, cards)
        if not named:
            break
        chosen += named
    if len({gpu.uuid for gpu in chosen}) < len(chosen):
        logger.warning("CUDA_VISIBLE_DEVICES=%s names a GPU twice: no GPU is used, as CUDA would have it", wanted)
        return ()
    if entries[0].isdigit():
        _refuse_ambiguous_numbers(cards, chosen, environ, wanted)
    return tuple(chosen)


def _named_by(entry: str, cards: Sequence[Card]) -> tuple[Gpu, ...]:
    if entry.isdigit():
        return cards[int(entry)].devices if int(entry) < len(cards) else ()
    if entry.startswith("GPU-"):
        found = [card.devices for card in cards if card.gpu.uuid.startswith(entry)]
        return found[0] if len(found) == 1 else ()
    if entry.startswith("MIG-"):
        instances = [gpu for card in cards for gpu in card.instances or () if gpu.uuid.startswith(entry)]
        return (instances[0],) if len(instances) == 1 else ()
    return ()


def _refuse_ambiguous_numbers(
    cards: Sequence[Card], chosen: Sequence[Gpu], environ: Mapping[str, str], wanted: str
) -> None:
    """Raise ValueError when numbers are ambiguous: CUDA counts by speed, the driver by bus, so models must be equal."""
    everything = sum(len(card.devices) for card in cards)
    if len({card.gpu.model for card in cards}) < 2 or len(chosen) == everything:
        return
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES={wanted} does not say which GPUs are meant: those of this machine are of different "
            "models, which CUDA counts in another order than nvidia-smi. Write their names as nvidia-smi -L shows them "
            "(GPU-...), or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )


def _ask_driver() -> tuple[Card, ...]:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    status = nvml.nvmlInit_v2()
    if status != 0:
        if status != _DRIVER_NOT_LOADED:
            logger.warning("GPUs cannot be used: NVIDIA's driver does not answer (NVML status %d)", status)
        return ()
    try:
        count = ctypes.c_uint()
        status = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        if status != 0:
            logger.warning("GPUs cannot be used: NVIDIA's driver does not count them (NVML status %d)", status)
            return ()
        return tuple(_card(nvml, index) for index in range(count.value))
    finally:
        nvml.nvmlShutdown()


def _card(nvml: Any, index: int) -> Card:
    """Return one GPU. One that cannot be queried keeps its number, so that the others do, and has no devices."""
    handle = ctypes.c_void_p()
    status = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    gpu = _described(nvml, handle) if status == 0 else None
    if gpu is None:
        logger.warning("GPU %d cannot be used: NVIDIA's driver does not describe it (NVML status %d)", index, status)
        return Card(Gpu("", ""), ())
    return Card(gpu, _instances(nvml, handle))


def _described(nvml: Any, handle: ctypes.c_void_p) -> Gpu | None:
    uuid, model = ctypes.create_string_buffer(_NAME_BYTES), ctypes.create_string_buffer(_NAME_BYTES)
    if nvml.nvmlDeviceGetUUID(handle, uuid, _NAME_BYTES) or nvml.nvmlDeviceGetName(handle, model, _NAME_BYTES):
        return None
    return Gpu(uuid.value.decode(), model.value.decode())


def _instances(nvml: Any, handle: ctypes.c_void_p) -> tuple[Gpu, ...] | None:
    """Return the MIG instances of a GPU; None when it is not partitioned, or GPU or driver do not support MIG."""
    now, pending, most = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    if (
        not hasattr(nvml, "nvmlDeviceGetMigMode")
        or nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(now), ctypes.byref(pending)) != 0
        or now.value != 1
    ):
        return None
    if nvml.nvmlDeviceGetMaxMigDeviceCount(handle, ctypes.byref(most)) != 0:
        return ()
    found = []
    for index in range(most.value):
        instance = ctypes.c_void_p()
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index, ctypes.byref(instance)) == 0:
            described = _described(nvml, instance)
            if described is not None:
                found.append(described)
    return tuple(found)
