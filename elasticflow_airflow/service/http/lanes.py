"""Thread limits for the routes, one per kind of route, so that cheap requests never wait for expensive ones.

A request waits without a thread while all threads of its lane are busy. When too many requests wait, or one has waited
too long, it is answered with 503 and ``Retry-After`` (RFC 9110, section 10.2.3), long before anything hangs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar, get_type_hints

from anyio import CapacityLimiter, move_on_after, to_thread
from fastapi import Response
from pydantic import TypeAdapter

from elasticflow_airflow.service.refusal import Refusal

P = ParamSpec("P")
T = TypeVar("T")

_RETRY_AFTER_S = 2.0
_UNLIMITED = CapacityLimiter(math.inf)
"""No limit in anyio, which owns the threads: each lane counts its own."""


class Lane:
    """A limit of ``threads`` threads for ``what``. Used in one event loop.

    At most ``most_waiting`` requests wait for a thread, each for at most ``patience_s`` seconds.
    """

    def __init__(self, what: str, threads: int, *, most_waiting: float = 500, patience_s: float = 10.0) -> None:
        self._what, self._most_waiting, self._patience_s = what, most_waiting, patience_s
        self._free = CapacityLimiter(threads)

    async def run(self, do: Callable[[], T]) -> T:
        """Run a function in one of the threads. Raises Refusal 503 when none becomes free in time."""
        if self._free.statistics().tasks_waiting >= self._most_waiting:
            raise self._busy()
        turn = object()
        with move_on_after(self._patience_s) as patience:
            await self._free.acquire_on_behalf_of(turn)
        if patience.cancelled_caught:
            raise self._busy()
        try:
            return await to_thread.run_sync(do, limiter=_UNLIMITED)
        finally:
            self._free.release_on_behalf_of(turn)

    def __call__(self, route: Callable[P, T]) -> Callable[P, Awaitable[Response]]:
        """Run a route in this lane, and encode its JSON there: encoding a long list would block the event loop."""
        given = get_type_hints(route, include_extras=True)["return"]
        kind = None if given is Response else TypeAdapter(given)

        def answer(*args: P.args, **kwargs: P.kwargs) -> Response:
            found = route(*args, **kwargs)
            if kind is None:
                assert isinstance(found, Response)
                return found
            return Response(kind.dump_json(found, by_alias=True), media_type="application/json")

        @functools.wraps(route)
        async def answered(*args: P.args, **kwargs: P.kwargs) -> Response:
            return await self.run(functools.partial(answer, *args, **kwargs))

        return answered

    def _busy(self) -> Refusal:
        return Refusal(
            503,
            "busy",
            f"the service is busy: too many wait for {self._what}",
            "ask again in a moment",
            retry_after_s=_RETRY_AFTER_S,
        )


class Lanes:
    """The lanes of a service. Each has few threads: their computing time is taken from the loop that decides."""

    def __init__(self) -> None:
        self.reading = Lane("what is stored", 3)
        self.changing = Lane("jobs to be taken or changed", 2)
        """One thread writes at a time; the other prepares its request meanwhile."""
        self.pages = Lane("pages", 2, most_waiting=100)
        """For the pages that people view, and for requests that read or write much at once."""
        self.planning = Lane("plans of what would be", 1, most_waiting=20, patience_s=20.0)
        self.what_if = Lane("answers to what-if", 1, most_waiting=5, patience_s=20.0)
        """Each answer takes seconds, so no other kind of request waits for it."""
        self.looking = Lane("looks at this machine", 2, most_waiting=20, patience_s=20.0)
        """For requests that wait for other processes."""
        self.unpacking = Lane("code to be unpacked", 2, most_waiting=200, patience_s=60.0)
        self.streams = Lane("events", 2, most_waiting=math.inf, patience_s=math.inf)
        """A stream of events has been answered already; a wait only delays its events."""
