"""Fetching samples of a map-style dataset: in the training process, or ahead of time in persistent processes.

The content of a ticket does not depend on where or when it is fetched: it determines indices, order and seed.
May import torch and the standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset

from elasticflow_airflow.runtime.samples.sample_order import Fetcher, Ticket, random_state_kept, seed_host

Collate = Callable[[list[Any]], Any]


class TicketDataset(Dataset[Any]):
    """A dataset whose items are whole tickets: their samples, fetched under the ticket's seed, and collated."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate) -> None:
        self.dataset, self._collate = dataset, collate_fn

    def __getitem__(self, ticket: Ticket) -> Any:
        """Fetch a ticket; this changes the caller's random state."""
        seed_host(ticket.seed)
        if hasattr(self.dataset, "__getitems__"):
            return self._collate(self.dataset.__getitems__(list(ticket.indices)))
        return self._collate([self.dataset[index] for index in ticket.indices])


class DirectFetcher:
    """Fetches in this process, on demand."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate) -> None:
        self.tickets = TicketDataset(dataset, collate_fn)

    def expect(self, tickets: Iterable[Ticket]) -> None:
        """Do nothing: this fetcher does not fetch ahead."""

    def get(self, tickets: Sequence[Ticket]) -> list[Any]:
        """Fetch the tickets now; the caller's random state is preserved."""
        if not tickets:
            return []
        with random_state_kept():
            return [self.tickets[ticket] for ticket in tickets]

    def close(self) -> None:
        """Do nothing: this fetcher holds no resources."""


class _Guarded(Dataset[Any]):
    """The dataset of the loader's processes: returns errors as results, to be raised when the ticket is requested."""

    def __init__(self, tickets: TicketDataset) -> None:
        self._tickets = tickets

    def __getitem__(self, ticket: Ticket) -> Any:
        try:
            return self._tickets[ticket]
        except Exception:  # noqa: BLE001  (raised where the ticket is requested)
            error = ExceptionWrapper(where="in a process of the loader")  # type: ignore[no-untyped-call]  # torch's own
            return _Failure(error)


@dataclass(frozen=True, slots=True)
class _Failure:
    """An error in place of a ticket's content."""

    error: ExceptionWrapper


class _Queue:
    """Batch sampler of the processes: yields the currently expected tickets one by one.

    It stops when there are none, but can continue later with newly expected ones.
    """

    def __init__(self) -> None:
        self.upcoming: Iterator[Ticket] = iter(())
        self.sent: deque[Ticket] = deque()
        self.dry = True

    def __iter__(self) -> _Queue:
        return self

    def __next__(self) -> list[Ticket]:
        for ticket in self.upcoming:
            self.sent.append(ticket)
            return [ticket]
        self.dry = True
        raise StopIteration


class WorkerFetcher:
    """Fetches ahead in processes that persist over epochs and rescales. ``options`` are those of DataLoader.

    When ownership changes, tickets already fetched or in progress are kept if they are still expected. Fetching of
    unexpected tickets cannot be cancelled: their results arrive before those requested later, which have to wait. This
    waiting counts as time for data in the next steps, not as part of the pause of the change.
    """

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate, options: Mapping[str, Any]) -> None:
        self._direct = DirectFetcher(dataset, collate_fn)
        self._queue = _Queue()
        self._loader: DataLoader[Any] | None = persistent_loader(_Guarded(self._direct.tickets), self._queue, options)
        self._coming: Iterator[Any] | None = None
        self._held: dict[Ticket, Any] = {}
        """Results that arrived before their turn: at most those fetched ahead at the last change."""
        self._kept: set[Ticket] = set()
        """Tickets that were fetched ahead, or in progress, at the last change and were still expected."""
        self._before_change = 0
        """How many of the sent tickets were sent before the last change; their results arrive first."""

    def expect(self, tickets: Iterable[Ticket]) -> None:
        """Fetch these tickets from now on, in order; those already fetched ahead are not fetched again."""
        known, upcoming = {*self._held, *self._queue.sent}, iter(tickets)
        if known:
            soon = list(_up_to(max(map(_place, known)), upcoming))
            self._kept = known.intersection(soon)
            upcoming = chain([ticket for ticket in soon if ticket not in known], upcoming)
        else:
            self._kept = set()
        if self._kept.isdisjoint(self._queue.sent):
            self._queue.sent.clear()  # all of them are dropped, and the processes' queues are refilled
        self._before_change = len(self._queue.sent)
        self._held = {ticket: content for ticket, content in self._held.items() if ticket in self._kept}
        self._queue.upcoming, self._queue.dry = upcoming, False

    def get(self, tickets: Sequence[Ticket]) -> list[Any]:
        """Return tickets fetched ahead or in progress in the processes; fetch others in this process."""
        return [self._get(ticket) for ticket in tickets]

    def _get(self, ticket: Ticket) -> Any:
        if self._loader is None:
            return self._direct.get([ticket])[0]
        sent = self._queue.sent
        if ticket not in self._held and not sent and not self._queue.dry:
            # This fills the processes' queues; results still in progress are awaited and dropped.
            self._coming = iter(self._loader)
        while ticket not in self._held and (ticket in sent or self._before_change):
            self._take(ticket)
        if ticket not in self._held:
            return self._direct.get([ticket])[0]
        return _opened(self._held.pop(ticket))

    def _take(self, wanted: Ticket) -> None:
        """Wait for the next result, which makes the processes start another ticket; hold it if it is needed."""
        assert self._coming is not None  # a ticket is in progress
        content = next(self._coming)
        arrived = self._queue.sent.popleft()  # they answer in order
        self._before_change = max(0, self._before_change - 1)
        if arrived == wanted or arrived in self._kept:
            self._held[arrived] = content

    def close(self) -> None:
        """End the processes."""
        self._coming, self._loader = None, None
        self._held, self._kept = {}, set()


def make_fetcher(dataset: Dataset[Any], collate_fn: Collate, options: Mapping[str, Any]) -> Fetcher:
    """Create a fetcher for the options of a DataLoader, with processes if ``num_workers`` is above 0."""
    if options.get("num_workers"):
        return WorkerFetcher(dataset, collate_fn, options)
    return DirectFetcher(dataset, collate_fn)


def persistent_loader(
    dataset: Dataset[Any], batch_sampler: Iterable[list[Any]], options: Mapping[str, Any]
) -> DataLoader[Any]:
    """Create a loader with persistent processes. Each batch is one item, passed on as it is."""
    return DataLoader(
        dataset,
        batch_sampler=batch_sampler,
        collate_fn=_the_only,
        # DataLoader draws a seed for its processes, unused here: do not take it from the training's generator.
        generator=torch.Generator(),
        **{"persistent_workers": True, **options},
    )


def _place(ticket: Ticket) -> tuple[int, int]:
    return ticket.epoch, ticket.step_in_epoch


def _up_to(last: tuple[int, int], tickets: Iterator[Ticket]) -> Iterator[Ticket]:
    """Yield tickets up to and including the first one after step ``last``."""
    for ticket in tickets:
        yield ticket
        if _place(ticket) > last:
            return


def _opened(content: Any) -> Any:
    if isinstance(content, _Failure):
        content.error.reraise()  # type: ignore[no-untyped-call]  # torch's own
    return content


def _the_only(items: list[Any]) -> Any:
    return items[0]
