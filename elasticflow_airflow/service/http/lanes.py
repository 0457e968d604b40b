"""Threads for the routes, some for each kind of them, so that who asks for little never waits for who asks for much.

Whoever finds the threads of his lane busy waits, and holds none. When too many wait, or one has waited too long, he is
told to come again (503 with ``Retry-After``, RFC 9110, section 10.2.3), long before anything hangs.
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
"""A lane counts its threads itself: anyio keeps them."""


class Lane:
    """So many threads for ``what``. Used in one event loop.

    At most ``most_waiting`` wait for one of them, each for at most ``patience_s``.
    """

    def __init__(self, what: str, threads: int, *, most_waiting: float = 500, patience_s: float = 10.0) -> None:
        self._what, self._most_waiting, self._patience_s = what, most_waiting, patience_s
        self._free = CapacityLimiter(threads)

    async def run(self, do: Callable[[], T]) -> T:
        """Do something in one of the threads. Raises Refusal 503 when none becomes free in time."""
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
        """Have a route answered here, its answer's JSON included: a long list would keep the event loop as well."""
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
    """The lanes of a service. Few threads each: what they compute, they take from the loop that decides."""

    def __init__(self) -> None:
        self.reading = Lane("what is stored", 3)
        self.changing = Lane("jobs to be taken or changed", 2)
        """One writes at a time; the other gets ready meanwhile."""
        self.pages = Lane("pages", 2, most_waiting=100)
        """What people look at, and what reads or writes much at once."""
        self.planning = Lane("plans of what would be", 1, most_waiting=20, patience_s=20.0)
        self.what_if = Lane("answers to what-if", 1, most_waiting=5, patience_s=20.0)
        """Each takes seconds: nobody else waits for them."""
        self.looking = Lane("looks at this machine", 2, most_waiting=20, patience_s=20.0)
        """What waits for other processes."""
        self.unpacking = Lane("code to be unpacked", 2, most_waiting=200, patience_s=60.0)
        self.streams = Lane("events", 2, most_waiting=math.inf, patience_s=math.inf)
        """Whoever listens to the stream of events has been answered already, and is only later."""
