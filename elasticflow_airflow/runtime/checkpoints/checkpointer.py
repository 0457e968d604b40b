"""Saves checkpoints while training continues: copies the state into shared memory; a low-priority process writes it.

Training waits only for the copy. Use from one thread. If all copies are still being written when a save is requested,
a periodic save is skipped, since the next one follows soon. A save that must be on disk (``wait=True``) waits for the
writes in progress and is then written by the trainer itself, at its own priority. A writer that dies or hangs costs the
saves that it was writing, and is replaced at the next one. May import torch and the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered, contents_of, files_of, part_of
from elasticflow_airflow.runtime.checkpoints.state_copy import Content, SharedBuffer, available_bytes, size_of
from elasticflow_airflow.runtime.checkpoints.writer import Order, encode_work, write_checkpoint
from elasticflow_airflow.runtime.checkpoints.writer_process import WriterDiedError, WriterProcess
from elasticflow_airflow.runtime.protocol import candidate_name
from elasticflow_airflow.runtime.stores.manifest import CandidateInfo, CheckpointError
from elasticflow_airflow.runtime.stores.open_store import open_store
from elasticflow_airflow.runtime.stores.store import PART_LIMIT_S, Part, Store, is_in_process

NICE = 19
_ROOM_FOR_DESCRIPTION = 1.25
"""The description of the state is stored after the tensors, in its last measured size times this factor."""
_SPARE_BYTES = 1 << 16
_OF_FREE_MEMORY = 0.5
WRITE_LIMIT_S = 60.0
"""A writer is replaced if a save takes longer than this, plus its size at ``SLOWEST_BYTES_PER_S``. Each time that this
happens the limit doubles, so that storage that is only slow gets its checkpoint in the end."""
SLOWEST_BYTES_PER_S = 10e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A checkpoint on disk, or this worker's part of one. ``name`` is relative to the checkpoint folder."""

    generation: int
    step: int
    name: str
    digest: str | None
    """None for a part: only rank 0 knows the digest."""
    size_bytes: int
    stall_s: float
    """How long training was blocked by the copy (and by the write, if it had to wait for it)."""
    write_s: float


@dataclass(slots=True)
class _UnderWay:
    generation: int
    step: int
    buffer: SharedBuffer
    stall_s: float
    limit_s: float
    """How long the writer may take for it."""
    is_part: bool


