"""Resumable streams: training sets that are read sequentially, and can save and restore their position.

Every worker reads the same stream in the same order and keeps the samples of its logical workers; ``transform`` and the
collate function are applied to those only. Only the reading is thus repeated by every worker, and the stream's position
is the same on all of them. The stream's state at each step boundary is kept: a step that is divided again, a checkpoint
and a joining worker continue from there without reading earlier samples.

A stream is read in the training process, or ahead of time in a single separate process. It is never read in a thread,
which would share the training's random state. May import torch and the standard library only.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import worker as loader_worker

from elasticflow_airflow.runtime.samples.fetching import (
    Collate,
    _the_only,  # noqa: F401  (workers of an earlier release name it here to the process that they spawn)
    persistent_loader,
)
from elasticflow_airflow.runtime.samples.sample_order import BatchPlan, Ticket, mix_seed, seeded

PART = "elasticflow_stream"
"""Name of a stream's position in a checkpoint, next to the parts that the script registered."""
_STATES_KEPT = 6
_END = object()


class Stream(Protocol):
    """The interface of a stream. If it has ``set_epoch(epoch)``, that is called before each epoch."""

    def __iter__(self) -> Iterator[Any]:
        """Continue from the state that was loaded last."""
        ...

    def state_dict(self) -> Any:
        """Return the position of the newest iterator: after the sample that it yielded last."""
        ...

    def load_state_dict(self, state_dict: Any) -> None:
        """Make the next iterator begin at this state."""
        ...


class StreamEndError(ValueError):
    """A stream has fewer or more samples in an epoch than declared."""


@dataclass(frozen=True, slots=True)
class Start:
    """Where to begin reading: ``offset`` samples into the epoch, at ``state`` of the stream; None: the beginning.

    With ``stands_in`` samples from the epoch's beginning stand in for those at the offset, during warm-up.
    """

    offset: int
    state: Any
    stands_in: bool = False


@dataclass(frozen=True, slots=True)
class Order:
    """A request to read one step: samples ``first`` to ``last`` of the epoch, for the tickets of this worker."""

    epoch: int
    first: int
    last: int
    tickets: tuple[Ticket, ...]
    seed: int
    start: Start | None
    """Where to begin; None continues from the end of the previous order."""


@dataclass(frozen=True, slots=True)
class StreamReader:
    """Reads a stream with ``samples`` samples per epoch; ``initial`` is the state at the beginning of each epoch."""

    stream: Stream
    samples: int
    initial: Any
    collate: Collate
    transform: Callable[[Any], Any] | None

    def open(self, epoch: int, state: Any) -> Iterator[Any]:
        """Begin reading at a state, or at the beginning of the epoch if it is None."""
        set_epoch = getattr(self.stream, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)
        self.stream.load_state_dict(copy.deepcopy(self.initial if state is None else state))
        return iter(self.stream)

    def collated(self, ticket: Ticket, samples: list[Any]) -> Any:
        """Transform and collate a ticket's raw samples, under the ticket's seed."""
        with seeded(ticket.seed):
            return self.collate(samples if self.transform is None else [self.transform(one) for one in samples])


