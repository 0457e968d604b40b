"""Both clients send what the API wants and turn every answer into a value or an error that says what to do."""

from __future__ import annotations

import ast
import inspect
import json
import zipfile
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import httpx
import pytest
from tenacity import RetryCallState, Retrying

from elasticflow_airflow.api import AmendRequest, Command, Event, ForecastAnswer, JobSubmission, LogPiece, Problem
from elasticflow_airflow.api.insight import (
    CalendarAnswer,
    CalendarRequest,
    ClusterHistory,
    ClusterNow,
    DeadlineChange,
    DueRuns,
    JobStory,
    StackDump,
    WhatIf,
    WhatIfRequest,
)
from elasticflow_airflow.api.owners import OwnedJobs, OwnersAnswer, OwnerSeen, OwnersReport, UnownedJob
from elasticflow_airflow.client import (
    AsyncElasticFlowClient,
    ElasticFlowClient,
    Endpoint,
    IncompatibleService,
    InvalidSubmission,
    JobNotFound,
    ServiceFault,
    ServiceUnavailable,
    StaleClaim,
    Unauthorized,
    snapshot_folder,
)
from elasticflow_airflow.client.calls.exchange import pause_between

ENDPOINT = Endpoint(base_url="http://service:8765", token="s3cret")


class Service:
    """Answers from a list, and remembers what it was asked."""

    def __init__(self, *answers: httpx.Response | Exception) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        kind = {name: value for name, value in answer.headers.items() if name in ("content-type", "retry-after")}
        return httpx.Response(answer.status_code, content=answer.content, headers=kind)


def ok(value) -> httpx.Response:
    return httpx.Response(200, content=value.model_dump_json())


def problem(status: int, error: str, message: str, hint: str = "") -> httpx.Response:
    return httpx.Response(status, content=Problem(error=error, message=message, hint=hint).model_dump_json())


def client(service: Service, **options) -> ElasticFlowClient:
    return ElasticFlowClient(ENDPOINT, transport=httpx.MockTransport(service), **options)


def async_client(service: Service, **options) -> AsyncElasticFlowClient:
    return AsyncElasticFlowClient(ENDPOINT, transport=httpx.MockTransport(service), **options)


def test_an_option_that_is_not_used_is_not_sent_to_a_service_that_may_not_know_it(attachment, submission):
    """An older service refuses fields that it does not know: whatever was added may be sent only where it is used."""
    service = Service(ok(attachment))
    plain = submission.model_copy(update={"command": Command(snapshot="0" * 64, script="train.py")})
    client(service).submit(plain)
    message = json.loads(service.requests[0].content)
    read = fields_of_the_release_before()
    assert set(message["command"]) <= read["Command"] - {"args_shown"}
    assert set(message) <= read["JobSubmission"] - {"on_past_deadline"}

    given = plain.command.model_copy(update={"requirements": ("six",), "args_shown": ()})
    client(service).submit(plain.model_copy(update={"command": given, "on_past_deadline": "fail"}))
    message = json.loads(service.requests[1].content)
    assert set(message["command"]) == set(Command.model_fields)
    assert set(message) == set(JobSubmission.model_fields)


def fields_of_the_release_before() -> dict[str, set[str]]:
    """Return the fields of each class of the release that running services may still have, from its wheel."""
    wheel = zipfile.ZipFile(next((Path(__file__).parents[1] / "upgrade/release_before").glob("*.whl")))
    sources = [ast.parse(wheel.read(name)) for name in wheel.namelist() if name.endswith("/submission.py")]
    classes = [one for source in sources for one in source.body if isinstance(one, ast.ClassDef)]
    return {one.name: {part.target.id for part in one.body if isinstance(part, ast.AnnAssign)} for one in classes}


def test_submit_reveals_secrets_only_in_the_body(attachment, submission):
    service = Service(ok(attachment))
    assert client(service).submit(submission) == attachment
    request = service.requests[0]
    assert (request.method, request.url.path) == ("PUT", f"/v1/jobs/{submission.identity.job_id}")
    assert request.headers["authorization"] == "Bearer s3cret"
    assert json.loads(request.content)["secret_env"] == {"TOKEN": "hunter2"}
    assert "hunter2" not in repr(submission)
    assert "s3cret" not in repr(ENDPOINT)


