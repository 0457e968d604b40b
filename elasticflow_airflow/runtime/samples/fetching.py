"""Fetching samples of a map-style dataset: in the training process, or ahead of time in processes that persist.

What a ticket stands for is the same wherever and whenever it is fetched: indices, order and seed are the ticket's.
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
        """Fetch; the random state of the caller is another one after."""
        seed_host(ticket.seed)
        if hasattr(self.dataset, "__getitems__"):
            return self._collate(self.dataset.__getitems__(list(ticket.indices)))
        return self._collate([self.dataset[index] for index in ticket.indices])


class DirectFetcher:
    """Fetches in this process, when asked."""

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate) -> None:
        self.tickets = TicketDataset(dataset, collate_fn)

    def expect(self, tickets: Iterable[Ticket]) -> None:
        """Nothing is fetched ahead."""

    def get(self, tickets: Sequence[Ticket]) -> list[Any]:
        """Fetch them now; the random state of the caller stays as it was."""
        if not tickets:
            return []
        with random_state_kept():
            return [self.tickets[ticket] for ticket in tickets]

    def close(self) -> None:
        """Nothing is held."""


class _Guarded(Dataset[Any]):
    """What the processes read: an error is an answer, too, for whoever asks for that very ticket."""

    def __init__(self, tickets: TicketDataset) -> None:
        self._tickets = tickets

    def __getitem__(self, ticket: Ticket) -> Any:
        try:
            return self._tickets[ticket]
        except Exception:  # noqa: BLE001  (raised where the ticket is asked for)
            error = ExceptionWrapper(where="in a process of the loader")  # type: ignore[no-untyped-call]  # torch's own
            return _Failure(error)


@dataclass(frozen=True, slots=True)
class _Failure:
    """In place of a ticket's content."""

    error: ExceptionWrapper


class _Queue:
    """Batch sampler of the processes: one ticket after the other, as they are expected now.

    When there is none it stops, but not for good: more may be expected later.
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

    What they have fetched, or are fetching, when ownership changes and is still expected then is kept, by its ticket.
    They cannot be told to stop what nobody expects any more: it comes before what was asked for later, and whoever gets
    that waits for it. This happens in the next steps, as time for data; a change's own pause has nothing of it.
    """

    def __init__(self, dataset: Dataset[Any], collate_fn: Collate, options: Mapping[str, Any]) -> None:
        self._direct = DirectFetcher(dataset, collate_fn)
        self._queue = _Queue()
        self._loader: DataLoader[Any] | None = DataLoader(
            _Guarded(self._direct.tickets),
            batch_sampler=self._queue,
            collate_fn=_the_only,
            # It draws a seed for its processes, which nothing here uses: not from the training's generator.
            generator=torch.Generator(),
            **{"persistent_workers": True, **options},
        )
        self._coming: Iterator[Any] | None = None
        self._held: dict[Ticket, Any] = {}
        """What has come before its turn: at most what had been fetched ahead at the last change."""
        self._kept: set[Ticket] = set()
        """What had been fetched ahead, or was under way, at the last change and was expected still."""
        self._before_change = 0
        """How many of those that were sent were so before the last change: they come first."""

    def expect(self, tickets: Iterable[Ticket]) -> None:
        """Fetch these from now on, in order; what was fetched ahead already is not fetched again."""
        known, upcoming = {*self._held, *self._queue.sent}, iter(tickets)
        if known:
            soon = list(_up_to(max(map(_place, known)), upcoming))
            self._kept = known.intersection(soon)
            upcoming = chain([ticket for ticket in soon if ticket not in known], upcoming)
        else:
            self._kept = set()
        if self._kept.isdisjoint(self._queue.sent):
            self._queue.sent.clear()  # all of it is dropped, and the processes' queues are filled anew
        self._before_change = len(self._queue.sent)
        self._held = {ticket: content for ticket, content in self._held.items() if ticket in self._kept}
        self._queue.upcoming, self._queue.dry = upcoming, False

    def get(self, tickets: Sequence[Ticket]) -> list[Any]:
        """Take them from what was fetched ahead, or is under way in the processes; else fetch them here."""
        return [self._get(ticket) for ticket in tickets]

    def _get(self, ticket: Ticket) -> Any:
        if self._loader is None:
            return self._direct.get([ticket])[0]
        sent = self._queue.sent
        if ticket not in self._held and not sent and not self._queue.dry:
            # Fills the processes' queues; what they still have under way is waited for and dropped.
            self._coming = iter(self._loader)
        while ticket not in self._held and (ticket in sent or self._before_change):
            self._take(ticket)
        if ticket not in self._held:
            return self._direct.get([ticket])[0]
        return _opened(self._held.pop(ticket))

    def _take(self, wanted: Ticket) -> None:
        """Wait for what the processes answer next, which makes them begin with another; hold what is of use."""
        assert self._coming is not None  # something is under way
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
    """A fetcher for the options of a DataLoader: with processes when ``num_workers`` asks for some."""
    if options.get("num_workers"):
        return WorkerFetcher(dataset, collate_fn, options)
    return DirectFetcher(dataset, collate_fn)


def _place(ticket: Ticket) -> tuple[int, int]:
    return ticket.epoch, ticket.step_in_epoch


def _up_to(last: tuple[int, int], tickets: Iterator[Ticket]) -> Iterator[Ticket]:
    """Take tickets, up to the first one that comes after a step."""
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
