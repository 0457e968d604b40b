"""The HTTP API as callers see it: who is let in, what errors say, uploads, streams, logs."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import tarfile
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
import sqlalchemy as sa
from support.replicas import Replica
from support.service_parts import insight_of, parts_of

from elasticflow_airflow.api import Attachment, Command, Event, Health, JobIdentity, JobSubmission, Length, Problem
from elasticflow_airflow.api.insight import ClusterHistory, ClusterNow, JobStory, StackDump, WhatIf
from elasticflow_airflow.client import ElasticFlowClient, Endpoint, StaleClaim, Unauthorized, snapshot_folder
from elasticflow_airflow.client.calls.service_calls import calls
from elasticflow_airflow.service.http.app import build_app
from elasticflow_airflow.service.http.parts import InsightServices
from elasticflow_airflow.service.requests.capacity_service import CapacityService
from elasticflow_airflow.service.requests.forecasting import ForecastService
from elasticflow_airflow.service.requests.timetable_intake import CalendarService
from elasticflow_airflow.service.requests.whatif import WhatIfService

TOKEN = "a-long-random-token"
SECRET = "hunter2-of-the-hub"
CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


def app_of(world, token=None):
    forecasts = ForecastService(
        world.store, world.settings, world.reconciler.copy_scheduler, lambda: "", clock=world.clock
    )
    parts = parts_of(
        world,
        forecasts=forecasts,
        capacity=CapacityService(forecasts),
        insight=InsightServices(
            insight_of(world),
            WhatIfService(forecasts),
            CalendarService(world.store, world.settings, world.reconciler.hear_of_runs, clock=world.clock),
        ),
    )
    return build_app(parts, token)


def open_app(app):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://service")


@pytest.fixture
async def http(world) -> AsyncIterator[httpx.AsyncClient]:
    """The routes over a service in this process."""
    async with open_app(app_of(world)) as client:
        yield client


def every_route(app) -> list[tuple[str, str]]:
    """Method and path of each route, with made-up parameters."""
    values = {"sha256": "0" * 64, "job_id": "some-job", "log_name": "g000001-r000", "node_id": "node0"}
    found = []
    for route in app.routes:
        path = route.path.format(**values)
        found += [(method, path) for method in sorted(route.methods)]
    return found


# -- who is let in -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}])
async def test_without_the_token_every_route_says_401(world, headers):
    app = app_of(world, TOKEN)
    routes = every_route(app)
    assert len(routes) >= 17
    async with open_app(app) as http:
        for method, path in routes:
            answer = await http.request(method, path, headers=headers, content=b"{}")
            if path in ("/healthz", "/readyz"):
                assert (answer.status_code, answer.text) == (200, "ok")
                continue
            assert answer.status_code == 401, (method, path)
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            if method != "HEAD":
                problem = Problem.model_validate_json(answer.content)
                assert problem.error == "unauthorized"
                assert TOKEN not in answer.text


async def test_with_the_token_every_route_answers(world):
    world.step()
    app = app_of(world, TOKEN)
    async with open_app(app) as http:
        for method, path in every_route(app):
            if path == "/v1/events":
                continue  # It never ends.
            answer = await http.request(method, path, headers={"Authorization": f"Bearer {TOKEN}"}, content=b"{}")
            assert answer.status_code != 401, (method, path)
            assert answer.status_code < 500, (method, path, answer.text)


# -- what errors say ---------------------------------------------------------------------------------------------


def submission_json(world, **changes) -> dict:
    raw = world.submission(within=600, scaling_curve=CURVE).model_dump(mode="json")
    return {**raw, "secret_env": {"TOKEN": SECRET}, **changes}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"global_batch_size": 0}, "global_batch_size"),
        ({"secret_env": {"TOKEN": [SECRET]}}, "secret_env.TOKEN"),
        ({"secret_env": SECRET}, "secret_env"),
        ({SECRET: 1}, "Extra inputs"),
        ({"best_effort": True}, "not both"),
        ({"min_workers": 3}, "not a power of two"),
        ({"scaling_curve": {"3": 1.0}}, "scaling_curve"),
        ({"scaling_curve": {"1": -1.0}}, "scaling_curve"),
        ({"length": {"steps": 0}}, "length.steps"),
        ({"value": -1}, "value"),
    ],
)
async def test_an_invalid_submission_is_told_where_and_never_repeated(world, http, changes, named):
    raw = submission_json(world, **changes)
    job_id = JobIdentity(**raw["identity"]).job_id
    answer = await http.put(f"/v1/jobs/{job_id}", json=raw)
    assert answer.status_code == 422
    problem = Problem.model_validate_json(answer.content)
    assert (problem.error, bool(problem.hint)) == ("invalid", True)
    assert named in problem.message
    if SECRET not in changes:
        assert SECRET not in answer.text


@pytest.mark.parametrize("body", [b"", b"{", f'{{"secret_env": {{"TOKEN": "{SECRET}"'.encode(), b"[]", b"\xff\xfe"])
async def test_a_body_that_is_no_submission_is_a_problem(world, http, body):
    answer = await http.put("/v1/jobs/some-job", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    Problem.model_validate_json(answer.content)
    assert SECRET not in answer.text


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_a_deadline_that_is_no_time_is_refused(world, http, number):
    raw = json.dumps(submission_json(world, deadline_at=12345.5)).replace("12345.5", number)
    job_id = world.submission().identity.job_id
    answer = await http.put(f"/v1/jobs/{job_id}", content=raw, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert "deadline_at" in Problem.model_validate_json(answer.content).message


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/jobs/no-such-job", 404),
        ("GET", "/v1/jobs/No_Such!Job", 422),
        ("GET", "/v1/jobs/no-such-job/events", 404),
        ("GET", "/v1/jobs/no-such-job/logs/g000001-r000", 404),
        ("GET", "/v1/jobs/no-such-job/logs/..%2F..%2Fsecret.key", 404),
        ("GET", "/v1/jobs/no-such-job/events?after=99999999999999999999999", 422),
        ("GET", "/v1/jobs?limit=0", 422),
        ("GET", "/v1/events?after=x", 422),
        ("GET", "/v1/nothing", 404),
        ("DELETE", "/v1/jobs/no-such-job", 405),
        ("GET", "/v1/snapshots/abc", 422),
        ("GET", f"/v1/snapshots/{'0' * 64}", 404),
        ("POST", "/v1/jobs/no-such-job/cancel", 422),
    ],
)
async def test_every_error_is_a_problem(http, method, path, status):
    answer = await http.request(method, path)
    assert answer.status_code == status
    problem = Problem.model_validate_json(answer.content)
    assert problem.error
    assert problem.message


async def test_a_method_that_is_not_there_is_told_those_that_are(http):
    answer = await http.request("DELETE", "/v1/jobs/some-job")
    assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, PATCH, PUT")


async def test_a_defect_is_a_problem_too_and_tells_nothing(world, http, monkeypatch):
    def broken(self, *arguments):
        raise RuntimeError(f"inside: {SECRET}")

    monkeypatch.setattr(type(world.store), "read", broken)
    answer = await http.get("/v1/jobs/some-job")
    assert answer.status_code == 500
    problem = Problem.model_validate_json(answer.content)
    assert problem.error == "internal"
    assert SECRET not in answer.text


async def test_a_stale_claim_is_a_conflict(world, http):
    job = world.submit(within=600, scaling_curve=CURVE)
    world.job_service.attach(job.job.job_id, None)
    answer = await http.post(f"/v1/jobs/{job.job.job_id}/cancel", json={"claim": job.claim})
    assert answer.status_code == 409
    assert Problem.model_validate_json(answer.content).error == "stale_claim"


# -- lists -------------------------------------------------------------------------------------------------------


async def test_the_pages_of_a_list_are_linked_to_the_last(world, http):
    made = [world.submit(task=f"t{n}", within=900, scaling_curve=CURVE).job.job_id for n in range(5)]
    found, path = [], "/v1/jobs?limit=2&live=true"
    while path:
        answer = await http.get(path)
        found.append([job["job_id"] for job in answer.json()])
        path = answer.links.get("next", {}).get("url")
    assert [len(page) for page in found] == [2, 2, 1]
    assert sorted(job for page in found for job in page) == sorted(made)


@pytest.mark.parametrize("jobs", [2, 7])
async def test_a_page_takes_the_same_few_queries_and_loads_what_it_shows(world, http, jobs):
    for n in range(jobs):
        world.ended(world.submit(task=f"t{n}", steps=5, scaling_curve=CURVE))
    said = []
    sa.event.listen(world.store.engine, "before_cursor_execute", lambda *given: said.append(given[2]))
    answer = await http.get("/v1/jobs", params={"live": False})
    assert len(answer.json()) == jobs
    selects = [one for one in said if one.startswith("SELECT")]
    assert len(selects) == 2
    for column in ("scheduler_state", "secret_env", "metrics", "speeds", "sampling", "folded"):
        assert f".{column}" not in " ".join(selects)


@pytest.mark.parametrize(
    ("text", "status"), [("a " * 10, 200), ("  ", 200), ("a " * 11, 422), ("a\x00", 422), ("a" * 251, 422)]
)
async def test_a_search_has_ten_words_at_most(http, text, status):
    answer = await http.get("/v1/jobs", params={"text": text})
    assert answer.status_code == status, answer.text
    if status == 422:
        assert "text" in Problem.model_validate_json(answer.content).message


@pytest.mark.parametrize("cursor", ["", "x", "1.0", "nan,a", "1,a b", "1,a;drop", "9" * 20 + ",a", "1,\x00"])
async def test_a_cursor_of_somebody_else_is_refused(http, cursor):
    answer = await http.get("/v1/jobs", params={"cursor": cursor})
    assert answer.status_code == 422
    assert "cursor" in Problem.model_validate_json(answer.content).message


# -- when it is too much -----------------------------------------------------------------------------------------


JSON = {"Content-Type": "application/json"}


async def test_when_nobody_can_write_everybody_else_is_answered_and_too_many_are_sent_away(world, http, monkeypatch):
    job = world.submit(task="runs", within=900, scaling_curve=CURVE)
    world.run(5)
    monkeypatch.setattr(world.job_service.notifier, "wake", lambda: None)
    submissions = [world.submission(task=f"t{n}", within=900, scaling_curve=CURVE) for n in range(520)]
    with world.store.sessions() as session, world.store.alone_in_writing(session):
        waiting = [
            asyncio.create_task(
                http.put(f"/v1/jobs/{one.identity.job_id}", content=calls.submit(one).body, headers=JSON)
            )
            for one in submissions
        ]
        await asyncio.sleep(0)
        for _ in range(20):
            assert (await http.get("/healthz")).text == "ok"
            assert (await http.get("/readyz")).text == "ok"
            assert (await http.get(f"/v1/jobs/{job.job.job_id}")).status_code == 200
            assert (await http.get("/v1/health")).status_code == 200
        async with asyncio.timeout(60):
            while sum(one.done() for one in waiting) < 18:
                await asyncio.sleep(0.01)
        busy = [one.result() for one in waiting if one.done()]
        assert {answer.status_code for answer in busy} == {503}, busy[0].text
        assert {answer.headers["Retry-After"] for answer in busy} == {"2"}
        assert Problem.model_validate_json(busy[0].content).error == "busy"
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


# -- uploads -----------------------------------------------------------------------------------------------------


def tar_of(*members: tuple[tarfile.TarInfo, bytes], mode: str = "w") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def device(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = tarfile.FIFOTYPE
    return info


FILE = tarfile.TarInfo("train.py")


@pytest.mark.parametrize(
    ("tar", "said"),
    [
        (tar_of((tarfile.TarInfo("/etc/evil.py"), b"x")), "evil"),
        (tar_of((tarfile.TarInfo("../evil.py"), b"x")), "evil"),
        (tar_of((tarfile.TarInfo("a/../../evil.py"), b"x")), "evil"),
        (tar_of((link("train.py", "/etc/passwd"), b"")), "neither a file nor a folder"),
        (tar_of((FILE, b"x"), (link("hard.py", "train.py", tarfile.LNKTYPE), b"")), "neither a file nor a folder"),
        (tar_of((device("pipe"), b"")), "neither a file nor a folder"),
        # It has the time in it, which must not get into the name of the test: two processes collect it.
        pytest.param(tar_of((FILE, b"x"), mode="w:gz"), "no acceptable tar", id="compressed"),
        (b"this is no tar at all" * 100, "no acceptable tar"),
    ],
)
async def test_code_that_could_escape_its_folder_is_refused(world, http, tar, said):
    sha256 = hashlib.sha256(tar).hexdigest()
    answer = await http.put(f"/v1/snapshots/{sha256}", content=tar)
    assert answer.status_code == 422, answer.text
    problem = Problem.model_validate_json(answer.content)
    assert said in problem.message
    assert problem.hint
    assert (await http.get(f"/v1/snapshots/{sha256}")).status_code == 404
    left = [p.name for p in (world.settings.state_dir / "snapshots").iterdir() if p.name != world.sha256]
    assert left == []
    assert not list(world.base.rglob("evil.py"))


async def test_code_must_have_the_hash_that_it_claims(http):
    tar = tar_of((tarfile.TarInfo("train.py"), b"x"))
    answer = await http.put(f"/v1/snapshots/{'0' * 64}", content=tar)
    assert answer.status_code == 422
    assert hashlib.sha256(tar).hexdigest() in Problem.model_validate_json(answer.content).message


@pytest.mark.parametrize("size", [5000, 50_000])
async def test_code_that_is_too_large_is_refused_with_413(make_world, size):
    world = make_world(snapshot_max_bytes=4096)
    tar = tar_of((tarfile.TarInfo("train.py"), b"x" * size))
    async with open_app(app_of(world)) as http:
        answer = await http.put(f"/v1/snapshots/{hashlib.sha256(tar).hexdigest()}", content=tar)
    assert answer.status_code == 413
    assert "4096 bytes" in Problem.model_validate_json(answer.content).message


async def test_too_many_files_are_refused_with_413(make_world):
    world = make_world(snapshot_max_files=3)
    tar = tar_of(*((tarfile.TarInfo(f"f{n}.py"), b"x") for n in range(4)))
    async with open_app(app_of(world)) as http:
        answer = await http.put(f"/v1/snapshots/{hashlib.sha256(tar).hexdigest()}", content=tar)
    assert answer.status_code == 413


async def test_kept_code_is_read_only_and_uploading_it_again_changes_nothing(world, http):
    tar = tar_of((tarfile.TarInfo("pkg/train.py"), b"x"))
    sha256 = hashlib.sha256(tar).hexdigest()
    for _ in range(2):
        assert (await http.put(f"/v1/snapshots/{sha256}", content=tar)).status_code == 204
    for method in ("GET", "HEAD"):
        assert (await http.request(method, f"/v1/snapshots/{sha256}")).status_code == 204
    file = world.snapshots.path(sha256) / "pkg" / "train.py"
    assert file.read_bytes() == b"x"
    assert file.stat().st_mode & 0o777 == 0o400


# -- asking ------------------------------------------------------------------------------------------------------


@pytest.mark.trouble
async def test_health_shows_who_holds_each_slot(world, http):
    world.engine.set_busy("node0", 3, "job other of the service in /elsewhere")
    job = world.submit(scaling_curve=CURVE, max_workers=2)
    world.run(2)
    health = Health.model_validate_json((await http.get("/v1/health")).content)
    assert (health.status, health.engine, health.live_jobs, health.problems) == ("ok", "fake", 1, [])
    assert [slot.job_id for slot in health.slots].count(job.job.job_id) == 2
    assert health.slots[3].busy == "job other of the service in /elsewhere"
    world.engine.fail_next("observe", "the disk is full")
    world.step()
    health = Health.model_validate_json((await http.get("/v1/health")).content)
    assert health.status == "degraded"
    assert "the disk is full" in health.problems[0]


async def test_a_log_is_read_by_offset_to_its_end(world, http):
    job = world.submit(within=600, scaling_curve=CURVE)
    world.run(5)
    (name, *_) = world.status(job).log_names
    path = f"/v1/jobs/{job.job.job_id}/logs/{name}"
    text, offset = "", 0
    while True:
        piece = (await http.get(path, params={"offset": offset, "limit": 64})).json()
        assert piece["start_offset"] == offset
        if piece["next_offset"] == offset:
            break
        text, offset = text + piece["text"], piece["next_offset"]
    assert "step" in text
    assert len(text.encode()) == offset
    assert not piece["end_of_file"], "the worker still writes"
    assert (await http.get(f"{path}x")).status_code == 404


async def test_a_log_shows_no_secret_of_a_job_that_lives(world, http):
    """The modelled log holds what was reported: here, a word of every report."""
    job = world.submit(within=600, scaling_curve=CURVE, secret_env={"TOKEN": "progress", "SHORT": "p"})
    world.run(5)
    (name, *_) = world.status(job).log_names
    path = f"/v1/jobs/{job.job.job_id}/logs/{name}"
    text, offset = "", 0
    while (piece := (await http.get(path, params={"offset": offset, "limit": 7})).json())["next_offset"] > offset:
        text, offset = text + piece["text"], piece["next_offset"]
    assert "*** step=" in text
    assert "progress" not in text


async def test_events_of_a_job_after_an_id(world, http):
    job = world.submit(within=600, scaling_curve=CURVE)
    world.ended(job)
    path = f"/v1/jobs/{job.job.job_id}/events"
    events = [Event.model_validate(raw) for raw in (await http.get(path)).json()]
    assert events[0].kind == "submitted"
    assert events[-1].event_id == world.status(job).last_event_id
    later = (await http.get(path, params={"after": events[2].event_id, "limit": 1})).json()
    assert [raw["event_id"] for raw in later] == [events[3].event_id]


# -- over real connections ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(shared_daemons):
    """One service on TCP for all tests here."""
    return shared_daemons.served(TOKEN)


@pytest.fixture
def client(served) -> Iterator[ElasticFlowClient]:
    with ElasticFlowClient(served, retry_for_s=0) as found:
        yield found


@pytest.fixture
def submission(client, tmp_path):
    """Of a job for the served service, which has its code."""
    (tmp_path / "train.py").write_text("print()")
    snapshot = snapshot_folder(tmp_path)
    client.upload_snapshot(snapshot)
    return JobSubmission(
        identity=JobIdentity(dag_id="api", run_id=tmp_path.name, task_id="train"),
        command=Command(snapshot=snapshot.sha256, script="train.py"),
        length=Length(steps=20),
        global_batch_size=8,
        best_effort=True,
        scaling_curve=CURVE,
    )


@pytest.fixture
def finished_job(client, submission):
    """A job that has trained on the served service."""
    return client.submit(submission).job.job_id


def read_stream(http, count, **options) -> list[Event]:
    """The first events of the stream."""
    found: list[Event] = []
    with http.stream("GET", "/v1/events", timeout=30, **options) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        entry: dict[str, str] = {}
        for line in answer.iter_lines():
            if line.startswith(":"):
                continue
            if line:
                name, _, value = line.partition(": ")
                entry[name] = value
                continue
            event = Event.model_validate_json(entry["data"])
            assert (entry["id"], entry["event"]) == (str(event.event_id), event.kind)
            found.append(event)
            entry = {}
            if len(found) == count:
                break
    return found


def test_the_stream_goes_on_after_the_last_event_that_was_seen(client, finished_job):
    http = client._http
    stream = read_stream(http, 5, params={"job_id": finished_job})
    assert [e.job_id for e in stream] == [finished_job] * 5
    ids = [e.event_id for e in stream]
    assert ids == sorted(ids)
    again = read_stream(http, 2, params={"job_id": finished_job}, headers={"Last-Event-ID": str(ids[1])})
    assert [e.event_id for e in again] == ids[2:4]
    after = read_stream(http, 1, params={"job_id": finished_job, "after": ids[2]})
    assert after[0].event_id == ids[3]


def test_a_stream_from_now_on_leaves_out_what_was(client, submission, finished_job):
    with client._http.stream("GET", "/v1/events", params={"from_now": True}, timeout=30) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": open"
        later = client.submit(submission.model_copy(update={"identity": other_run(submission)})).job.job_id
        first = next(line for line in lines if line.startswith("data:"))
    assert later != finished_job
    assert Event.model_validate_json(first.removeprefix("data: ")).job_id == later


def other_run(submission):
    return submission.identity.model_copy(update={"run_id": "another"})


def test_the_token_is_asked_for_over_tcp(served, client):
    assert client.health().engine == "fake"
    for path, token, status in (("/healthz", None, 200), ("/v1/health", None, 401), ("/v1/health", "no", 401)):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        assert httpx.get(f"{served.base_url}{path}", headers=headers, trust_env=False).status_code == status
    with pytest.raises(Unauthorized), ElasticFlowClient(type(served)(base_url=served.base_url), retry_for_s=0) as bare:
        bare.health()


def test_a_submit_that_was_executed_though_its_answer_was_lost_is_repeated_elsewhere(served, client, submission):
    """The first address passes it on to the service, and dies before it answers; the other one repeats it."""
    lost: list[Attachment] = []

    def pass_on_and_die(request) -> None:
        marks = {name: request.headers[name] for name in ("Authorization", "Content-Type")}
        url = f"{served.base_url}{request.path}"
        answer = httpx.request(request.command, url, content=request.body, headers=marks, trust_env=False, timeout=60)
        lost.append(Attachment.model_validate_json(answer.content))
        raise ConnectionResetError

    first = Replica(behave=pass_on_and_die)
    both = Endpoint.from_url(f"{first.url},{served.base_url}", token=TOKEN)
    with ElasticFlowClient(both, retry_for_s=0) as replicas:
        found = replicas.submit(submission)
        assert (lost[0].created, found.created) == (True, False)
        assert (found.job.job_id, found.job.incarnation) == (lost[0].job.job_id, lost[0].job.incarnation)
        assert found.claim > lost[0].claim
        assert replicas.renew(found.job.job_id, found.claim).job_id == found.job.job_id
        with pytest.raises(StaleClaim):
            replicas.renew(found.job.job_id, lost[0].claim)
    first.kill()
    assert [event.kind for event in client.events(found.job.job_id)].count("submitted") == 1


# -- nodes -------------------------------------------------------------------------------------------------------


async def test_a_drain_is_shown_and_can_be_taken_back(http, world):
    world.step()
    said = await http.put("/v1/nodes/node0/drain", json={"until_at": world.now_s + 60})
    assert said.json() == {"node_id": "node0", "until_at": world.now_s + 60}
    slots = Health.model_validate((await http.get("/v1/health")).json()).slots
    assert {slot.draining_until for slot in slots} == {world.now_s + 60}
    await http.put("/v1/nodes/node0/drain", json={"until_at": None})
    slots = Health.model_validate((await http.get("/v1/health")).json()).slots
    assert {slot.draining_until for slot in slots} == {None}


async def test_a_drain_of_no_node_names_those_there_are(http, world):
    world.step()
    refused = await http.put("/v1/nodes/elsewhere/drain", json={"until_at": 1.0})
    assert refused.status_code == 404
    assert Problem.model_validate(refused.json()).hint == "nodes are: node0"


def test_the_client_drains(client):
    health = client.health()
    node_id = health.slots[0].node_id
    try:
        assert client.drain(node_id, health.started_at + 1e6).until_at == health.started_at + 1e6
        assert client.health().slots[0].draining_until == health.started_at + 1e6
    finally:
        client.drain(node_id, None)


# -- what the pages ask ------------------------------------------------------------------------------------------


async def test_the_pages_get_what_they_ask_for(world, http):
    job = world.submit(steps=32 * 600, within=3600.0, scaling_curve=CURVE)
    world.reach(job, "running")
    world.run(10.0)
    job_id = job.job.job_id

    async def ask(method: str, path: str, **given) -> dict:
        answer = await http.request(method, path, **given)
        assert answer.status_code == 200, (path, answer.text)
        return answer.json()

    assert ClusterNow.model_validate(await ask("GET", "/v1/cluster")).jobs[0].job_id == job_id
    history = await ask("GET", "/v1/cluster/history?parts=7")
    assert len(ClusterHistory.model_validate(history).held_slot_s) == 7
    assert JobStory.model_validate(await ask("GET", f"/v1/jobs/{job_id}/story")).samples
    assert len(await ask("GET", f"/v1/jobs/{job_id}/runs")) == 1
    changes = [{"job_id": job_id, "deadline_at": None}]
    answer = WhatIf.model_validate(await ask("POST", "/v1/what-if", json={"changes": changes}))
    assert answer.verdicts[0].verdict.decision == "best_effort"
    due = [{"dag_id": "daily", "task_id": "x", "due_at": [world.now_s + 60]}]
    assert await ask("POST", "/v1/calendar", json={"tasks": due}) == {
        "taken": 1,
        "unknown": ["daily.x"],
        "forgotten": [],
    }
    whole = {"read_at": world.now_s + 1.0, "tasks": []}
    assert await ask("POST", "/v1/calendar", json={"tasks": [], "whole": whole}) == {
        "taken": 0,
        "unknown": [],
        "forgotten": ["daily.x"],
    }
    stacks = StackDump.model_validate(await ask("POST", f"/v1/jobs/{job_id}/stacks")).stacks
    assert len(stacks) == world.status(job).workers


@pytest.mark.parametrize(
    ("method", "path", "body", "says"),
    [
        ("GET", "/v1/cluster/history?parts=0", None, "parts"),
        ("GET", "/v1/cluster/history?parts=100000", None, "parts"),
        ("GET", "/v1/cluster/history?from_at=nan", None, "from_at"),
        ("GET", "/v1/cluster/history?from_at=20&until_at=10", None, "until_at=10.0 is not after from_at=20.0"),
        ("GET", "/v1/jobs/some-job/story?incarnation=0", None, "incarnation"),
        ("GET", "/v1/jobs/some-job/runs?limit=1000", None, "limit"),
        ("POST", "/v1/what-if", {"hours": -1}, "hours"),
        ("POST", "/v1/what-if", {"extra_nodes": 100000}, "extra_nodes"),
        ("POST", "/v1/what-if", {"changes": [{"job_id": "x"}]}, "deadline_at"),
        ("POST", "/v1/calendar", {"tasks": [{"dag_id": "x"}]}, "task_id"),
        ("POST", "/v1/calendar", {"tasks": "all"}, "tasks"),
        ("POST", "/v1/calendar", {"tasks": [], "whole": {"tasks": []}}, "read_at"),
    ],
)
async def test_what_a_page_asks_wrongly_is_named(http, method, path, body, says):
    answer = await http.request(method, path, json=body)
    assert answer.status_code == 422, answer.text
    assert says in Problem.model_validate_json(answer.content).message


async def test_nobody_has_no_story_no_runs_and_no_stacks(http):
    for method, path in [("GET", "story"), ("GET", "runs"), ("POST", "stacks")]:
        assert (await http.request(method, f"/v1/jobs/nobody/{path}")).status_code == 404


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (b"", b""),
        (b"plain", b"plain"),
        ("é".encode(), "é".encode()),
        ("aé".encode()[:-1], b"a"),
        ("a€".encode()[:-1], b"a"),
        ("a€".encode()[:-2], b"a"),
        ("a😀".encode()[:-1], b"a"),
        ("a😀".encode(), "a😀".encode()),
        (b"a\xff", b"a\xff"),
        (b"\x80\x80\x80\x80", b"\x80\x80\x80\x80"),
    ],
)
def test_a_character_is_not_cut_in_two(data, whole):
    from elasticflow_airflow.service.job_files.log_pieces import _whole_characters

    assert _whole_characters(data) == whole