def test_every_call_goes_where_the_api_says(make_status, attachment):
    job = make_status()
    piece = LogPiece(text="hello", start_offset=0, next_offset=5, end_of_file=False)
    cases = [
        (ok(job), lambda c: c.status("a/b"), "GET", b"/v1/jobs/a%2Fb"),
        (ok(attachment), lambda c: c.attach("j", lease_s=5.0), "POST", b"/v1/jobs/j/attach"),
        (ok(job), lambda c: c.cancel("j", 3, "why"), "POST", b"/v1/jobs/j/cancel"),
        (ok(job), lambda c: c.acknowledge("j", 3), "POST", b"/v1/jobs/j/acknowledge"),
        (ok(job), lambda c: c.renew("j", 3), "POST", b"/v1/jobs/j/lease"),
        (httpx.Response(200, json=[]), lambda c: c.events("j", after=7), "GET", b"/v1/jobs/j/events?after=7&limit=500"),
        (httpx.Response(200, json=[]), lambda c: c.list_jobs(live=True), "GET", b"/v1/jobs?live=true"),
        (httpx.Response(200, json=[]), lambda c: c.list_jobs(cursor="1.5,a"), "GET", b"/v1/jobs?cursor=1.5%2Ca"),
        (
            httpx.Response(200, json=[]),
            lambda c: c.list_jobs(dag_id=["a", "b"], limit=1, namespace="n", task_id="t", map_index=-1),
            "GET",
            b"/v1/jobs?dag_id=a&dag_id=b&limit=1&namespace=n&task_id=t&map_index=-1",
        ),
        (
            ok(piece),
            lambda c: c.read_log("j", "g1-r0", 4, 10, 2),
            "GET",
            b"/v1/jobs/j/logs/g1-r0?offset=4&limit=10&incarnation=2",
        ),
    ]
    for answer, call, method, target in cases:
        service = Service(answer)
        call(client(service))
        assert (service.requests[0].method, service.requests[0].url.raw_path) == (method, target)


async def test_both_clients_ask_alike_for_what_the_pages_show(make_status):
    status, outlook = (
        make_status(),
        ForecastAnswer(asked_at=1.0, until_at=2.0, kept=0, not_kept=0, missing_slots=0, summary=""),
    )
    history = ClusterHistory(
        from_at=1.0,
        until_at=2.0,
        now=1.5,
        spans=[],
        planned=[],
        admissions=[],
        part_s=1.0,
        held_slot_s=[0.0],
        computing_slot_s=[0.0],
        slots=4,
    )
    story = JobStory(
        status=status,
        incarnations=1,
        why="",
        submission={},
        generations=[],
        planned=[],
        samples=[],
        curve=[],
        workers=[],
        checkpoints=[],
    )
    request = WhatIfRequest(changes=[DeadlineChange(job_id="j", deadline_at=None)])
    calendar = CalendarRequest(tasks=[DueRuns(dag_id="d", task_id="t", due_at=[1.0])])
    cases = [
        (ClusterNow(at=1.0, slots=[], jobs=[status]), "cluster", (), b"/v1/cluster"),
        (history, "history", (1.0, 2.0, 1), b"/v1/cluster/history?from_at=1.0&until_at=2.0&parts=1"),
        (story, "story", ("a/b", 2), b"/v1/jobs/a%2Fb/story?incarnation=2"),
        (WhatIf(verdicts=[], before=outlook, after=outlook), "what_if", (request,), b"/v1/what-if"),
        (CalendarAnswer(taken=1, unknown=["d.t"]), "feed_calendar", (calendar,), b"/v1/calendar"),
        (StackDump(job_id="j", at=1.0, stacks={"w": "..."}), "stacks", ("j",), b"/v1/jobs/j/stacks"),
    ]
    for answer, name, arguments, target in cases:
        service = Service(ok(answer))
        assert getattr(client(service), name)(*arguments) == answer
        assert await getattr(async_client(service), name)(*arguments) == answer
        first, second = service.requests
        assert first.url.raw_path == second.url.raw_path == target
        assert first.content == second.content
    report = OwnersReport(namespace="n", airflow="a", owners=[OwnerSeen(job_id="j", claim=1, owner="ended")])
    unowned = UnownedJob(job=status, since_at=1.0, why="nobody asks")
    cases = [
        (OwnedJobs(at=1.0, jobs=[]), "owned_jobs", ("n", "j"), b"/v1/owners?namespace=n&after=j"),
        (OwnersAnswer(cancelled=["j"]), "report_owners", (report,), b"/v1/owners"),
    ]
    for answer, name, arguments, target in cases:
        service = Service(ok(answer))
        assert getattr(client(service), name)(*arguments) == answer
        assert await getattr(async_client(service), name)(*arguments) == answer
        assert [request.url.raw_path for request in service.requests] == [target, target]
    service = Service(httpx.Response(200, json=[unowned.model_dump(mode="json")]))
    assert client(service).unowned_jobs(5.0) == await async_client(service).unowned_jobs(5.0) == [unowned]
    assert service.requests[1].url.raw_path == b"/v1/unowned?silent_s=5.0"
    service = Service(httpx.Response(200, json=[]))
    assert client(service).runs("j", 3) == await async_client(service).runs("j", 3) == []
    assert service.requests[1].url.raw_path == b"/v1/jobs/j/runs?limit=3"


