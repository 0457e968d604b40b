"""Questions that come at the same time are answered together: with one look into the store, in one thread.

A thousand deferred tasks ask two hundred times a second, and a crowd at midnight wants to know what became of its jobs:
each in a thread of its own, they would keep the interpreter from the loop that decides. Knows no rows.
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
    """Gathers the questions of the handlers of one event loop, and has them answered together.

    ``answer_all`` answers some, in order, each with an answer or with an error to raise; it is called in a thread of
    its own, once at a time.
    """

    def __init__(self, name: str, answer_all: Callable[[Sequence[Q]], Sequence[A | Exception]]) -> None:
        self._answer_all = answer_all
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._answering: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, name)

    async def ask(self, question: Q) -> A:
        """Wait for the answer to a question. Raises the error that is its answer, and what ``answer_all`` raises."""
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._answering is None or self._answering.done():
            self._answering = asyncio.create_task(self._answer())
        return await answer

    async def _answer(self) -> None:
        """Answer until nobody waits: those who came while others were answered are the next."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            some, self._waiting = self._waiting[:_AT_ONCE], self._waiting[_AT_ONCE:]
            found: Sequence[A | Exception]
            try:
                found = await loop.run_in_executor(self._thread, self._answer_all, [question for question, _ in some])
            except Exception as error:  # noqa: BLE001 - raised to each of those who asked
                found = [error] * len(some)
            for (_, answer), what in zip(some, found, strict=True):
                if answer.done():
                    continue  # who asked has left
                if isinstance(what, Exception):
                    answer.set_exception(what)
                else:
                    answer.set_result(what)


class Watch(Generic[Q, A]):
    """Handlers of one event loop that wait until something is stored; all are looked up together, after each change.

    ``look_up`` finds what is there by now of what is waited for; it is called in a thread of its own, once at a time.
    """

    def __init__(self, name: str, notifier: Notifier, look_up: Callable[[Collection[Q]], Mapping[Q, A]]) -> None:
        self._notifier, self._look_up = notifier, look_up
        self._waiting: dict[Q, list[asyncio.Future[A]]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, name)

    async def wait(self, wanted: Q, timeout_s: float) -> A | None:
        """Wait until it is there; None when it is not in time. Raises what ``look_up`` raises."""
        found: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(wanted, []).append(found)
        if self._looking is None or self._looking.done():
            self._changed = self._notifier.subscribe()
            self._looking = asyncio.create_task(self._look(self._changed))
        self._changed.set()  # what is wanted now may be there already
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
        """Look after each change, until nobody waits."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                changed.clear()
                try:
                    found = await loop.run_in_executor(self._thread, self._look_up, list(self._waiting))
                except Exception as error:  # noqa: BLE001 - raised to each of those who wait
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
