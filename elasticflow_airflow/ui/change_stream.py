"""Tells open pages that something has happened (server-sent events), so that they need not ask every few seconds.

One connection to the service serves all pages of this process, as long as one is open. A message says nothing but that
there is something new: what a user may see of it is decided where the page asks.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from dataclasses import dataclass, field

from airflow.sdk.exceptions import AirflowException

from elasticflow_airflow.client import ElasticFlowError
from elasticflow_airflow.ui.source import Source

log = logging.getLogger(__name__)

STREAM_S = 8.0
"""A page's stream ends after this time, in seconds, and the browser opens the next one: so who was signed out sees no
more, and a stopping api-server does not wait for long."""
MOST_STREAMS, MOST_STREAMS_OF_A_USER = 200, 10
_TOGETHER_S = 2.0
"""What happens within this time, in seconds, is one message."""
_SPREAD_S = 1.0
"""Pages are told within so many seconds, so that they do not all ask at the same moment."""
_OVERLAP_S = 2.0
"""A stream that begins within so many seconds after a change tells of it: the page's last one may have ended before."""
_AGAIN_S = 5.0
"""After so many seconds a service that has not answered is asked again."""
_LOOK_UP_S = 300.0
"""How long a connection is used, in seconds, before it is looked up again."""


class TooManyStreamsError(Exception):
    """There are as many streams as one user, or this process, may have: the page asks every few seconds instead."""


@dataclass(eq=False, slots=True)
class _Page:
    """One open stream."""

    woken: asyncio.Event = field(default_factory=asyncio.Event)
    outdated: bool = False


class ChangeStream:
    """The streams of the pages that this process serves. Used from one event loop."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._pages: set[_Page] = set()
        self._of_user: Counter[Hashable] = Counter()
        self._following: asyncio.Task[None] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self._follows = False
        """Whether the service's events arrive."""
        self._announced_s = float("-inf")
        self._said = ""

    def open(self, user_id: Hashable) -> AsyncIterator[str]:
        """Return the messages of one page's stream, which ends after ``STREAM_S``. Raises TooManyStreamsError.

        ``following`` and ``away`` say whether the service's events arrive, ``changed`` that there was one.
        """
        if len(self._pages) >= MOST_STREAMS or self._of_user[user_id] >= MOST_STREAMS_OF_A_USER:
            raise TooManyStreamsError
        return self._messages(user_id)

    async def _messages(self, user_id: Hashable) -> AsyncIterator[str]:
        clock = asyncio.get_running_loop().time
        end_s, page, told = clock() + STREAM_S, _Page(), False
        page.outdated = clock() - self._announced_s < _OVERLAP_S
        page.woken.set()
        self._pages.add(page)
        self._of_user[user_id] += 1
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow())
        try:
            yield "retry: 500\n\n"
            while (left_s := end_s - clock()) > 0.0:
                try:
                    await asyncio.wait_for(page.woken.wait(), left_s)
                except TimeoutError:
                    return
                page.woken.clear()
                if told != self._follows:
                    told = self._follows
                    yield _message("following" if told else "away")
                if page.outdated:
                    await asyncio.sleep(random.uniform(0.0, min(_SPREAD_S, left_s)))
                    page.outdated = False
                    yield _message("changed")
        finally:
            self._pages.discard(page)
            self._of_user[user_id] -= 1
            if not self._of_user[user_id]:
                del self._of_user[user_id]

    async def _follow(self) -> None:
        """Follow the service's events for as long as a page is open, and a little longer: its next stream follows."""
        try:
            while self._pages:
                try:
                    await self._follow_once()
                    continue
                except (ElasticFlowError, AirflowException, TimeoutError) as error:
                    if str(error) != self._said:
                        log.info("pages ask every few seconds, as there are no events to follow: %s", error)
                    self._said = str(error)
                except Exception:
                    log.exception("the service's events could not be followed; it is tried again")
                self._set_following(False)
                await asyncio.sleep(_AGAIN_S)
        finally:
            self._set_following(False)

    async def _follow_once(self) -> None:
        """Follow until the last page has gone, the connection is to be looked up again, or the service does not answer.

        Whatever goes wrong, pages ask by themselves. Raises what looking up and asking raise.
        """
        client = await asyncio.to_thread(self._source.follower)
        try:
            async with client, asyncio.timeout(_LOOK_UP_S) as limit:
                async for _ in client.stream_events(after=None, on_open=self._opened):
                    self._announce()
                    if not self._pages:
                        break
        except TimeoutError:
            if not limit.expired():
                raise

    def _opened(self) -> None:
        """Announce what may have happened before the stream was open."""
        self._said = ""
        self._set_following(True)
        self._announce()

    def _set_following(self, follows: bool) -> None:
        self._follows = follows
        for page in self._pages:
            page.woken.set()

    def _announce(self) -> None:
        if self._announcing is None or self._announcing.done():
            self._announcing = asyncio.create_task(self._tell_pages())

    async def _tell_pages(self) -> None:
        """Tell all pages, at most every ``_TOGETHER_S``."""
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(max(0.0, self._announced_s + _TOGETHER_S - clock()))
        await asyncio.to_thread(self._source.outdate)
        self._announced_s = clock()
        for page in self._pages:
            page.outdated = True
            page.woken.set()


def _message(kind: str) -> str:
    return f"event: {kind}\ndata:\n\n"
