"""A process group for workers with GPUs: gloo for host tensors, and NCCL or gloo for device tensors.

NCCL supports neither workers that share a GPU nor MIG instances: those send through host memory, by gloo. The workers
choose the backend from the device description that each publishes. Sums are bit-identical either way, since they are
computed on the devices in the order of the tree (process_group.py); only the transport differs.

Callers wait for an operation on the host, in the thread of the group. When the wait returns, the bytes have arrived. A
kernel that waits for a dead worker blocks only that thread, until :meth:`CudaGroup.abort_device` ends it.
May import torch and the standard library only; importing it touches no device.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]  # public, but not marked so by torch
    PrefixStore,
    ProcessGroupGloo,
)

BACKEND_ENV = "ELASTICFLOW_GPU_BACKEND"
"""Environment variable: "gloo" disables NCCL; setting it on one worker disables NCCL on all."""
NCCL, GLOO = "nccl", "gloo"
_ERRORS_ENV = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NO_HANDLING = "0"
_POLL_S = 5e-5
_LONGEST_POLL_S = 1e-3
_LOOK_FOR_ERRORS_S = 0.1
_SETTLING_LIMIT_S = 10.0
"""An operation that NCCL reports as complete appears on our stream within microseconds, or has failed."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker's device: its identity, including the machine, and the reason if NCCL cannot use it."""

    gpu: str
    refuses: str | None = None


def seat_of(device: torch.device, environ: Mapping[str, str]) -> Seat:
    """Describe this worker's device the way NCCL identifies devices: by machine and PCI address."""
    properties: Any = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    unique = str(properties.uuid) if None in parts else ":".join(f"{part:02x}" for part in parts)
    return Seat(f"{_machine()}/{unique}", refusal(environ, str(properties.name), dist.is_nccl_available()))


def refusal(environ: Mapping[str, str], model: str, nccl_is_there: bool) -> str | None:
    """Return why a worker's device cannot use NCCL, regardless of the others; None if it can. Raises ValueError."""
    wanted = environ.get(BACKEND_ENV, "")
    if wanted not in ("", NCCL, GLOO):
        raise ValueError(f"{BACKEND_ENV}={wanted!r}: it is 'nccl' or 'gloo', or not set")
    if wanted == GLOO:
        return f"{BACKEND_ENV} says gloo"
    if not nccl_is_there:
        return "this torch was built without NCCL"
    if environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-") or " MIG " in f"{model} ":
        return "NCCL does not connect MIG instances"
    return None


def choose_backend(seats: Sequence[Seat]) -> tuple[str, str]:
    """Return the backend for device tensors, the same for all workers given the same seats, and why it is not NCCL."""
    for rank, seat in enumerate(seats):
        if seat.refuses is not None:
            return GLOO, f"worker {rank}: {seat.refuses}"
        first = [other.gpu for other in seats].index(seat.gpu)
        if first != rank:
            return GLOO, f"workers {first} and {rank} share a GPU, which NCCL refuses"
    return NCCL, ""


