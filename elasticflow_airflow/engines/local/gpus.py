"""Which NVIDIA GPUs this machine has, asked of the driver's own library: torch is not imported for that."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device: its unique name, as CUDA_VISIBLE_DEVICES takes it, and its model."""

    uuid: str
    model: str


def visible_gpus(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    """GPUs of this machine, less those that CUDA_VISIBLE_DEVICES hides. None without a driver."""
    found = _ask_driver()
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return found
    chosen: list[Gpu] = []
    for name in (part.strip() for part in wanted.split(",")):
        if name.isdigit() and int(name) < len(found):
            chosen.append(found[int(name)])
        elif name.startswith("GPU-"):
            chosen += [gpu for gpu in found if gpu.uuid.startswith(name)]
        else:
            break  # As CUDA does: what follows an invalid entry is invisible.
    return tuple(chosen)


def _ask_driver() -> tuple[Gpu, ...]:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2() != 0:
        return ()
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return ()
        found = []
        for index in range(count.value):
            device = ctypes.c_void_p()
            uuid, model = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
            if (
                nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0
                and nvml.nvmlDeviceGetUUID(device, uuid, 96) == 0
                and nvml.nvmlDeviceGetName(device, model, 96) == 0
            ):
                found.append(Gpu(uuid.value.decode(), model.value.decode()))
        return tuple(found)
    finally:
        nvml.nvmlShutdown()