def test_snapshot_is_sent_once(tmp_path):
    (tmp_path / "train.py").write_text("pass")
    snapshot = snapshot_folder(tmp_path)
    absent = Service(problem(404, "snapshot_not_found", "no such snapshot"), httpx.Response(204))
    assert client(absent).upload_snapshot(snapshot) is True
    assert [r.method for r in absent.requests] == ["GET", "PUT"]
    assert absent.requests[1].content == snapshot.tar
    present = Service(httpx.Response(204))
    assert client(present).upload_snapshot(snapshot) is False


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (problem(404, "job_not_found", "no job 'j'"), JobNotFound, "no job 'j'"),
        (problem(409, "stale_claim", "claim 1 is stale"), StaleClaim, "claim 1 is stale"),
        (problem(422, "invalid", "steps must be at least 1"), InvalidSubmission, "steps must be"),
        (problem(413, "too_large", "too large", "put data elsewhere"), InvalidSubmission, "put data elsewhere"),
        (httpx.Response(401), Unauthorized, "password of the Airflow connection"),
        (problem(500, "fault", "disk full"), ServiceFault, "disk full"),
        (httpx.Response(404, text="<html>nginx</html>"), IncompatibleService, "nginx"),
        (httpx.Response(200, json={"surprise": 1}), IncompatibleService, "same version"),
        (httpx.Response(200, text="hello"), IncompatibleService, "same version"),
    ],
)
async def test_errors_say_what_to_do(answer, error, words):
    with pytest.raises(error, match=words):
        client(Service(answer)).status("j")
    with pytest.raises(error, match=words):
        await async_client(Service(answer)).status("j")


@pytest.mark.parametrize("status", [200, 302, 500, 502, 503, 504, 520])
async def test_a_page_of_a_proxy_is_tried_again(make_status, status):
    html = {"content-type": "text/html; charset=utf-8"}
    page = httpx.Response(status, content=b"<html><title>\n Please wait </title><p>maintenance", headers=html)
    assert client(Service(page, page, ok(make_status()))).status("j").job_id == make_status().job_id
    assert (await async_client(Service(page, page, ok(make_status()))).status("j")).job_id == make_status().job_id
    with pytest.raises(ServiceUnavailable, match=rf"GET /v1/jobs/j with a web page \(status {status}\).*'Please wait'"):
        client(Service(page), retry_for_s=0).status("j")
    with pytest.raises(ServiceUnavailable):  # though any answer of success would do here
        client(Service(page), retry_for_s=0).has_snapshot("0" * 64)


async def test_calls_go_on_while_the_service_is_away(make_status):
    away = [httpx.ConnectError("refused"), httpx.Response(503), httpx.RemoteProtocolError("reset")]
    told: list[str] = []
    service = Service(*away, ok(make_status()))
    assert client(service, on_away=told.append).status("j").job_id == make_status().job_id
    assert len(service.requests) == 4
    assert len(told) == 1
    assert "refused" in told[0]
    service = Service(*away, ok(make_status()))
    await async_client(service).status("j")
    assert len(service.requests) == 4


async def test_calls_give_up_in_time():
    service = Service(httpx.ConnectError("refused"))
    with pytest.raises(ServiceUnavailable, match=r"does not answer: refused .*elasticflow serve"):
        client(service, retry_for_s=0).status("j")
    assert len(service.requests) == 1
    with pytest.raises(ServiceUnavailable):
        await async_client(service, retry_for_s=0).status("j")


