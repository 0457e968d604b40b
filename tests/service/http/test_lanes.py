"""Threads for the routes: who finds them busy waits without one, and is sent away before anything hangs."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from elasticflow_airflow.service.http.lanes import Lane
from elasticflow_airflow.service.refusal import Refusal


class Work:
    """Takes as long as a test wants."""

    def __init__(self) -> None:
        self.go, self.at_once, self.most = threading.Event(), 0, 0
        self._lock = threading.Lock()

    def __call__(self, number: int) -> int:
        with self._lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        assert self.go.wait(10)
        with self._lock:
            self.at_once -= 1
        return number


async def started(work: Work, count: int) -> None:
    async with asyncio.timeout(10):
        while work.at_once < count:
            await asyncio.sleep(0.001)


async def test_only_so_many_work_at_once_and_all_are_answered():
    lane, work = Lane("answers", 2, most_waiting=50, patience_s=10.0), Work()
    waiting = [asyncio.create_task(lane.run(partial(work, n))) for n in range(40)]
    await started(work, 2)
    work.go.set()
    assert await asyncio.gather(*waiting) == list(range(40))
    assert work.most == 2


@pytest.mark.parametrize(("given", "sent_away"), [({"most_waiting": 3}, 4), ({"patience_s": 0.01}, 7)])
async def test_who_would_wait_too_long_is_told_to_come_again(given, sent_away):
    lane, work = Lane("answers", 1, **{"most_waiting": 50, "patience_s": 10.0, **given}), Work()
    first = asyncio.create_task(lane.run(partial(work, 0)))
    await started(work, 1)
    others = [asyncio.create_task(lane.run(partial(work, n))) for n in range(1, 8)]
    async with asyncio.timeout(10):
        while sum(one.done() for one in others) < sent_away:
            await asyncio.sleep(0.001)
    work.go.set()
    assert await first == 0
    found = await asyncio.gather(*others, return_exceptions=True)
    refused = [one for one in found if isinstance(one, Refusal)]
    assert len(refused) == sent_away
    assert {(one.status, one.error, one.retry_after_s) for one in refused} == {(503, "busy", 2.0)}
    assert await lane.run(partial(work, 9)) == 9


async def test_what_goes_wrong_gives_the_thread_back():
    lane = Lane("answers", 1)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            await lane.run(lambda: 1 // 0)
    assert await lane.run(lambda: 1) == 1