class Walk:
    """Reads a stream step after step from its current position, in the process that reads the stream."""

    def __init__(self, reader: StreamReader) -> None:
        self._reader = reader
        self._coming: Iterator[Any] = iter(())
        self._at: tuple[int, int] | None = None
        self._stands_in = False

    def read(self, order: Order) -> tuple[int, int, dict[int, Any], Any]:
        """Read one step; return epoch, ``first``, each logical worker's collated content, and the state after the step.

        Raises StreamEndError if the stream ends before its declared length, or continues after it.
        """
        reader = self._reader
        if order.start is not None:
            self._at = None
            self._stands_in = order.start.stands_in
            self._coming = self._begin(order.epoch, order.start.state)
            self._at = order.epoch, order.start.offset
        at, self._at = self._at, None
        if at is None or at[0] != order.epoch or at[1] > order.first:
            raise RuntimeError(f"the stream stands at {at}, not before sample {order.first} of epoch {order.epoch}")
        kept: dict[int, list[Any]] = {ticket.logical: [] for ticket in order.tickets}
        owner = {index: kept[ticket.logical] for ticket in order.tickets for index in ticket.indices}
        with seeded(order.seed):
            for number in range(at[1], order.last):
                sample = next(self._coming, _END)
                if sample is _END:
                    self._ended(order.epoch, number)
                if number in owner:
                    owner[number].append(sample)
            if order.last == reader.samples and not self._stands_in and next(self._coming, _END) is not _END:
                raise StreamEndError(
                    f"the stream goes on after the samples={reader.samples} that an epoch was said to have: say how "
                    "many it has, or let it end there (Hugging Face datasets: .take(n))"
                )
        contents = {ticket.logical: reader.collated(ticket, kept[ticket.logical]) for ticket in order.tickets}
        # Copy the state, since the stream may modify the object that it returned.
        state = None if order.last == reader.samples else copy.deepcopy(reader.stream.state_dict())
        self._at = order.epoch, order.last
        return order.epoch, order.first, contents, state

    def _begin(self, epoch: int, state: Any) -> Iterator[Any]:
        """Begin reading; raise RuntimeError with an explanation if the stream rejects its saved state.

        The first sample is read here, because many streams use the state only then.
        """
        try:
            coming = self._reader.open(epoch, state)
            first = next(coming, _END)
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            if state is None:
                raise
            raise RuntimeError(
                f"the stream cannot be read from the state that it had ({type(error).__name__}: {error}): it was built "
                "otherwise when that was saved. Build it as it was, or start without this checkpoint"
            ) from error
        if first is not _END:
            yield first
            yield from coming

    def _ended(self, epoch: int, number: int) -> None:
        raise StreamEndError(
            f"the stream ended after {number} samples of epoch {epoch}, samples={self._reader.samples} were said to be "
            "in each: say how many there are, or find out why some are missing"
        )


