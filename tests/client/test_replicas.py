"""Several replicas behind one endpoint, as real servers: who is asked, who is asked next, and what is said if none can.

The servers are started and killed by the tests; each replica answers from one shared list, as replicas do from one
database.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from support.replicas import NO_LEADER, Database, Replica, dead
from typer.testing import CliRunner

from elasticflow_airflow.api import Event, Problem
from elasticflow_airflow.cli.main import app
from elasticflow_airflow.client import (
    AsyncElasticFlowClient,
    ElasticFlowClient,
    ElasticFlowError,
    Endpoint,
    JobNotFound,
    ServiceFault,
    ServiceUnavailable,
)
from elasticflow_airflow.client.pool import shared_transport


@pytest.fixture
def make(make_status):
    """Start replicas, by default on one database; all are ended at the end."""
    started: list[Replica] = []
    shared = Database()

    def start(**given: Any) -> Replica:
        started.append(Replica(**{"database": shared, **given}))
        started[-1].database.new_job = make_status().model_dump(mode="json")
        return started[-1]

    yield start
    for one in started:
        one.kill()


def endpoint(*urls: str, **given: Any) -> Endpoint:
    return Endpoint.from_url(",".join(urls), **given)


@pytest.fixture
def nobody() -> Iterator[str]:
    with dead() as url:
        yield url


def refuse(status: int, problem: Problem = NO_LEADER) -> Callable[[Any], tuple[int, Any]]:
    return lambda _: (status, problem.model_dump())


async def ask(where: Endpoint, *, is_async: bool, calls: int = 1, timeout_s: float = 10.0) -> dict[str, str]:
    """Ask for the version as often as said, by one client without retries."""
    if is_async:
        transport = shared_transport(where)
        async with AsyncElasticFlowClient(where, retry_for_s=0, timeout_s=timeout_s, transport=transport) as client:
            return [await client.version() for _ in range(calls)][-1]

    def blocking() -> dict[str, str]:
        with ElasticFlowClient(where, retry_for_s=0, timeout_s=timeout_s) as client:
            return [client.version() for _ in range(calls)][-1]

    return await asyncio.to_thread(blocking)


both = pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])


@both
async def test_the_next_is_asked_if_the_first_is_dead(make, nobody, is_async):
    second = make(version="2.0")
    assert (await ask(endpoint(nobody, second.url), is_async=is_async))["version"] == "2.0"


@both
async def test_the_next_is_asked_if_the_first_hangs(make, is_async):
    end = threading.Event()

    def hang(_request: Any) -> None:
        end.wait(30)

    first, second = make(behave=hang), make(version="2.0")
    try:
        found = await ask(endpoint(first.url, second.url), is_async=is_async, calls=3, timeout_s=2.0)
    finally:
        end.set()
    assert found["version"] == "2.0"
    assert (len(first.asked), len(second.asked)) == (1, 3)  # it is not waited for again


async def test_a_triggerer_does_not_wait_for_a_replica_that_hangs_with_each_of_its_tasks(make):
    """Only so many requests are under way at once: the others wait, and need not wait for that replica any more."""
    end = threading.Event()

    def hang(_request: Any) -> None:
        end.wait(30)

    first, second = make(behave=hang), make()
    where = endpoint(first.url, second.url)
    clients = [
        AsyncElasticFlowClient(where, retry_for_s=0, timeout_s=2.0, transport=shared_transport(where))
        for _ in range(200)
    ]
    try:
        await asyncio.gather(*(client.version() for client in clients))
    finally:
        end.set()
        for client in clients:
            await client.aclose()
    assert len(first.asked) <= 16
    assert len(second.asked) == 200


@both
async def test_the_next_is_asked_if_a_machine_does_not_even_refuse(make, is_async):
    """A machine without power: a full queue of connections, which never are accepted, looks the same."""
    second = make(version="2.0")
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        there = full.getsockname()
        waiting = [socket.socket() for _ in range(3)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(there)
        began_s = time.monotonic()
        found = await ask(endpoint(f"http://127.0.0.1:{there[1]}", second.url), is_async=is_async, timeout_s=60.0)
        took_s = time.monotonic() - began_s
        for one in waiting:
            one.close()
    assert found["version"] == "2.0"
    assert took_s < 30.0  # connecting has a limit of its own


@both
@pytest.mark.parametrize("status", [502, 503, 504])
async def test_the_next_is_asked_if_the_first_cannot_help_now(make, is_async, status):
    first, second = make(behave=refuse(status)), make(version="2.0")
    assert (await ask(endpoint(first.url, second.url), is_async=is_async))["version"] == "2.0"
    assert len(first.asked) == 1


@both
@pytest.mark.parametrize("status", [400, 401, 403, 404, 409, 413, 422, 500])
async def test_any_other_answer_is_one(make, is_async, status):
    first, second = make(behave=refuse(status, Problem(error="refused", message="no"))), make()
    with pytest.raises(ElasticFlowError) as caught:
        await ask(endpoint(first.url, second.url), is_async=is_async)
    assert not isinstance(caught.value, ServiceUnavailable)
    assert isinstance(caught.value, ServiceFault) == (status == 500)
    assert (len(first.asked), second.asked) == (1, [])


@both
async def test_who_answered_stays_the_first_to_be_asked(make, is_async):
    """By all clients of the process, also after the first one of the list is back: none goes back and forth."""
    is_back = threading.Event()
    first = make(behave=lambda request: None if is_back.is_set() else refuse(503)(request))
    second = make()
    where = endpoint(first.url, second.url)
    await ask(where, is_async=is_async, calls=3)
    is_back.set()
    await ask(where, is_async=not is_async, calls=3)
    assert (len(first.asked), len(second.asked)) == (1, 6)
    second.kill()
    await ask(where, is_async=is_async, calls=2)
    assert (len(first.asked), len(second.asked)) == (3, 6)


async def test_an_answer_that_nothing_is_there_counts_as_one(make, nobody):
    second = make()
    where = endpoint(nobody, second.url)
    with ElasticFlowClient(where, retry_for_s=0) as client:
        for _ in range(2):
            with pytest.raises(JobNotFound):
                client.status("wrong")
        assert client.has_snapshot("0" * 64) is False
    assert len(second.asked) == 3


@both
async def test_each_is_asked_once_a_try_and_each_reason_is_named(make, nobody, is_async):
    busy, page = make(behave=refuse(503)), make(behave=lambda _: (502, "<title>Bad Gateway</title>"))
    page.headers["Content-Type"] = "text/html"
    where = endpoint(nobody, busy.url, page.url)
    with pytest.raises(ServiceUnavailable) as caught:
        await ask(where, is_async=is_async)
    assert caught.value.message.startswith("none of the 3 addresses of the elasticflow service answers as it should: ")
    assert f"{nobody} (does not answer: " in caught.value.message
    assert f"{busy.url} (another replica takes over)" in caught.value.message
    assert f"{page.url} (answered GET /v1/version with a web page (status 502)" in caught.value.message
    assert caught.value.hint.startswith(
        "is `elasticflow serve` running there, and can this machine reach it?; ask again"
    )
    assert (len(busy.asked), len(page.asked)) == (1, 1)


def test_a_single_address_fails_as_ever(nobody):
    with ElasticFlowClient(endpoint(nobody), retry_for_s=0) as client, pytest.raises(ServiceUnavailable) as caught:
        client.version()
    assert caught.value.message.startswith(f"the elasticflow service at {nobody} does not answer: ")
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


@both
async def test_a_fail_over_is_waited_for_as_long_as_it_says(make, nobody, is_async):
    until = time.monotonic() + 1.2
    waiting = make(behave=lambda request: refuse(503)(request) if time.monotonic() < until else None)
    waiting.headers["Retry-After"] = "1"
    where = endpoint(nobody, waiting.url)
    with pytest.raises(ServiceUnavailable) as caught:
        await ask(where, is_async=is_async)
    assert caught.value.retry_after_s == 1.0  # whatever the dead one does not say
    told: list[str] = []
    if is_async:
        async with AsyncElasticFlowClient(where, retry_for_s=30, on_away=told.append) as client:
            await client.version()
    else:
        with ElasticFlowClient(where, retry_for_s=30, on_away=told.append) as blocking:
            blocking.version()
    assert len(told) == 1
    assert "another replica takes over" in told[0]
    assert len(waiting.asked) <= 4  # not every tenth of a second


@both
async def test_a_submit_whose_answer_was_lost_is_repeated_at_another(make, submission, is_async):
    """The first replica executes it and dies: the other one attaches to its job, and hands out the valid claim."""
    database = Database()

    def execute_and_die(request: Any) -> None:
        first.answer(request)
        raise ConnectionResetError

    first = make(database=database)
    first.behave = execute_and_die
    second = make(database=database)
    where = endpoint(first.url, second.url)
    if is_async:
        async with AsyncElasticFlowClient(where, retry_for_s=0) as client:
            found = await client.submit(submission)
    else:
        with ElasticFlowClient(where, retry_for_s=0) as blocking:
            found = blocking.submit(submission)
    assert (found.claim, found.created) == (2, False)
    assert database.claims == 2
    assert list(database.jobs) == [submission.identity.job_id]


def event(number: int) -> Event:
    return Event(event_id=number, job_id="j", at=1.0, kind="admitted", reason="fits")


def test_threads_that_poll_lose_nothing_when_replicas_die(make):
    """Eight threads follow the events with one client; two of three replicas die meanwhile, at any moment."""
    database = Database()
    replicas = [make(database=database) for _ in range(3)]
    ended = threading.Event()

    with ElasticFlowClient(endpoint(*(one.url for one in replicas)), retry_for_s=0) as client:

        def follow() -> list[int]:
            seen: list[int] = []
            while not ended.is_set() or seen[-1:] != [database.events[-1].event_id]:
                seen += [one.event_id for one in client.events("j", after=seen[-1] if seen else 0)]
            return seen

        with ThreadPoolExecutor(8) as pool:
            following = [pool.submit(follow) for _ in range(8)]
            for number in range(1, 301):
                database.events.append(event(number))
                if number in (100, 200):
                    replicas[number // 100 - 1].kill()
                time.sleep(0.002)
            ended.set()
            assert [one.result(60) for one in following] == [list(range(1, 301))] * 8
    assert all(one.asked for one in replicas)


async def test_a_stream_goes_on_at_another_replica(make):
    def write(*numbers: int) -> Callable[[Any], tuple[int, Any]]:
        text = "".join(f"id: {number}\ndata: {event(number).model_dump_json()}\n\n" for number in numbers)
        return lambda _: (200, text)

    first, second = make(behave=write(1, 2)), make(behave=write(3))
    first.headers["Content-Type"] = second.headers["Content-Type"] = "text/event-stream"
    seen = []
    async with AsyncElasticFlowClient(endpoint(first.url, second.url), retry_for_s=10) as client:
        async for one in client.stream_events("j"):
            seen.append(one.event_id)
            if one.event_id == 2:
                await asyncio.to_thread(first.kill)
            if one.event_id == 3:
                break
    assert seen == [1, 2, 3]
    assert second.asked == ["GET /v1/events?after=2&job_id=j"]


# -- addresses ---------------------------------------------------------------------------------------------------------


def test_several_addresses_of_one_service():
    found = endpoint("http://ef-0:8080/", " https://ef-1", "http://[::1]:8321", token="t", verify=False)
    assert (found.base_url, found.other_urls) == ("http://ef-0:8080", ("https://ef-1", "http://[::1]:8321"))
    assert [one.base_url for one in found.replicas] == ["http://ef-0:8080", "https://ef-1", "http://[::1]:8321"]
    assert all((one.token, one.verify, one.other_urls) == ("t", False, ()) for one in found.replicas)
    assert str(found) == "the elasticflow service at http://ef-0:8080, https://ef-1, http://[::1]:8321"
    alone = endpoint("unix:///run/a,b.sock")
    assert str(alone.socket_path) == "/run/a,b.sock"
    assert alone.replicas == (alone,)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://a:1,http://b:1,http://A:1", "the address http://A:1 is given twice"),
        ("http://a,http://a:80", "given twice"),
        ("http://a:1,,http://b:1", "address 2 of 3 is empty"),
        ("http://a:1,", "address 2 of 2 is empty"),
        ("http://a:1,unix:///run/s", "'unix:///run/s' is a socket of this machine, and stands among several"),
        ("unix:///run/s,http://a:1", "'unix:///run/s' is a socket of this machine, and stands among several"),
        ("http://a:1,http://b:1/prefix", r"more than a host and a port.*write http://b:1, or"),
        ("http://a:1,http://b:1?x=1", "more than a host and a port"),
        ("http://a:1,http://me:hunter2@b:1", "http://b:1 has a user or a password in it"),
        ("http://a:1,http://me:hunter2@b:x", r"'http://me:\*\*\*@b:x' is no address"),
        ("http://a:1,b:1", r"'b:1' is no address of a service \(write http://host:port"),
        ("http://a:1,ftp://b", "'ftp://b' is no address"),
        ("http://a:1,http://b:99999", "'http://b:99999' is no address"),
        ("http://a:99999", "'http://a:99999' is no address"),
        (",".join(f"http://ef-{i}:1" for i in range(17)), "17 addresses are given, and a client takes at most 16"),
    ],
)
def test_addresses_that_cannot_be(url, words):
    with pytest.raises(ElasticFlowError, match=words) as caught:
        endpoint(url)
    assert "hunter2" not in str(caught.value)


def test_own_addresses_among_others_go_through_no_proxy(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    where = endpoint("http://127.0.0.1:1", "http://[::1]:1", "http://ef-1:1")
    with where.open_client(1.0) as http:
        own, six, other = (http._transport_for_url(httpx.URL(one.base_url)) for one in where.replicas)
        assert own is six is http._transport
        assert other is not http._transport


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch):
    """Run a command with these addresses; returns its status and output."""
    monkeypatch.setenv("COLUMNS", "300")

    def run(command: str, *urls: str) -> tuple[int, str]:
        monkeypatch.setenv("ELASTICFLOW_URL", ",".join(urls))
        done = CliRunner().invoke(app, command.split())
        return done.exit_code, done.output

    return run


def test_a_command_asks_the_next_replica(make, nobody, run):
    second = make()
    status, _ = run("jobs", nobody, second.url)
    assert (status, second.asked) == (0, ["GET /v1/jobs?limit=50"])
    status, said = run("jobs", "http://a:1", "http://a:1")
    assert status == 1
    assert "given twice" in said


def examined(run: Any, *urls: str) -> tuple[int, list[dict[str, str]]]:
    status, said = run("doctor --json", *urls)
    return status, json.loads(said)


def test_the_doctor_looks_at_each_address(make, nobody, run, submission):
    first, second = make(), make(version="0.0.1", started_at=1.0)
    status, found = examined(run, first.url, second.url)
    assert status == 0
    assert [one["message"].split()[4] for one in found if one["name"] == "connection"] == [first.url, second.url]
    versions = {one["message"].split(": ")[0]: one["level"] for one in found if one["name"] == "versions"}
    assert versions == {first.url: "ok", second.url: "warning"}
    assert {"replicas", "slots"} <= {one["name"] for one in found}
    assert "the first job will show" in next(one["message"] for one in found if one["name"] == "replicas")
    with ElasticFlowClient(endpoint(second.url), retry_for_s=0) as client:
        client.submit(submission)
    status, found = examined(run, first.url, second.url)
    assert (status, found[-2]["message"]) == (0, "2 addresses answer, and know the same jobs")

    status, found = examined(run, nobody, first.url)
    assert status == 0
    assert {(one["name"], one["level"]) for one in found if one["level"] != "ok"} == {
        ("connection", "warning"),
        ("replicas", "warning"),
    }


def test_the_doctor_tells_one_service_from_two(make, run, submission):
    first, second = make(database=Database()), make(database=Database(), started_at=1.0)
    with ElasticFlowClient(endpoint(second.url), retry_for_s=0) as client:
        client.submit(submission)
    status, found = examined(run, first.url, second.url)
    assert status == 1
    (problem,) = [one for one in found if one["level"] == "problem"]
    job_id = submission.identity.job_id
    assert problem["message"] == (
        f"these are no replicas of one service: job {job_id} of {second.url} is unknown to {first.url}"
    )


def test_the_doctor_sees_two_addresses_of_one_process(make, run):
    first, second = make(started_at=1.0), make(started_at=1.0)
    status, found = examined(run, first.url, second.url)
    assert status == 0
    (warned,) = [one for one in found if one["level"] == "warning"]
    assert warned["message"].startswith(f"{first.url} and {second.url} lead to the same process")


def test_the_doctor_names_all_when_none_answers(nobody, run):
    with dead() as other:
        status, found = examined(run, nobody, other)
    assert status == 1
    (problem,) = [one for one in found if one["level"] == "problem"]
    assert all(f"{url} (does not answer: " in problem["message"] for url in (nobody, other))
    assert "were not looked at: clock, slots" in found[-1]["message"]


def test_the_doctor_refuses_a_replica_of_another_api(make, run):
    first, second = make(), make(api="v9", started_at=1.0)
    status, found = examined(run, first.url, second.url)
    assert status == 1
    (problem,) = [one for one in found if one["level"] == "problem"]
    assert (problem["name"], f"{second.url} is elasticflow" in problem["message"]) == ("versions", True)
