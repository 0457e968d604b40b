"""Fetching samples of a map-style dataset: in the training process, or ahead of time in processes that persist.

What a ticket stands for is the same wherever and whenever it is fetched: indices, order and seed are the ticket's.
May import torch and the standard library only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from elasticflow_airflow.runtime.data import Fetcher, Ticket, seeded

Collate = Callable[[list[Any]], Any]


class TicketDataset(Dataset[Any]):
    """A dataset whose items are whole tickets: their samples, fetched under the ticket's seed, and collated."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate) -> None:
        self.dataset, self._collate = dataset, collate_fn

    def __getitem__(self, ticket: Ticket) -> Any:
        """Fetch; the random state of the caller stays as it was."""
        with seeded(ticket.seed):
            if hasattr(self.dataset, "__getitems__"):
                return self._collate(self.dataset.__getitems__(list(ticket.indices)))
            return self._collate([self.dataset[index] for index in ticket.indices])


class DirectFetcher:
    """Fetches in this process, when asked."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate) -> None:
        self.tickets = TicketDataset(dataset, collate_fn)

    def expect(self, tickets: Iterable[Ticket]) -> None:
        """Nothing is fetched ahead."""

    def get(self, ticket: Ticket) -> Any:
        """Fetch it now."""
        return self.tickets[ticket]

    def close(self) -> None:
        """Nothing is held."""


class _Queue:
    """Batch sampler of the processes: one ticket after the other, as they are expected now."""

    def __init__(self) -> None:
        self.upcoming: Iterator[Ticket] = iter(())
        self.sent: deque[Ticket] = deque()

    def __iter__(self) -> Iterator[list[Ticket]]:
        for ticket in self.upcoming:
            self.sent.append(ticket)
            yield [ticket]


class WorkerFetcher:
    """Fetches ahead in processes that persist over epochs and rescales. ``options`` are those of DataLoader."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate, options: Mapping[str, Any]) -> None:
        self._direct = DirectFetcher(dataset, collate_fn)
        self._queue = _Queue()
        self._loader: DataLoader[Any] | None = DataLoader(
            self._direct.tickets,
            batch_sampler=self._queue,
            collate_fn=_the_only,
            # It draws a seed for its processes, which nothing here uses: not from the training's generator.
            generator=torch.Generator(),
            **{"persistent_workers": True, **options},
        )
        self._coming: Iterator[Any] | None = None

    def expect(self, tickets: Iterable[Ticket]) -> None:
        """Begin to fetch these; what is under way is waited for and dropped."""
        self._queue.upcoming = iter(tickets)
        self._queue.sent.clear()
        self._coming = None

    def get(self, ticket: Ticket) -> Any:
        """Take it from the processes when it is the next that was expected, else fetch it here."""
        if self._loader is None:
            return self._direct.get(ticket)
        if self._coming is None:
            self._coming = iter(self._loader)
        if not self._queue.sent or self._queue.sent[0] != ticket:
            return self._direct.get(ticket)
        self._queue.sent.popleft()
        return next(self._coming)

    def close(self) -> None:
        """End the processes."""
        self._coming, self._loader = None, None


def make_fetcher(dataset: Dataset[Any], collate_fn: Collate, options: Mapping[str, Any]) -> Fetcher:
    """A fetcher for the options of a DataLoader: with processes when ``num_workers`` asks for some."""
    if options.get("num_workers"):
        return WorkerFetcher(dataset, collate_fn, options)
    return DirectFetcher(dataset, collate_fn)


def _the_only(items: list[Any]) -> Any:
    return items[0]
