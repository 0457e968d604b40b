"""Writes checkpoints in a low-priority process next to a trainer (run as ``python -m`` with the name of this module).

It receives its work over a socket and the tensors through shared memory, and dies with its trainer, which it detects
by the end of the socket, the trainer's pid, and the parent-death signal. It ignores the signals that ask a trainer to
exit, because the trainer still has to save then. It needs no torch and starts in a tenth of a second. May import the
standard library only, plus fsspec when checkpoints go to a URL.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import mmap
import os
import platform
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from elasticflow_airflow.runtime.stores import file_format
from elasticflow_airflow.runtime.stores.file_format import Blob
from elasticflow_airflow.runtime.stores.manifest import CandidateInfo, CheckpointError, FileEntry
from elasticflow_airflow.runtime.stores.open_store import open_store
from elasticflow_airflow.runtime.stores.retrying import retried
from elasticflow_airflow.runtime.stores.store import PART_LIMIT_S, Part, Store, UploadBrokeOff

SUFFIX = ".tensors"
MESSAGE_BYTES = 1 << 16
_MOST_OF_A_MESSAGE = 16_000
_PR_SET_PDEATHSIG = 1
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_IOPRIO_CLASS_IDLE = 3 << 13


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file of a checkpoint: the state's description, and its tensors as bytes."""

    name: str
    state: Any
    blobs: Sequence[Blob]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to write in addition to the tensors, and what to do after the write."""

    incarnation: int
    generation: int
    step: int
    metadata: Mapping[str, Any] = field(default_factory=dict)
    part: Part | None = None
    part_limit_s: float = PART_LIMIT_S
    promotes: bool = False
    """Promote the checkpoint and remove old ones; only without the service, which otherwise does that."""
    keep: int = 2


def write_checkpoint(store: Store, files: Sequence[FilePlan], order: Order) -> CandidateInfo | None:
    """Write a whole checkpoint, or one worker's part. Returns None if another worker finishes it.

    An interrupted upload is retried for about a quarter of a minute. Raises CheckpointError.
    """
    info = retried(lambda: _write(store, files, order), UploadBrokeOff)
    if info is not None and order.promotes:
        try:
            store.promote(info)
            store.remove_old(order.keep)
        except OSError as error:
            raise CheckpointError(f"checkpoint {store.where}/{info.name} could not be promoted: {error}") from error
    return info


def _write(store: Store, files: Sequence[FilePlan], order: Order) -> CandidateInfo | None:
    with store.writing(order.generation, order.step, order.part) as draft:
        entries = {}
        for file in files:
            name = file.name + SUFFIX
            with draft.create(name) as stream:
                written = file_format.write(stream, file.state, file.blobs)
            entries[name] = FileEntry(written.digest, written.size_bytes, container=True)
        return draft.publish(
            entries, incarnation=order.incarnation, metadata=order.metadata, limit_s=order.part_limit_s
        )


def encode_work(where: str, order: Order, files: Sequence[Mapping[str, Any]]) -> bytes:
    """Encode work for the process; tensors are given by their offsets in the shared memory."""
    part = None if order.part is None else asdict(order.part)
    fields = {name: getattr(order, name) for name in ("incarnation", "generation", "step", "promotes", "keep")}
    body = {**fields, "metadata": order.metadata, "part": part, "part_limit_s": order.part_limit_s}
    return json.dumps({"where": where, "order": body, "files": list(files)}, allow_nan=False).encode()


def decode_work(raw: bytes, memory: memoryview) -> tuple[str, Order, list[FilePlan]]:
    """Decode the output of :func:`encode_work`; the tensors are views of ``memory``."""
    work = json.loads(raw)
    part = work["order"].pop("part")
    order = Order(part=None if part is None else Part(**part), **work["order"])
    files = [
        FilePlan(
            file["name"],
            file["state"],
            [
                Blob(tuple(numbers), dtype, tuple(shape), memory[offset : offset + nbytes])
                for numbers, dtype, shape, offset, nbytes in file["tensors"]
            ],
        )
        for file in work["files"]
    ]
    return work["where"], order, files


class _Server:
    """The writer process: one thread listens, so that the trainer never waits for it; the main thread writes."""

    def __init__(self, connection: socket.socket, trainer: int) -> None:
        self._connection = connection
        self._trainer = trainer
        self._work: queue.SimpleQueue[dict[str, int]] = queue.SimpleQueue()
        self._memories: dict[int, mmap.mmap] = {}
        self._stores: dict[str, Store] = {}

    def serve(self) -> NoReturn:
        threading.Thread(target=self._listen, name="listen", daemon=True).start()
        while True:
            answer = self._do(self._work.get())
            # If the trainer has gone meanwhile, the other thread ends the process.
            with contextlib.suppress(OSError):
                self._connection.send(json.dumps(answer).encode())

    def _listen(self) -> None:
        """Queue incoming work, and end the process as soon as the trainer ends, even during a write."""
        try:
            trainer = os.pidfd_open(self._trainer)
            while os.getppid() == self._trainer:
                ready, _, _ = select.select([trainer, self._connection.fileno()], [], [])
                if trainer in ready or not self._take_one():
                    break
        except Exception:  # noqa: BLE001  (shown; a writer that no longer listens must not stay)
            traceback.print_exc()
        finally:
            os._exit(0)

    def _take_one(self) -> bool:
        try:
            raw, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 1)
        except ConnectionResetError:  # The trainer ended without reading our last answer.
            return False
        if not raw:
            return False
        message = json.loads(raw)
        for descriptor in descriptors:
            # Read-only: no fault here can change the trainer's data.
            size = os.fstat(descriptor).st_size
            self._memories[message["buffer"]] = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
            os.close(descriptor)
            self._memories.pop(message["instead_of"], None)
        self._work.put(message)
        return True

    def _do(self, message: Mapping[str, int]) -> dict[str, Any]:
        began_s = time.perf_counter()
        answer: dict[str, Any] = {"work": message["work"]}
        try:
            memory = memoryview(self._memories[message["buffer"]])
            raw = bytes(memory[message["offset"] : message["offset"] + message["length"]])
            where, order, files = decode_work(raw, memory)
            if where not in self._stores:
                self._stores[where] = open_store(where)
            info = write_checkpoint(self._stores[where], files, order)
            answer |= {"info": None if info is None else [info.name, info.digest, info.size_bytes]}
        except CheckpointError as error:
            answer |= {"error": str(error)[:_MOST_OF_A_MESSAGE]}
        except Exception as error:  # noqa: BLE001  (sent to the trainer, which raises it)
            answer |= {"error": f"the checkpoint could not be written: {error!r}"[:_MOST_OF_A_MESSAGE]}
        return answer | {"write_s": time.perf_counter() - began_s}


def _lower_priority(nice: int) -> None:
    """Lower CPU and I/O priority, so that training comes first."""
    os.setpriority(os.PRIO_PROCESS, 0, max(nice, os.getpriority(os.PRIO_PROCESS, 0)))
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_CLASS_IDLE)  # If not permitted, the priority stays as it is.


def main() -> None:
    """Serve the trainer whose socket was inherited; arguments: its descriptor, the trainer's pid, niceness."""
    descriptor, trainer, nice, dies_with_thread = map(int, sys.argv[1:5])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if dies_with_thread:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _lower_priority(nice)
    Path("/proc/self/oom_score_adj").write_text("500")  # The OOM killer should prefer the writer to the trainer.
    with socket.socket(fileno=descriptor) as connection:
        _Server(connection, trainer).serve()


if __name__ == "__main__":
    main()
