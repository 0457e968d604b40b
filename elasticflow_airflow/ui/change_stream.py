"""Tells open pages that something has happened (server-sent events), so that they need not ask every few seconds.

One connection to the service serves all pages of this process, as long as one is open. A message says nothing but that
there is something new: what a user may see of it is decided where the page asks.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Hashable

from airflow.sdk.exceptions import AirflowException

from elasticflow_airflow.client.errors import ElasticFlowError
from elasticflow_airflow.ui.source import Source

log = logging.getLogger(__name__)

STREAM_S = 20.0
"""A page's stream ends after this time, in seconds, and the browser opens the next one: so who was signed out sees no
more, and a stopping api-server waits no longer."""
MOST_STREAMS, MOST_STREAMS_OF_A_USER = 200, 10
_TOGETHER_S = 2.0
"""What happens within this time, in seconds, is one message."""
_AGAIN_S = 5.0
"""After so many seconds a service that has not answered is asked again."""
_LOOK_UP_S = 300.0
"""How long a connection is used, in seconds, before it is looked up again."""


class TooManyStreamsError(Exception):
    """There are as many streams as one user, or this process, may have: the page asks every few seconds instead."""


class ChangeStream:
    """The streams of the pages that this process serves. Used from one event loop."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pages: set[asyncio.Event] = set()
        self._of_user: Counter[Hashable] = Counter()
        self._following: asyncio.Task[None] | None = None
        self._said = ""

    def open(self, user_id: Hashable) -> AsyncIterator[str]:
        """Return the messages of one page's stream, which ends after ``STREAM_S``. Raises TooManyStreamsError."""
        if len(self._pages) >= MOST_STREAMS or self._of_user[user_id] >= MOST_STREAMS_OF_A_USER:
            raise TooManyStreamsError
        return self._messages(user_id)

    async def _messages(self, user_id: Hashable) -> AsyncIterator[str]:
        page = asyncio.Event()
        self._pages.add(page)
        self._of_user[user_id] += 1
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())
        end_s = asyncio.get_running_loop().time() + STREAM_S
        try:
            yield "retry: 500\n\n"
            while (left_s := end_s - asyncio.get_running_loop().time()) > 0.0:
                try:
                    await asyncio.wait_for(page.wait(), left_s)
                except TimeoutError:
                    return
                page.clear()
                yield "event: changed\ndata:\n\n"
                await asyncio.sleep(min(_TOGETHER_S, left_s))
        finally:
            self._pages.discard(page)
            self._of_user[user_id] -= 1
            if not self._of_user[user_id]:
                del self._of_user[user_id]

    async def _follow(self) -> None:
        """Follow the service's events for as long as a page is open, and a little longer: its next stream follows."""
        while self._pages:
            try:
                client = await asyncio.to_thread(self._source.follower)
                async with client, asyncio.timeout(_LOOK_UP_S):
                    async for _ in client.stream_events(after=None):
                        self._announce()
                        if not self._pages:
                            return
            except TimeoutError:
                continue
            except (ElasticFlowError, AirflowException) as error:
                if str(error) != self._said:
                    log.info("pages ask every few seconds, as there are no events to follow: %s", error)
                self._said = str(error)
                await asyncio.sleep(_AGAIN_S)
            except Exception:
                log.exception("the service's events could not be followed; it is tried again")
                await asyncio.sleep(_AGAIN_S)

    def _announce(self) -> None:
        self._said = ""
        self._source.forget()
        for page in self._pages:
            page.set()
