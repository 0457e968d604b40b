"""Prepares states for writing: which tensors each file holds, and snapshots of them in memory shared with the writer.

A snapshot is the only part of a save that training waits for. Its memory is an anonymous file (memfd): it cannot
outlive the processes that hold it, and the limit of ``/dev/shm`` does not apply. The first copy into fresh pages costs
ten times as much as later ones; :meth:`SharedBuffer.touch` pays that cost in advance. May import torch and the
standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from elasticflow_airflow.runtime.checkpoints.state_tree import flatten
from elasticflow_airflow.runtime.checkpoints.tensor_bytes import bytes_of
from elasticflow_airflow.runtime.stores.file_format import ALIGNMENT, Blob, tensor_names

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_PAGE_BYTES = mmap.PAGESIZE
_TOUCH_BYTES = 64 << 20
_BYTES_AT_ONCE, _BYTES_PER_MOVER, _MOST_MOVERS = 4 << 20, 16 << 20, 4


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a file; ``numbers`` are its positions in the state, several if tensors are tied."""

    numbers: tuple[int, ...]
    tensor: Tensor

    @property
    def dtype(self) -> str:
        """Name of the dtype, as in the file."""
        return str(self.tensor.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Size in the file, in bytes."""
        return self.tensor.numel() * self.tensor.element_size()


@dataclass(frozen=True, slots=True)
class Content:
    """The contents of one file: a state's description, and its tensors (still the training's own, not copies)."""

    name: str
    state: Any
    pieces: tuple[Piece, ...]


def content_of(name: str, state: Mapping[str, Any]) -> Content:
    """Split a state for one file. Raises TypeError, naming the path, for anything that a file cannot hold."""
    description, tensors = flatten(state, name)
    numbers: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        what = _exotic(tensor)
        if what is not None:
            raise TypeError(
                f"the tensor at {name}/{tensor_names(description)[number]} is {what}: a checkpoint holds plain dense "
                "tensors. Give the full tensor in state_dict(), or leave it out"
            )
        # Tied weights are one tensor under two names. Other views into the same memory are written separately.
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device, tensor.is_conj())
        numbers.setdefault(key if tensor.numel() else number, []).append(number)
    pieces = tuple(Piece(tuple(same), tensors[same[0]]) for same in numbers.values())
    return Content(name, description, pieces)


def shard(
    contents: Sequence[Content],
    rank: int,
    size: int,
    is_common: Callable[[Content, Piece], bool] = lambda _content, _piece: True,
) -> list[Content]:
    """Return one worker's part of the state: about the same number of bytes each, the description at rank 0.

    The split depends only on the shapes, so all workers agree on it without communication. Tensors that are not common
    to all workers also go to rank 0.
    """
    if size == 1:
        return list(contents)
    loads = [0] * size
    mine: dict[tuple[int, int], bool] = {}
    order = []
    for c, content in enumerate(contents):
        for p, piece in enumerate(content.pieces):
            if is_common(content, piece):
                order.append((-piece.nbytes, c, p))
            else:
                mine[c, p] = rank == 0  # Not counted as load: its size may differ between workers.
    for negative_bytes, c, p in sorted(order):
        lightest = loads.index(min(loads))
        loads[lightest] -= negative_bytes
        mine[c, p] = lightest == rank
    return [
        Content(
            f"{content.name}-{rank:05d}-of-{size:05d}",
            content.state if rank == 0 else None,
            tuple(piece for p, piece in enumerate(content.pieces) if mine[c, p]),
        )
        for c, content in enumerate(contents)
    ]


def blobs_of(content: Content) -> tuple[list[Blob], list[Tensor]]:
    """Return the tensors of a file as bytes to write immediately, and the tensors that must stay alive until then."""
    on_cpu = [_plain(piece.tensor).cpu().contiguous() for piece in content.pieces]
    blobs = [
        Blob(piece.numbers, piece.dtype, tuple(tensor.shape), bytes_of(tensor))
        for piece, tensor in zip(content.pieces, on_cpu, strict=True)
    ]
    return blobs, on_cpu


def size_of(contents: Sequence[Content]) -> int:
    """Return the size of a snapshot in bytes."""
    return sum(_aligned(piece.nbytes) for content in contents for piece in content.pieces)


class SharedBuffer:
    """Memory shared with the writer. Raises OSError or MemoryError if there is not enough memory."""

    def __init__(self, number: int, size_bytes: int) -> None:
        self.number = number
        self.size_bytes = max(_PAGE_BYTES, -(-size_bytes // _PAGE_BYTES) * _PAGE_BYTES)
        self.descriptor = os.memfd_create(f"elasticflow-checkpoint-{number}")
        self._pinned_for: torch.device | None = None
        try:
            os.ftruncate(self.descriptor, self.size_bytes)
            self._map = mmap.mmap(self.descriptor, self.size_bytes)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._views: list[Tensor] = []
        self._layout: list[tuple[torch.dtype, torch.Size]] = []

    def touch(self, *, pin_for: torch.device | None) -> None:
        """Allocate every page now, not at the first save; pin them for copies from the GPU ``pin_for``, if given.

        Pages that cannot be pinned still work, only slower. May be called in any thread.
        """
        for start in range(0, self.size_bytes, _TOUCH_BYTES):
            # Both calls release the GIL. In pieces, so that missing memory is reported as OSError.
            os.posix_fallocate(self.descriptor, start, min(_TOUCH_BYTES, self.size_bytes - start))
            self._whole[start : start + _TOUCH_BYTES : _PAGE_BYTES].zero_()
        if pin_for is not None and self._pinned_for is None:
            # In a new thread, device 0 is current: it would get a context that nobody uses.
            with torch.cuda.device(pin_for):
                if _cudart_answers("cudaHostRegister", self._whole.data_ptr(), self.size_bytes, 0):
                    self._pinned_for = pin_for

    @property
    def is_pinned(self) -> bool:
        """Whether a GPU can copy into this buffer without the host."""
        return self._pinned_for is not None

    @torch.no_grad()
    def take(self, contents: Sequence[Content]) -> list[list[int]]:
        """Copy all tensors and return the offset of each, by file. They must not change before this returns."""
        pieces = [piece for content in contents for piece in content.pieces]
        layout = [(piece.tensor.dtype, piece.tensor.shape) for piece in pieces]
        if layout != self._layout:
            self._views, self._layout = self._lay_out(pieces), layout
        devices, moves, alive = set(), [], []
        for piece, view in zip(pieces, self._views, strict=True):
            tensor = _plain(piece.tensor)
            if tensor.device.type == "cpu" and tensor.is_contiguous():
                moves.append((view.data_ptr(), tensor.data_ptr(), piece.nbytes))
                alive.append(tensor)
                continue
            view.copy_(tensor, non_blocking=self.is_pinned)
            if tensor.device.type == "cuda":
                devices.add(tensor.device)
        _move(moves)
        for device in devices:
            # Only this thread's stream, which has all copies: operations on other streams may wait for other workers.
            torch.cuda.current_stream(device).synchronize()
        places = iter(self._offsets(pieces))
        return [[next(places) for _ in content.pieces] for content in contents]

    def put(self, data: bytes, offset: int) -> None:
        """Write bytes at an offset."""
        self._map[offset : offset + len(data)] = data

    def close(self) -> None:
        """Free the memory."""
        self._views, self._layout = [], []
        if self._pinned_for is not None:
            with torch.cuda.device(self._pinned_for):
                _cudart_answers("cudaHostUnregister", self._whole.data_ptr())
            self._pinned_for = None
        del self._whole
        self._map.close()
        os.close(self.descriptor)

    def _lay_out(self, pieces: Sequence[Piece]) -> list[Tensor]:
        views = []
        for piece, offset in zip(pieces, self._offsets(pieces), strict=True):
            raw = self._whole[offset : offset + piece.nbytes]
            views.append(raw.view(piece.tensor.dtype).view(piece.tensor.shape))
        return views

    @staticmethod
    def _offsets(pieces: Sequence[Piece]) -> list[int]:
        offsets, position = [], 0
        for piece in pieces:
            offsets.append(position)
            position += _aligned(piece.nbytes)
        return offsets


def _cudart_answers(function: str, *arguments: int) -> bool:
    """Call a CUDA runtime function; return False if it fails. Clears the error, which torch would report later."""
    cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
    status = int(getattr(cudart, function)(*arguments))
    if status == 0:
        return True
    sys.stderr.write(f"elasticflow: {function} failed with CUDA error {status}: checkpoints are copied more slowly\n")
    with contextlib.suppress(RuntimeError):  # The error to clear; a device that is really lost reports it again.
        torch.zeros(1, device="cuda")
    return False


def available_bytes() -> int:
    """Return how many bytes this process could still allocate, according to the machine and its container."""
    free = 1 << 62
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            free = min(free, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue  # No limit ("max"), or no such cgroup file on this machine.
    return free


def _move(moves: Sequence[tuple[int, int, int]]) -> None:
    """Copy within memory; each move is (target, source, bytes).

    Uses ``memmove``, which, unlike ``copy_``, does not read what it overwrites, and several threads for large copies,
    since a single thread does not use the full memory bandwidth.
    """
    total = sum(nbytes for _, _, nbytes in moves)
    threads = min(_MOST_MOVERS, len(os.sched_getaffinity(0)), total // _BYTES_PER_MOVER)
    todo = deque(
        (target + start, source + start, min(_BYTES_AT_ONCE, nbytes - start))
        for target, source, nbytes in moves
        for start in range(0, nbytes, _BYTES_AT_ONCE)
    )

    def work() -> None:
        while todo:
            try:
                move = todo.popleft()
            except IndexError:  # Another thread took the last one.
                return
            ctypes.memmove(*move)  # Releases the GIL.

    helpers = [threading.Thread(target=work, name="elasticflow-copy", daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    work()
    for helper in helpers:
        helper.join()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _plain(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg()


def _exotic(tensor: Tensor) -> str | None:
    if tensor.layout != torch.strided:
        return f"of layout {tensor.layout}"
    if tensor.is_meta:
        return "without data (on the meta device)"
    if tensor.is_quantized:
        return "quantized"
    if is_traceable_wrapper_subclass(tensor):
        return f"a {type(tensor).__name__}"
    return None
