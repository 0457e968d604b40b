"""The current workers as a process group of our own, outside torch's global one.

Every operation runs in a communication thread. The caller waits for it *or* for the report that a member is lost: only
the death of a process unblocks a gloo operation, so its thread is then abandoned. Sums follow one fixed binary tree
over the ranks, so that they do not depend on how many processes share the leaves.
May import torch and the standard library only.
"""

from __future__ import annotations

import datetime
import json
import queue
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from elasticflow_airflow.runtime.logical_workers import is_power_of_two

COLLECTIVE_TIMEOUT_S = 7200.0
"""Longer than the service waits (e.g. while rank 0 evaluates), which detects dead workers and gives up hung ones."""
_FIRST_BYTES = 1 << 14
"""This many bytes of a value are sent along with its length: most values need no second exchange."""
_LENGTH = struct.Struct("<Q")
_LOOK_S = 0.1


class GroupBroken(RuntimeError):  # noqa: N818  (named after what happened)
    """A member of the group is gone, or the group's operations fail: operations in flight are void."""


class WorkerGroup:
    """Rank and size, and operations that all members call in the same order. Size 1 needs no process group."""

    def __init__(self, rank: int = 0, size: int = 1, process_group: Any = None, generation: int = 0) -> None:
        self.rank, self.size, self.generation = rank, size, generation
        self._pg = process_group
        self._why: str | None = None
        self._changed = threading.Condition()
        self._work: queue.SimpleQueue[tuple[Callable[[Any], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        if process_group is not None:
            name = f"elasticflow-group-{generation}"
            self._thread = threading.Thread(target=self._serve, args=[process_group], name=name, daemon=True)
            self._thread.start()

    @classmethod
    def of_torchrun(cls, device: torch.device, rank: int, size: int) -> WorkerGroup:
        """Return the group of the world that a bare torchrun started, using torch's default group."""
        if size == 1:
            return cls()
        limit = datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=limit)
        if device.type != "cuda":
            return cls(rank, size, dist.distributed_c10d._get_default_group())
        # The default group's NCCL refuses workers that share a GPU, and a group made by the script may lack gloo.
        from elasticflow_airflow.runtime.gang.cuda_group import CudaGroup

        store = dist.distributed_c10d.PrefixStore("elasticflow", dist.distributed_c10d._get_default_store())
        return cls(rank, size, CudaGroup(store, rank, size, limit, device))

    # -- operations ---------------------------------------------------------------------------------------------

    def submit(self, operation: Callable[[Any], Any]) -> Future[Any]:
        """Queue an operation on the process group; all members must queue the same operations in the same order."""
        future: Future[Any] = Future()
        if self._pg is None:
            future.set_exception(GroupBroken(f"the group of generation {self.generation} was left"))
            return future
        future.add_done_callback(lambda _: self._wake())
        self._work.put((operation, future))
        return future

    def wait(self, future: Future[Any], look: Callable[[], None] = lambda: None) -> Any:
        """Wait for a queued operation. Raises GroupBroken if it fails, or if a member is given up meanwhile.

        ``look`` is called periodically; an exception that it raises ends the wait.
        """
        with self._changed:
            while not self._changed.wait_for(lambda: future.done() or self._why is not None, _LOOK_S):
                look()
        if self._why is not None and not future.done():
            raise GroupBroken(self._why)
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, GroupBroken | torch.OutOfMemoryError | torch.AcceleratorError):
            raise error  # The other workers are alive; the fault is this worker's device.
        if isinstance(error, RuntimeError):
            raise GroupBroken(f"a worker of generation {self.generation} is gone") from error
        raise error

    def exchange(self, row: Tensor, look: Callable[[], None] = lambda: None) -> Tensor:
        """Gather all rows on every worker: (n,) on the CPU in, (size, n) out, by rank. ``look``: see :meth:`wait`."""
        gathered: Tensor = self.wait(self.begin_exchange(row), look)
        return gathered

    def begin_exchange(self, row: Tensor) -> Future[Any]:
        """Begin an exchange, to be waited for later; with size 1 the result is available at once."""
        if self.size == 1:
            done: Future[Any] = Future()
            done.set_result(row.unsqueeze(0))
            return done

        def gather(group: Any) -> Tensor:
            rows = [torch.empty_like(row) for _ in range(self.size)]
            group.allgather([rows], [row]).wait()
            return torch.stack(rows)

        return self.submit(gather)

    def exchange_values(self, value: Any, look: Callable[[], None] = lambda: None) -> list[Any]:
        """Gather all workers' JSON values, of any length, on every worker, by rank. ``look``: see :meth:`wait`."""
        values: list[Any] = self.wait(self.begin_exchange_values(value), look)
        return values

    def begin_exchange_values(self, value: Any) -> Future[Any]:
        """Begin an exchange of JSON values, to be waited for later; with size 1 the result is available at once."""
        text = json.dumps(value).encode()
        if self.size == 1:
            done: Future[Any] = Future()
            done.set_result([json.loads(text)])
            return done

        def gather(group: Any) -> list[Any]:
            begins = _gather_bytes(group, self.size, _LENGTH.pack(len(text)) + text, _LENGTH.size + _FIRST_BYTES)
            lengths = [_LENGTH.unpack_from(begin)[0] for begin in begins]
            # All workers see the same lengths, so all know whether there is a second exchange.
            more = max(lengths) - _FIRST_BYTES
            rests = _gather_bytes(group, self.size, text[_FIRST_BYTES:], more) if more > 0 else [b""] * self.size
            return [
                json.loads((begin[_LENGTH.size :] + rest)[:length])
                for begin, rest, length in zip(begins, rests, lengths, strict=True)
            ]

        return self.submit(gather)

    def wait_for_all(self) -> None:
        """Block until every worker has called this method."""
        self.exchange(torch.zeros(1))

    # -- the end ------------------------------------------------------------------------------------------------

    def give_up(self, why: str) -> None:
        """Unblock all waiters because a member is lost. Thread-safe; called by the watcher of the plan."""
        with self._changed:
            self._why = self._why or why
            self._changed.notify_all()
        # A device kernel waits for the lost worker, and so does everything queued after it.
        abort = getattr(self._pg, "abort_device", None)
        if abort is not None:
            abort()

    @property
    def broken(self) -> bool:
        """Whether a member was given up."""
        return self._why is not None

    def close(self) -> None:
        """Release the process group in its own thread: dropping the last reference takes tens of milliseconds."""
        if self._pg is not None:
            self._work.put(None)
            self._pg = None

    def join(self, limit_s: float) -> bool:
        """Wait until the process group is released; return False if an operation still holds it."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(limit_s)
        return self._thread is None or not self._thread.is_alive()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _serve(self, group: Any) -> None:
        while (item := self._work.get()) is not None:
            operation, future = item
            try:
                if self._why is not None:
                    raise GroupBroken(self._why)  # survivors may have left this group: nobody would answer
                future.set_result(operation(group))
            except BaseException as error:  # noqa: BLE001  (raised in the waiting thread)
                future.set_exception(error)
            del item, operation, future
        close = getattr(group, "close_device", None)
        if close is not None:
            close()


def _gather_bytes(group: Any, size: int, own: bytes, length: int) -> list[bytes]:
    """Return every worker's first ``length`` bytes, by rank; shorter ones are padded."""
    rows = [bytearray(length) for _ in range(size)]
    row = torch.frombuffer(bytearray(own[:length].ljust(length)), dtype=torch.uint8)
    group.allgather([[torch.frombuffer(one, dtype=torch.uint8) for one in rows]], [row]).wait()
    return [bytes(one) for one in rows]


def sum_in_tree(flat: Tensor, scratch: Tensor, group: Any, rank: int, size: int) -> None:
    """Sum ``flat`` over all ranks in place, in one fixed binary tree: ((0+1)+(2+3))+...

    ``scratch`` is half as long, rounded up. Raises ValueError on every rank if the size is not a power of two.

    Recursive halving and doubling: at each level a rank exchanges half of what it still holds with the partner whose
    rank differs in one bit, lowest bit first, so that the same additions happen in the same order for every size that
    shares the leaves (EasyScale, SC 2022, section 3.3; Thakur, Rabenseifner and Gropp, 2005).
    """
    if not is_power_of_two(size):
        # Some ranks would have no partner and wait for it forever.
        raise ValueError(f"{size} workers cannot sum in a tree: their number must be a power of two")
    levels: list[tuple[int, int, int, int]] = []
    begin, end, distance = 0, flat.numel(), 1
    while distance < size:
        partner, middle = rank ^ distance, begin + (end - begin + 1) // 2
        low = rank & distance == 0
        keep, give = ((begin, middle), (middle, end)) if low else ((middle, end), (begin, middle))
        mine, received = flat[keep[0] : keep[1]], scratch[: keep[1] - keep[0]]
        _swap(group, flat[give[0] : give[1]], received, partner)
        # Addition is commutative bit for bit; only the grouping matters.
        mine.add_(received)
        levels.append((partner, begin, middle, end))
        begin, end = keep
        distance *= 2
    for partner, first, middle, last in reversed(levels):
        low = rank < partner
        keep, give = ((first, middle), (middle, last)) if low else ((middle, last), (first, middle))
        _swap(group, flat[keep[0] : keep[1]], flat[give[0] : give[1]], partner)


def _swap(group: Any, out: Tensor, into: Tensor, partner: int) -> None:
    """Send one tensor to the partner and receive one from it; either may be empty."""
    cuda = out.device.type == "cuda"
    if cuda:
        group._start_coalescing(out.device)
    sent = group.send([out], partner, 0) if out.numel() else None
    received = group.recv([into], partner, 0) if into.numel() else None
    if cuda:
        group._end_coalescing(out.device).wait()
        return
    if received is not None:
        received.wait()
    if sent is not None:
        sent.wait()