class Checkpointer:
    """Saves one training's checkpoints to a folder or an fsspec URL.

    ``promotes``: promote each checkpoint once it is written, and keep the newest ``keep`` (only without the service,
    which otherwise does both). ``buffers``: number of copies that may be in flight, 1 or 2; by default 2 if memory is
    plentiful. Saves are written before they return if ``in_background`` is False, for ``memory://``, and if memory is
    too small for a copy.
    """

    def __init__(
        self,
        where: str | Path,
        *,
        incarnation: int,
        promotes: bool = False,
        keep: int = 2,
        buffers: int | None = None,
        nice: int = NICE,
        in_background: bool = True,
    ) -> None:
        if buffers not in (None, 1, 2):
            raise ValueError(f"buffers={buffers}: one or two copies can be in flight")
        self._where, self._store = where, open_store(where)
        self._incarnation, self._promotes, self._keep = incarnation, promotes, keep
        self._most_buffers, self._nice = buffers, nice
        self._pid = os.getpid()
        self._writer: WriterProcess | None = None
        self._abandoned: list[WriterProcess] = []
        self._buffers: list[SharedBuffer] = []
        self._known_to_writer: set[int] = set()
        self._replaced: dict[int, int] = {}
        self._under_way: dict[int, _UnderWay] = {}
        self._saved: list[Saved] = []
        self._warnings: list[str] = []
        self._heard_at_s = 0.0
        self._patience = 1.0
        self._count = 0
        self._preparing: threading.Thread | None = None
        self._description_bytes = 0
        self.in_background = in_background and not is_in_process(where) and hasattr(os, "memfd_create")
        """Whether saves are written in the background. Becomes False if there is no memory for a copy."""
        self.skipped = 0
        """Saves that were skipped because earlier ones were still being written."""

    @property
    def store(self) -> Store:
        """The store that holds the checkpoints."""
        return self._store

    @property
    def is_busy(self) -> bool:
        """Whether anything is being written."""
        return bool(self._under_way)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being written and no memory for a copy is being allocated."""
        return not self._under_way and (self._preparing is None or not self._preparing.is_alive())

    @property
    def writer_pid(self) -> int | None:
        """Process id of the writer; None if it has not been started."""
        return None if self._writer is None else self._writer.pid

    def prepare(self, registered: Registered, *, part: Part | None = None) -> None:
        """Start the writer and allocate memory in the background; call it after the first optimizer step.

        Later saves then block only for a copy; without this call the first save takes longer. Raises CheckpointError
        for a state that no checkpoint can hold.
        """
        if not self.in_background or self._preparing is not None or self._buffers:
            return
        contents = _split(contents_of(registered), part)
        self._start_writer()
        sizes = self._room_for(contents)
        self._preparing = threading.Thread(
            target=self._allocate, args=(sizes, _gpu_of(contents)), name="elasticflow-prepare", daemon=True
        )
        self._preparing.start()

    def save(
        self,
        registered: Registered,
        *,
        generation: int,
        step: int,
        metadata: Mapping[str, Any],
        wait: bool = False,
        part: Part | None = None,
    ) -> Saved | None:
        """Save the current state; training may continue when this returns.

        Returns what was written if the call waited for it (``wait``, or not in the background), else None; ``poll``
        returns it later. ``part``: all workers call this, each writes its part, and rank 0 writes the manifest. Parts
        are never skipped, since the other workers would wait for them. Raises CheckpointError, also for an earlier
        save that has failed since; one whose writer was lost is told by ``take_warnings`` instead, unless it is a part.
        """
        began_s = time.perf_counter()
        if not wait:
            self._take_answers(limit_s=0.0)
        contents = _split(contents_of(registered), part)
        try:
            json.dumps(metadata, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} has metadata that JSON cannot hold: {error}"
            ) from error
        order = Order(
            incarnation=self._incarnation,
            generation=generation,
            step=step,
            metadata=metadata,
            part=part,
            promotes=self._promotes,
            keep=self._keep,
        )
        if wait:
            return self._write_now(contents, order, began_s)
        buffer = self._free_buffer(contents, must=part is not None)
        if not self.in_background:
            return self._write_now(contents, order, began_s)
        if buffer is None:
            self.skipped += 1
            return None
        self._hand_over(contents, order, buffer, began_s)
        return None

    def poll(self) -> list[Saved]:
        """Return the saves that reached the disk since the last call. Raises CheckpointError if a write has failed."""
        self._take_answers(limit_s=0.0)
        return self._take_saved()

    def flush(self, limit_s: float | None = None) -> list[Saved]:
        """Wait up to ``limit_s`` seconds until everything is on disk. Raises CheckpointError if a write has failed."""
        self._finish_under_way(limit_s)
        return self._take_saved()

    def take_warnings(self) -> list[str]:
        """Return what to tell of writers that were lost since the last call, with the saves that they were writing."""
        warnings, self._warnings = self._warnings, []
        return warnings

    def drop(self) -> None:
        """Abandon the writes in progress, because their result is no longer needed."""
        if self._under_way:
            self._abandon_writer()

    def close(self) -> None:
        """Release the writer and the memory; unwritten saves are dropped (see ``flush``)."""
        if os.getpid() != self._pid:
            return  # In a fork of the trainer, which does not own the writer.
        if self._preparing is not None:
            self._preparing.join()
        self._let_go_of_writer()
        for buffer in self._buffers:
            buffer.close()
        self._buffers = []

    # -- inside -------------------------------------------------------------------------------------------------

    def _write_now(self, contents: Sequence[Content], order: Order, began_s: float) -> Saved:
        # Failures of earlier saves no longer matter once this newer one is on disk.
        with contextlib.suppress(CheckpointError):
            self._finish_under_way(None)
        files, _alive = files_of(contents)
        write_began_s = time.perf_counter()
        info = write_checkpoint(self._store, files, order)
        write_s = time.perf_counter() - write_began_s
        return _saved(order.generation, order.step, info, time.perf_counter() - began_s, write_s)

    def _hand_over(self, contents: Sequence[Content], order: Order, buffer: SharedBuffer, began_s: float) -> None:
        offsets = buffer.take(contents)
        end = size_of(contents)
        files = [
            {
                "name": content.name,
                "state": content.state,
                "tensors": [
                    [piece.numbers, piece.dtype, tuple(piece.tensor.shape), offset, piece.nbytes]
                    for piece, offset in zip(content.pieces, places, strict=True)
                ],
            }
            for content, places in zip(contents, offsets, strict=True)
        ]
        work = encode_work(str(self._where), order, files)
        if end + len(work) > buffer.size_bytes:
            self._description_bytes = len(work)
            buffer = self._replace(buffer, self._room_for(contents)[0], _gpu_of(contents))
            self._hand_over(contents, order, buffer, began_s)
            return
        buffer.put(work, end)
        self._count += 1
        message = {"work": self._count, "buffer": buffer.number, "offset": end, "length": len(work)}
        try:
            self._send(message, buffer)
        except WriterDiedError as error:
            self._lost_writer(str(error))
            try:
                self._send(message, buffer)
            except WriterDiedError as again:
                raise CheckpointError(f"{again}: the checkpoint of step {order.step} is not there") from again
        if not self._under_way:
            self._heard_at_s = time.monotonic()
        self._under_way[self._count] = _UnderWay(
            order.generation,
            order.step,
            buffer,
            time.perf_counter() - began_s,
            # Rank 0 also waits for the other workers' parts.
            WRITE_LIMIT_S + end / SLOWEST_BYTES_PER_S + (0.0 if order.part is None else PART_LIMIT_S),
            order.part is not None,
        )

    def _send(self, message: dict[str, Any], buffer: SharedBuffer) -> None:
        self._start_writer()
        assert self._writer is not None
        known = buffer.number in self._known_to_writer
        self._writer.send(
            message | {"instead_of": self._replaced.get(buffer.number, -1)},
            descriptor=None if known else buffer.descriptor,
        )
        self._known_to_writer.add(buffer.number)

    def _free_buffer(self, contents: Sequence[Content], *, must: bool) -> SharedBuffer | None:
        """Return a buffer that is not being written out, or None; wait for one if ``must``."""
        if not self.in_background:
            return None
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        sizes = self._room_for(contents)
        if not self._buffers and self.in_background:
            self._allocate(sizes[:1], _gpu_of(contents))
        if not self.in_background:
            return None
        while True:
            busy = {id(one.buffer) for one in self._under_way.values()}
            free = next((buffer for buffer in self._buffers if id(buffer) not in busy), None)
            if free is not None or not must:
                break
            self._take_answers(limit_s=None)
        if free is not None and free.size_bytes < sizes[0]:
            free = self._replace(free, sizes[0], _gpu_of(contents))
        return free

    def _room_for(self, contents: Sequence[Content]) -> list[int]:
        """Return the sizes of the buffers to allocate, in bytes."""
        if not self._description_bytes:
            self._description_bytes = sum(len(json.dumps(content.state)) for content in contents) + 100 * sum(
                len(content.pieces) for content in contents
            )
        size = size_of(contents) + int(self._description_bytes * _ROOM_FOR_DESCRIPTION) + _SPARE_BYTES
        most = self._most_buffers or (2 if 4 * size < available_bytes() else 1)
        return [size] * most

    def _allocate(self, sizes: Sequence[int], gpu: torch.device | None) -> None:
        for size in sizes:
            if size > _OF_FREE_MEMORY * available_bytes():
                break
            try:
                buffer = SharedBuffer(self._next_number(), size)
            except (OSError, MemoryError):
                break
            try:
                buffer.touch(pin_for=gpu)
            except (OSError, MemoryError):
                buffer.close()
                break
            self._buffers.append(buffer)
        self.in_background = bool(self._buffers)

    def _replace(self, old: SharedBuffer, size_bytes: int, gpu: torch.device | None) -> SharedBuffer:
        """Replace a buffer by a larger one because the state has grown."""
        new = SharedBuffer(self._next_number(), size_bytes)
        new.touch(pin_for=gpu)
        self._replaced[new.number] = old.number
        self._buffers[self._buffers.index(old)] = new
        self._known_to_writer.discard(old.number)
        old.close()
        return new

    def _next_number(self) -> int:
        self._count += 1
        return self._count

    def _start_writer(self) -> None:
        if self._writer is None:
            try:
                self._writer = WriterProcess(self._nice)
            except OSError as error:
                raise CheckpointError(f"the process that writes checkpoints could not be started: {error}") from error

    def _finish_under_way(self, limit_s: float | None) -> None:
        until_s = None if limit_s is None else time.monotonic() + limit_s
        while self._under_way:
            left_s = None if until_s is None else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            self._take_answers(limit_s=left_s)

    def _take_answers(self, limit_s: float | None) -> None:
        """Process the writer's answers: wait up to ``limit_s`` for the first one, and not at all for the others."""
        problems: list[str] = []
        while self._under_way and self._writer is not None:
            left_s = max(0.0, self._patience_left_s())
            try:
                answer = self._writer.receive(left_s if limit_s is None else min(limit_s, left_s))
            except WriterDiedError as error:
                self._lost_writer(str(error))
                break
            if answer is None:
                if self._patience_left_s() <= 0:
                    quiet_s = time.monotonic() - self._heard_at_s
                    self._patience *= 2
                    self._lost_writer(f"the storage or the process that writes checkpoints hangs for {quiet_s:.0f} s")
                break
            self._heard_at_s = time.monotonic()
            limit_s = 0.0
            one = self._under_way.pop(answer["work"])
            if "error" in answer:
                problems.append(f"the checkpoint of step {one.step} is not there: {answer['error']}")
                continue
            info = answer["info"]
            name, digest, size_bytes = info or [candidate_name(one.generation, one.step), None, 0]
            self._saved.append(
                Saved(
                    generation=one.generation,
                    step=one.step,
                    name=name,
                    digest=digest,
                    size_bytes=size_bytes,
                    stall_s=one.stall_s,
                    write_s=answer["write_s"],
                )
            )
        if problems:
            raise CheckpointError("; ".join(problems))

    def _take_saved(self) -> list[Saved]:
        saved, self._saved = self._saved, []
        return saved

    def _patience_left_s(self) -> float:
        """Return how much longer the writer may take for the oldest save that is under way."""
        oldest = next(iter(self._under_way.values()))
        return self._heard_at_s + self._patience * oldest.limit_s - time.monotonic()

    def _lost_writer(self, why: str) -> None:
        """Go on without the writer and what it was writing; the next save starts another one.

        Raises CheckpointError if that was a part, because the other workers wait for it.
        """
        lost = list(self._under_way.values())
        self._abandon_writer()
        if not lost:
            return
        steps = ", ".join(str(one.step) for one in lost)
        message = f"{why}: the checkpoint of step {steps} is not there; those before stay valid"
        if any(one.is_part for one in lost):
            raise CheckpointError(message)
        self._warnings.append(message)

    def _abandon_writer(self) -> None:
        """Kill the writer, and do not wait for its end: a process that waits for storage may take long to die."""
        if self._writer is not None:
            self._writer.abandon()
            # Earlier ones have ended by now, so neither processes nor descriptors accumulate over many changes.
            self._abandoned = [writer for writer in self._abandoned if not writer.has_gone()] + [self._writer]
            self._writer = None
        self._forget_writer()

    def _let_go_of_writer(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        for writer in self._abandoned:
            writer.close()
        self._abandoned.clear()
        self._forget_writer()

    def _forget_writer(self) -> None:
        self._known_to_writer.clear()
        self._under_way.clear()


def _split(contents: Sequence[Content], part: Part | None) -> list[Content]:
    return list(contents) if part is None else part_of(contents, part)


def _gpu_of(contents: Sequence[Content]) -> torch.device | None:
    devices = (piece.tensor.device for content in contents for piece in content.pieces)
    return next((device for device in devices if device.type == "cuda"), None)


def _saved(generation: int, step: int, info: CandidateInfo | None, stall_s: float, write_s: float) -> Saved:
    return Saved(
        generation=generation,
        step=step,
        name=candidate_name(generation, step) if info is None else info.name,
        digest=None if info is None else info.digest,
        size_bytes=0 if info is None else info.size_bytes,
        stall_s=stall_s,
        write_s=write_s,
    )