class CudaGroup:
    """The operations that process_group.py uses, each dispatched to the backend of its tensors.

    The communicator exists when the constructor returns, so call it in a background thread during training; any device
    may be current in that thread. Raises RuntimeError if the other workers do not connect.
    """

    def __init__(
        self, store: Any, rank: int, size: int, limit: datetime.timedelta, device: torch.device | None = None
    ) -> None:
        device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        self._gloo: Any = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, limit)
        seats = _exchange_seats(PrefixStore("seats", store), rank, size, seat_of(device, os.environ))
        self.backend, why = choose_backend(seats)
        self._on_device: _Nccl | Staged
        if self.backend == NCCL:
            self._on_device = _Nccl(PrefixStore("nccl", store), rank, size, limit, device)
        else:
            self._on_device = Staged(self._gloo)
            if rank == 0:
                sys.stderr.write(f"elasticflow: gradients go through the host's memory, by gloo: {why}\n")

    def _for(self, tensor: Tensor) -> Any:
        return self._on_device if tensor.device.type == "cuda" else self._gloo

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Any:
        """Send one tensor."""
        return self._for(tensors[0]).send(tensors, to, tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        """Receive one tensor."""
        return self._for(tensors[0]).recv(tensors, source, tag)

    def allreduce(self, tensors: list[Tensor]) -> Any:
        """Sum over all ranks, in the backend's own order."""
        return self._for(tensors[0]).allreduce(tensors)

    def allgather(self, rows: list[list[Tensor]], row: list[Tensor]) -> Any:
        """Gather a row on the host from every rank."""
        return self._gloo.allgather(rows, row)

    def broadcast(self, tensors: list[Tensor], options: Any) -> Any:
        """Send from one rank to all."""
        return self._for(tensors[0]).broadcast(tensors, options)

    def _start_coalescing(self, _device: Any = None) -> None:
        self._on_device.start_together()

    def _end_coalescing(self, _device: Any = None) -> Any:
        return self._on_device.end_together()

    def abort_device(self) -> None:
        """Unblock every waiter for a device operation with a RuntimeError. Thread-safe; returns at once."""
        self._on_device.abort()

    def close_device(self) -> None:
        """Release the communicator when no operation is in flight. May be slow: not for the training thread."""
        self._on_device.close()


class Staged:
    """Operations on device tensors, through pinned host memory and a gloo group.

    ``wait`` returns when the copies of the received bytes to the device are queued on the current stream.
    """

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo
        self._together: list[_Transfer] | None = None

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _Transfer:
        """Send one tensor, with the value that it has at this point of the current stream."""
        return self._begun(_Transfer([self._gloo.send([_to_host(tensors[0])], to, tag)]))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _Transfer:
        """Receive one tensor."""
        host = _host_memory(tensors[0])
        return self._begun(_Transfer([self._gloo.recv([host], source, tag)], [(host, tensors[0])]))

    def allreduce(self, tensors: list[Tensor]) -> _Transfer:
        """Sum over all ranks, in gloo's own order."""
        host = _to_host(tensors[0])
        return _Transfer([self._gloo.allreduce([host])], [(host, tensors[0])])

    def broadcast(self, tensors: list[Tensor], options: Any) -> _Transfer:
        """Send from one rank to all; as bytes, so that every dtype works."""
        host = _to_host(tensors[0])
        return _Transfer([self._gloo.broadcast([host.view(torch.uint8)], options)], [(host, tensors[0])])

    def start_together(self) -> None:
        """Begin to collect operations, to be waited for together."""
        self._together = []

    def end_together(self) -> _Transfer:
        """Return all operations that were collected since ``start_together``, as one transfer."""
        begun, self._together = self._together or [], None
        # Receives first: a sender has nothing left to do after its operation.
        begun.sort(key=lambda one: not one.arriving)
        return _Transfer([w for one in begun for w in one.works], [pair for one in begun for pair in one.arriving])

    def abort(self) -> None:
        """Do nothing: no device kernel waits for others, and waits on the host are left to their thread, as on CPU."""

    def close(self) -> None:
        """Do nothing: this object does not own the gloo group."""

    def _begun(self, transfer: _Transfer) -> _Transfer:
        if self._together is not None:
            self._together.append(transfer)
        return transfer


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Gloo operations in flight, and the pairs of host buffer and target tensor for what they receive."""

    works: list[Any]
    arriving: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        for host, into in self.arriving:
            # torch's allocator of pinned memory keeps the buffer until the copy is done.
            into.copy_(host.view(into.shape), non_blocking=True)


def _host_memory(like: Tensor) -> Tensor:
    if like.device.type != "cuda":
        return torch.empty(like.numel(), dtype=like.dtype)
    # In a new thread, device 0 is current: it would get a context that nobody uses.
    with torch.cuda.device(like.device):
        return torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)


def _to_host(tensor: Tensor) -> Tensor:
    host = _host_memory(tensor)
    host.copy_(tensor.reshape(-1), non_blocking=True)
    if tensor.device.type == "cuda":
        torch.cuda.current_stream(tensor.device).synchronize()
    return host


class _Nccl:
    """Operations on device tensors, by an NCCL communicator outside torch's global group."""

    def __init__(self, store: Any, rank: int, size: int, limit: datetime.timedelta, device: torch.device) -> None:
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = limit
        self._device = device
        self._aborted = threading.Event()
        self._closed = False
        self._lock = threading.Lock()
        with torch.cuda.device(device):
            # By default torch ends the process when a peer is gone; here the membership plan decides what happens then.
            with _environment(_ERRORS_ENV, _NO_HANDLING):
                self._group: Any = ProcessGroupNCCL(store, rank, size, options)
            # Otherwise the first operation creates the communicator while training waits. This starts no kernel: if
            # kernels of two communicators ran in different orders on two workers, they could deadlock.
            self._group.eager_connect_single_device(device)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> _NcclWork:
        return _NcclWork(self, self._group.send(tensors, to, tag))

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> _NcclWork:
        return _NcclWork(self, self._group.recv(tensors, source, tag))

    def allreduce(self, tensors: list[Tensor]) -> _NcclWork:
        return _NcclWork(self, self._group.allreduce(tensors))

    def broadcast(self, tensors: list[Tensor], options: Any) -> _NcclWork:
        return _NcclWork(self, self._group.broadcast(tensors, options))

    def start_together(self) -> None:
        # The backend's own method takes no device, unlike ProcessGroup's.
        self._group._start_coalescing()

    def end_together(self) -> _NcclWork:
        return _NcclWork(self, self._group._end_coalescing())

    def wait(self, work: Any) -> None:
        """Order the current stream after an operation, and wait on the host until it has finished."""
        if work is None:
            return  # Nothing was coalesced: both tensors were empty.
        work.wait()
        done = torch.cuda.current_stream(self._device).record_event()
        if not wait_on_host(done.query, work.is_completed, self._aborted):
            self.abort()
            raise RuntimeError("an operation of NCCL has failed: another worker is gone, or the connection to it")

    def abort(self) -> None:
        """End the kernels that wait for other workers."""
        self._aborted.set()
        threading.Thread(target=self.close, name="elasticflow-nccl-abort", daemon=True).start()

    def close(self) -> None:
        # "abort", not "shutdown": the latter waits for the others, and every operation was waited for already.
        with self._lock:
            if not self._closed:
                self._closed = True
                with torch.cuda.device(self._device):
                    self._group.abort()


@dataclass(frozen=True, slots=True)
class _NcclWork:
    """An NCCL operation in flight."""

    group: _Nccl
    work: Any

    def wait(self) -> None:
        self.group.wait(self.work)


def wait_on_host(happened: Callable[[], bool], ended: Callable[[], bool], aborted: threading.Event) -> bool:
    """Wait until a device operation has finished; return False if it was aborted or ended without finishing.

    ``ended`` also becomes true on an error, which it does not report: then the stream never reaches that point.
    """
    pause_s, look_at_s = _POLL_S, time.monotonic() + _LOOK_FOR_ERRORS_S
    give_up_at_s: float | None = None
    while not happened():
        if aborted.wait(pause_s):
            return False
        pause_s, now_s = min(2 * pause_s, _LONGEST_POLL_S), time.monotonic()
        if give_up_at_s is not None and now_s > give_up_at_s:
            return happened()
        if give_up_at_s is None and now_s > look_at_s:
            look_at_s = now_s + _LOOK_FOR_ERRORS_S
            give_up_at_s = now_s + _SETTLING_LIMIT_S if ended() else None
    return not aborted.is_set()


def _exchange_seats(store: Any, rank: int, size: int, seat: Seat) -> list[Seat]:
    store.set(str(rank), json.dumps([seat.gpu, seat.refuses]))
    return [Seat(*json.loads(store.get(str(other)))) for other in range(size)]


def _machine() -> str:
    try:
        # The kernel's id is the same for all containers of one machine; they may not share a host name.
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable while a constructor reads it; a value set by the user is kept."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)
