"""Batches concurrent requests: those that arrive at the same time are answered with one query, in one thread.

A thousand deferred tasks make two hundred requests per second, and at midnight many ask for their jobs at once. With
one thread per request, they would take the interpreter from the loop that decides. Knows nothing of rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from elasticflow_airflow.service.notify import Notifier

Q = TypeVar("Q", bound=Hashable)
A = TypeVar("A")

_AT_ONCE = 100


class Batcher(Generic[Q, A]):
    """Collects the questions of the handlers of one event loop, and answers them in batches.

    ``answer_all`` gets a batch and returns, in the same order, an answer or an error to raise for each question. It
    runs in a thread of its own, one call at a time.
    """

    def __init__(self, name: str, answer_all: Callable[[Sequence[Q]], Sequence[A | Exception]]) -> None:
        self._answer_all = answer_all
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._answering: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, name)

    async def ask(self, question: Q) -> A:
        """Wait for the answer to a question. Raises the error returned for it, or what ``answer_all`` raises."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer())
        return await answer

    async def _answer(self) -> None:
        """Answer batches until no question waits; questions that arrive meanwhile are in the next batch."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            some, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
            found: Sequence[A | Exception]
            try:
                found = await loop.run_in_executor(self._thread, self._answer_all, [question for question, _ in some])
            except Exception as error:  # noqa: BLE001 - raised in every handler of the batch
                found = [error] * len(some)
            for (_, answer), what in zip(some, found, strict=True):
                if answer.done():
                    continue  # the handler has gone
                if isinstance(what, Exception):
                    answer.set_exception(what)
                else:
                    answer.set_result(what)


class Watch(Generic[Q, A]):
    """Lets handlers of one event loop wait for stored results; all are looked up together after each change.

    ``look_up`` returns those of the awaited results that exist by now. It runs in a thread of its own, one call at a
    time.
    """

    def __init__(self, name: str, notifier: Notifier, look_up: Callable[[Collection[Q]], Mapping[Q, A]]) -> None:
        self._notifier, self._look_up = notifier, look_up
        self._waiting: dict[Q, list[asyncio.Future[A]]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, name)

    async def wait(self, wanted: Q, timeout_s: float) -> A | None:
        """Wait for a result; returns None on timeout. Raises what ``look_up`` raises."""
        found: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(wanted, []).append(found)
        if self._looking is None or self._looking.done():
            self._changed = self._notifier.subscribe()
            self._looking = asyncio.create_task(self._look(self._changed))
        self._changed.set()  # the result may exist already
        try:
            async with asyncio.timeout(timeout_s):
                return await found
        except TimeoutError:
            return None
        finally:
            left = [one for one in self._waiting.get(wanted, ()) if one is not found]
            if left:
                self._waiting[wanted] = left
            else:
                self._waiting.pop(wanted, None)

    async def _look(self, changed: asyncio.Event) -> None:
        """Look up after each change, until no handler waits."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                changed.clear()
                try:
                    found = await loop.run_in_executor(self._thread, self._look_up, list(self._waiting))
                except Exception as error:  # noqa: BLE001 - raised in every waiting handler
                    for one in [one for waiting in self._waiting.values() for one in waiting if not one.done()]:
                        one.set_exception(error)
                    return
                for wanted, what in found.items():
                    for one in self._waiting.pop(wanted, ()):
                        if not one.done():
                            one.set_result(what)
                if not self._waiting:
                    return
                await changed.wait()
        finally:
            self._notifier.unsubscribe(changed)