class StreamBook:
    """The states of the stream at the last step boundaries, by epoch and number of samples read, for checkpoints.

    It is registered with model and optimizer, so it is part of checkpoints and is sent to joining workers. ``where``
    returns epoch and index of the training's next step; ``step_samples`` is the number of samples per step.
    """

    def __init__(self, where: Callable[[], tuple[int, int]]) -> None:
        self._where = where
        self.step_samples = 1
        self._states: OrderedDict[tuple[int, int], Any] = OrderedDict()

    def record(self, epoch: int, offset: int, state: Any) -> None:
        """Keep a state and the few newest older ones: at most a step is divided again, never many."""
        self._states[epoch, offset] = state
        self._states.move_to_end((epoch, offset))
        while len(self._states) > _STATES_KEPT:
            self._states.popitem(last=False)

    def nearest(self, epoch: int, offset: int) -> Start:
        """Return the last known position at or before ``offset``; if there is none, the epoch's beginning."""
        known = [at for in_epoch, at in self._states if in_epoch == epoch and at <= offset]
        return Start(max(known), self._states[epoch, max(known)]) if known else Start(0, None)

    def state_dict(self) -> dict[str, Any]:
        """Return the stream's position at the training's current step boundary. Also called from other threads."""
        epoch, step = self._where()
        offset = step * self.step_samples
        return {"epoch": epoch, "offset": offset, "state": copy.deepcopy(self._states.get((epoch, offset)))}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the position. Raises KeyError if the state is not that of a StreamBook."""
        epoch, offset, state = int(state_dict["epoch"]), int(state_dict["offset"]), state_dict["state"]
        self._states.clear()
        if state is not None:
            self.record(epoch, offset, copy.deepcopy(state))


class StreamFetcher:
    """Fetches the content of tickets from a stream, step by step, in the order in which they are expected.

    ``rehearses`` returns whether this worker is only warming up to join: any samples will do, and no state is kept.
    """

    def __init__(
        self,
        reader: StreamReader,
        plan: BatchPlan,
        book: StreamBook,
        options: Mapping[str, Any],
        *,
        rehearses: Callable[[], bool] = lambda: False,
        warn: Callable[[str], None] = warnings.warn,
    ) -> None:
        self._plan, self._book, self._rehearses, self._warn = plan, book, rehearses, warn
        book.step_samples = plan.global_batch_size
        self._read: tuple[int, int, dict[int, Any], Any] | None = None
        self._source: _Ahead | _Here = _Ahead(reader, options) if options.get("num_workers") else _Here(reader)

    def expect(self, tickets: Iterable[Ticket]) -> None:
        """Begin reading for these tickets, from the state at the boundary before the first of them."""
        self._read = None
        self._source.expect(self._steps(tickets))

    def get(self, tickets: Sequence[Ticket]) -> list[Any]:
        """Return tickets from the current or next step; an unexpected ticket is read separately."""
        return [self._get(ticket) for ticket in tickets]

    def _get(self, ticket: Ticket) -> Any:
        if not self._has(ticket):
            self._next()
        if not self._has(ticket):
            self.expect([ticket])
            self._next()
        assert self._read is not None  # it was just read
        return self._read[2].pop(ticket.logical)

    def close(self) -> None:
        """End the reading process, if there is one."""
        self._read = None
        self._source.close()

    def _has(self, ticket: Ticket) -> bool:
        at = ticket.epoch, ticket.step_in_epoch * self._plan.global_batch_size
        return self._read is not None and self._read[:2] == at and ticket.logical in self._read[2]

    def _next(self) -> None:
        self._read = self._source.next()
        if self._read is None:
            return
        epoch, first, _contents, state = self._read
        if state is not None and not self._rehearses():
            self._book.record(epoch, min(first + self._plan.global_batch_size, self._plan.samples), state)

    def _steps(self, tickets: Iterable[Ticket]) -> Iterator[Order]:
        size = self._plan.global_batch_size
        begins = True
        for (epoch, step), group in itertools.groupby(tickets, key=lambda one: (one.epoch, one.step_in_epoch)):
            first = step * size
            start = self._start(epoch, first) if begins else None
            begins = False
            yield Order(
                epoch=epoch,
                first=first,
                last=min(first + size, self._plan.samples),
                tickets=tuple(group),
                seed=mix_seed(self._plan.seed, 0x57EA, epoch, step),
                start=start,
            )

    def _start(self, epoch: int, first: int) -> Start:
        if self._rehearses():
            return Start(first, None, stands_in=True)
        start = self._book.nearest(epoch, first)
        if start.offset < first:
            self._warn(
                f"the stream's state after {first} samples of epoch {epoch} is not known: reading through "
                f"{first - start.offset} samples to get there"
            )
        return start


class _Here:
    """Reads in this process, on demand."""

    def __init__(self, reader: StreamReader) -> None:
        self._walk = Walk(reader)
        self._orders: Iterator[Order] = iter(())

    def expect(self, orders: Iterator[Order]) -> None:
        self._orders = orders

    def next(self) -> tuple[int, int, dict[int, Any], Any] | None:
        order = next(self._orders, None)
        return None if order is None else self._walk.read(order)

    def close(self) -> None:
        self._orders = iter(())


class _Ahead:
    """Reads ahead in one persistent process. ``options`` are those of DataLoader."""

    def __init__(self, reader: StreamReader, options: Mapping[str, Any]) -> None:
        self._orders = _Queue()
        self._loader: DataLoader[Any] | None = persistent_loader(_Steps(reader), self._orders, options)
        self._coming: Iterator[Any] | None = None

    def expect(self, orders: Iterator[Order]) -> None:
        self._orders.upcoming = orders
        self._coming = None

    def next(self) -> tuple[int, int, dict[int, Any], Any] | None:
        if self._loader is None:
            raise RuntimeError("the loader is closed: the training has come to its end")
        if self._coming is None:
            self._coming = iter(self._loader)
        found: tuple[int, int, dict[int, Any], Any] | None = next(self._coming, None)
        return found

    def close(self) -> None:
        self._coming, self._loader = None, None


class _Queue:
    """Batch sampler of the process: yields the currently expected orders one by one."""

    def __init__(self) -> None:
        self.upcoming: Iterator[Order] = iter(())

    def __iter__(self) -> Iterator[list[Order]]:
        for order in self.upcoming:
            yield [order]


class _Steps(Dataset[Any]):
    """Dataset of the reading process: its items are steps, requested in order."""

    def __init__(self, reader: StreamReader) -> None:
        self._walk = Walk(reader)

    def __getitem__(self, order: Order) -> Any:
        # With worker info set, PyTorch and Hugging Face streams would yield only this loader worker's part.
        loader_worker._worker_info = None
        return self._walk.read(order)
