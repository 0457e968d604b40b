"""Those who ask, or wait, at the same time: one look into the store, each with an answer of its own."""

from __future__ import annotations

import asyncio
import threading

import pytest

from elasticflow_airflow.service.http.batching import Batcher, Watch
from elasticflow_airflow.service.notify import Notifier
from elasticflow_airflow.service.refusal import Refusal, no_such_job


class Counter:
    """Answers when it is let go, and remembers what it was asked at once."""

    def __init__(self) -> None:
        self.asked: list[list[tuple[str, int]]] = []
        self.go = threading.Event()

    def __call__(self, asked):
        self.asked.append(list(asked))
        if len(self.asked) == 1:
            assert self.go.wait(10)
        if any(job_id == "broken" for job_id, _ in asked):
            raise OSError("the database is away")
        return [no_such_job(job_id) if claim == 0 else job_id.encode() for job_id, claim in asked]


async def test_who_comes_while_others_are_answered_is_answered_together():
    counter = Counter()
    questions = Batcher("test", counter)
    first = asyncio.create_task(questions.ask(("first", 1)))
    async with asyncio.timeout(10):
        while not counter.asked:
            await asyncio.sleep(0)
        others = [asyncio.create_task(questions.ask((f"job{n}", n))) for n in range(130)]
        gone = others.pop(50)
        await asyncio.sleep(0)
        gone.cancel()
        counter.go.set()
        assert await first == b"first"
        answers = await asyncio.gather(*others, return_exceptions=True)
    assert [len(some) for some in counter.asked] == [1, 100, 30]
    assert isinstance(answers[0], Refusal)
    assert answers[1:50] == [f"job{n}".encode() for n in range(1, 50)]
    assert answers[50] == b"job51"


async def test_what_goes_wrong_is_told_to_all_of_them_and_to_nobody_after():
    counter = Counter()
    counter.go.set()
    questions = Batcher("test", counter)
    found = await asyncio.gather(questions.ask(("broken", 1)), questions.ask(("other", 1)), return_exceptions=True)
    assert any(isinstance(one, OSError) for one in found)
    assert await questions.ask(("other", 1)) == b"other"


class Stored:
    """What is stored, and how often it was looked at."""

    def __init__(self) -> None:
        self.there: dict[str, int] = {}
        self.looks: list[set[str]] = []
        self.error: Exception | None = None

    def __call__(self, wanted):
        self.looks.append(set(wanted))
        if self.error is not None:
            raise self.error
        return {key: self.there[key] for key in wanted if key in self.there}


async def test_all_who_wait_are_looked_up_together_after_each_change():
    stored, notifier = Stored(), Notifier()
    watch = Watch("test", notifier, stored)
    waiting = [asyncio.create_task(watch.wait(f"job{n}", 10.0)) for n in range(300)]
    async with asyncio.timeout(10):
        while not stored.looks or len(stored.looks[-1]) < 300:
            await asyncio.sleep(0.001)
        stored.there = {f"job{n}": n for n in range(100)}
        await asyncio.to_thread(notifier.changed)
        assert await asyncio.gather(*waiting[:100]) == list(range(100))
        assert not any(one.done() for one in waiting[100:])
        stored.there = {f"job{n}": n for n in range(300)}
        await asyncio.to_thread(notifier.changed)
        assert await asyncio.gather(*waiting[100:]) == list(range(100, 300))
    assert len(stored.looks) <= 6


async def test_what_is_there_already_needs_no_change():
    stored = Stored()
    watch = Watch("test", Notifier(), stored)
    other = asyncio.create_task(watch.wait("never", 10.0))
    while not stored.looks:
        await asyncio.sleep(0.001)
    stored.there["job"] = 1
    assert await watch.wait("job", 10.0) == 1
    assert await watch.wait("job", 10.0) == 1
    other.cancel()


async def test_who_has_waited_long_enough_leaves_and_others_wait_on():
    stored, notifier = Stored(), Notifier()
    watch = Watch("test", notifier, stored)
    longer = asyncio.create_task(watch.wait("job", 10.0))
    assert await watch.wait("job", 0.01) is None
    assert await watch.wait("other", 0.01) is None
    stored.there["job"] = 7
    notifier.changed()
    assert await longer == 7
    assert await watch.wait("job", 10.0) == 7


async def test_a_look_that_fails_is_told_to_all_who_wait_and_to_nobody_after():
    stored = Stored()
    stored.error = OSError("the database is away")
    watch = Watch("test", Notifier(), stored)
    found = await asyncio.gather(watch.wait("a", 10.0), watch.wait("b", 10.0), return_exceptions=True)
    assert [str(one) for one in found] == ["the database is away"] * 2
    stored.error, stored.there = None, {"a": 1}
    assert await watch.wait("a", 10.0) == 1


@pytest.mark.parametrize("seed", range(5))
async def test_nobody_waits_for_ever_however_changes_come(seed):
    import random

    chance, stored, notifier = random.Random(seed), Stored(), Notifier()
    watch = Watch("test", notifier, stored)
    waiting = []
    for n in range(200):
        if chance.random() < 0.5:
            waiting.append((n, asyncio.create_task(watch.wait(f"job{n}", 30.0))))
        stored.there[f"job{n - chance.randrange(5)}"] = 1
        if chance.random() < 0.3:
            await asyncio.sleep(chance.choice([0, 0, 0.001]))
        notifier.changed()
    stored.there = {f"job{n}": n for n in range(200)}
    await asyncio.to_thread(notifier.changed)
    async with asyncio.timeout(10):
        assert await asyncio.gather(*(one for _, one in waiting)) is not None