def test_amend_answers(make_status):
    answer = {
        "accepted": False,
        "reason": "too early",
        "earliest_deadline_at": 5.0,
        "job": json.loads(make_status().model_dump_json()),
    }
    service = Service(httpx.Response(200, json=answer))
    got = client(service).amend("j", AmendRequest(claim=1, deadline_at=4.0))
    assert (got.accepted, got.earliest_deadline_at) == (False, 5.0)
    assert service.requests[0].method == "PATCH"


async def test_event_stream_goes_on_after_a_break():
    def line(number: int) -> str:
        event = Event(event_id=number, job_id="j", at=1.0, kind="admitted", reason="fits")
        return f"id: {number}\nevent: admitted\ndata: {event.model_dump_json()}\n\n"

    first = httpx.Response(200, text=": hello\n\n" + line(1) + line(2))
    second = httpx.Response(200, text=line(3))
    service = Service(first, second)
    seen = []
    async with async_client(service) as http:
        async for event in http.stream_events("j"):
            seen.append(event.event_id)
            if event.event_id == 3:
                break
    assert seen == [1, 2, 3]
    assert [r.headers["last-event-id"] for r in service.requests] == ["0", "2"]


def test_both_clients_have_the_same_calls():
    def calls(cls: type) -> dict[str, list[str]]:
        return {
            name: list(inspect.signature(f).parameters)
            for name, f in inspect.getmembers(cls, inspect.isfunction)
            if not name.startswith("_")
        }

    sync, other = calls(ElasticFlowClient), calls(AsyncElasticFlowClient)
    sync.pop("close")
    other.pop("aclose")
    other.pop("stream_events")
    assert sync == other


def test_help_and_editors_see_plain_methods():
    for cls, is_async in ((ElasticFlowClient, False), (AsyncElasticFlowClient, True)):
        assert str(inspect.signature(cls.status)) == "(self, job_id: 'str') -> 'JobStatus'"
        assert cls.status.__doc__ == "Everything about one job. Raises JobNotFound."
        assert inspect.iscoroutinefunction(cls.status) == is_async
        assert list(inspect.signature(cls(ENDPOINT).status).parameters) == ["job_id"]


@pytest.mark.parametrize(
    ("url", "text"),
    [
        ("unix:///run/e/service.sock", "/run/e/service.sock"),
        ("https://gpu:8765/", "https://gpu:8765"),
    ],
)
def test_endpoint_from_url(url, text):
    assert str(Endpoint.from_url(url)).endswith(text)


def test_endpoint_refuses_other_addresses():
    from elasticflow_airflow.client import ElasticFlowError

    for url in ("ftp://x", "gpu-host:8765", "unix://"):
        with pytest.raises(ElasticFlowError):
            Endpoint.from_url(url)


def test_own_addresses_never_go_through_a_proxy():
    assert not Endpoint.from_url("http://127.0.0.1:1").trust_env
    assert not Endpoint.from_url("unix:///x").trust_env
    assert Endpoint.from_url("http://gpu:1").trust_env


@pytest.mark.parametrize(
    ("said", "expected"),
    [("7", 7.0), ("0", 0.0), ("9" * 30, 60.0), ("soon", 0.0), ("-5", 0.0), ("", 0.0), (None, 0.0)],
)
def test_a_busy_service_is_asked_again_when_it_says(said, expected):
    headers = {} if said is None else {"Retry-After": said}
    body = {"error": "busy", "message": "the service is busy", "hint": "ask again"}
    service = Service(httpx.Response(503, json=body, headers=headers))
    with pytest.raises(ServiceUnavailable) as caught:
        client(service, retry_for_s=0).status("j")
    assert caught.value.retry_after_s == expected
    pause_s = pause_between()(_state_of(caught.value))
    assert expected <= pause_s <= expected + 3.3


def test_a_busy_service_may_say_a_date():
    at = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    service = Service(httpx.Response(503, headers={"Retry-After": at}))
    with pytest.raises(ServiceUnavailable) as caught:
        client(service, retry_for_s=0).status("j")
    assert 25.0 < caught.value.retry_after_s <= 30.0


def _state_of(error: Exception) -> RetryCallState:
    state = RetryCallState(Retrying(), None, (), {})
    state.set_exception((type(error), error, None))
    return state
