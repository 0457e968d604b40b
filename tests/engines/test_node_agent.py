"""A node agent's rules: who may ask it, which files it takes and gives, what it says when something is wrong."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from elasticflow_airflow.cli.main import app
from elasticflow_airflow.engines.cluster import job_folder, node_agent, node_link
from elasticflow_airflow.engines.cluster.agent_server import (
    AgentOptions,
    create_app,
    interface_of,
    run_agent,
    tree_digest,
)
from elasticflow_airflow.engines.cluster.cluster_engine import open_cluster_engine
from elasticflow_airflow.engines.cluster.cluster_nodes import OwnEpoch
from elasticflow_airflow.engines.cluster.job_folder import Arrivals, Direction, files_down, place_of
from elasticflow_airflow.engines.cluster.messages import (
    FilePart,
    Pull,
    PullAnswer,
    Push,
    PushAnswer,
    Seal,
    SupervisorStart,
    SupervisorState,
)
from elasticflow_airflow.engines.cluster.node_agent import NodeAgent
from elasticflow_airflow.engines.cluster.node_link import NodeLink, with_time
from elasticflow_airflow.engines.cluster.shared_storage import StorageProbe, open_shared_storage
from elasticflow_airflow.engines.job_files import remove
from elasticflow_airflow.engines.local import detect_nodes
from elasticflow_airflow.engines.local.files.generation_folder import (
    Status,
    SupervisorFolder,
    SupervisorSpec,
    WorkerSpec,
    WorkerStatus,
)
from elasticflow_airflow.engines.port import EngineError
from elasticflow_airflow.runtime.protocol import Membership, Report, ReportKind, RescaleMode

TOKEN = "a-token-of-the-tests"
HERE = "jobs/job/i000001"
FOLDER = f"{HERE}/supervisors/g000001-n0"
WORKER = "g000001-r000"


@pytest.fixture
def agent(tmp_path: Path) -> NodeAgent:
    (node,) = detect_nodes(slots=2, environ={"CUDA_VISIBLE_DEVICES": ""})
    return NodeAgent(
        tmp_path / "node", tmp_path / "shared", [replace(node, node_id="n0")], tmp_path / "locks", {}, TOKEN
    )


@pytest.fixture
def client(agent: NodeAgent) -> TestClient:
    return TestClient(
        create_app(agent, TOKEN), headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": "application/json"}
    )


def spec(tmp_path: Path, **changes: Any) -> SupervisorSpec:
    worker = WorkerSpec(worker_id=WORKER, rank=0, slot_index=0, lock_name="cpu-0", env={})
    values: dict[str, Any] = {
        "job_id": "job",
        "incarnation": 1,
        "generation": 1,
        "chain": 1,
        "node_id": "n0",
        "world_size": 2,
        "incarnation_dir": str(tmp_path / "node" / HERE),
        "state_dir": str(tmp_path / "node"),
        "lock_dir": str(tmp_path / "locks"),
        "python": sys.executable,
        "env": {},
        "workers": (worker,),
        "lease_s": 60.0,
        "grace_s": 5.0,
        "log_segment_bytes": 1000,
        "log_segments": 2,
    }
    return SupervisorSpec(**{**values, **changes})


NUMBERS = itertools.count(1)


def give(agent: NodeAgent, *files: tuple[str, bytes], **more: Any) -> PushAnswer:
    parts = [FilePart(path=path, data=data) for path, data in files]
    return agent.push(Push(epoch=1, number=next(NUMBERS), files=parts, **more))


def give_spec(agent: NodeAgent, tmp_path: Path, **changes: Any) -> None:
    give(agent, (f"{FOLDER}/spec.json", json.dumps(asdict(spec(tmp_path, **changes))).encode()))


def pull(agent: NodeAgent, version: int = 0, **sizes: int) -> PullAnswer:
    return agent.pull(Pull(epoch=1, version=version, sizes={f"{HERE}/{k}": v for k, v in sizes.items()}))


def paths(answer: PullAnswer) -> list[str]:
    return [file.path.removeprefix(f"{HERE}/") for file in answer.files]


ROUTES = [
    "GET /introduction",
    "POST /push",
    "POST /pull",
    "POST /recall",
    "POST /stacks",
    "POST /environment",
    "PUT /code/x",
    "POST /probe",
]


@pytest.mark.parametrize("route", ROUTES)
def test_no_route_is_open(agent: NodeAgent, route: str) -> None:
    method, path = route.split()
    app = create_app(agent, TOKEN)
    for headers in ({}, {"Authorization": "Bearer another"}, {"Authorization": f"Bearer {TOKEN}x"}):
        answer = TestClient(app).request(method, path, headers=headers, json={})
        assert answer.status_code == 401, answer.text
    assert {route.path.split("/")[1] for route in app.routes} == {one.split("/")[1] for one in ROUTES}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "path",
    [
        "jobs/job/i000001/../../../x",
        "/etc/passwd",
        "jobs/job/i000001/supervisors/g000001-other/spec.json",
        f"{FOLDER}/status.json",
        f"{HERE}/logs/{WORKER}.log.000",
        "jobs/../i000001/session.json",
        "jobs/job/i000001/checkpoints/g000001/x",
        "engine/job.json",
    ],
)
def test_a_file_that_is_none_of_its_own_is_refused(client: TestClient, tmp_path: Path, path: str) -> None:
    push = Push(epoch=1, number=1, files=[FilePart(path=path, data=b"{}")])
    answer = client.post("/push", content=push.model_dump_json())
    assert "not a file that is sent here" in answer.json()["refused"][path]
    assert not (tmp_path / "x").exists()


def test_which_files_travel_where() -> None:
    directions = {
        path: place_of(f"{HERE}/{path}") for path in ("session.json", "reports/g000001-w.jsonl", "logs/w.log.0")
    }
    assert [place and place.direction for place in directions.values()] == [
        Direction.DOWN,
        Direction.ACROSS,
        Direction.UP,
    ]
    assert place_of(f"{HERE}/supervisors/g000001-n0/.spec.json.tmp") is None
    assert place_of(f"{HERE}/supervisors/g000001-n0/secret.json") is None


def test_what_workers_read_arrives_before_they_may_go(tmp_path: Path) -> None:
    for path in (f"{FOLDER}/go", f"{FOLDER}/spec.json", f"{HERE}/membership.json", f"{HERE}/session.json"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / HERE / "rendezvous").mkdir()
    (tmp_path / HERE / "rendezvous" / "g000001.json").touch()
    found = files_down(tmp_path, HERE, ["n0"])
    assert found[0] == f"{HERE}/session.json"
    assert found[-1] == f"{FOLDER}/go"
    assert f"{FOLDER}/spec.json" not in files_down(tmp_path, HERE, ["n1"])


def test_a_service_that_was_replaced_is_refused(client: TestClient) -> None:
    assert client.post("/push", content=Push(epoch=2, number=1).model_dump_json()).status_code == 200
    for path, message in (("/push", Push(epoch=1, number=2)), ("/pull", Pull(epoch=1, version=0))):
        answer = client.post(path, content=message.model_dump_json())
        assert answer.status_code == 409
        assert "taken over" in answer.text
    late = client.post("/push", content=Push(epoch=2, number=1).model_dump_json())
    assert late.status_code == 409
    assert "later request" in late.text


def test_the_end_of_a_worker_is_told_after_all_that_it_has_said(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "PART_BYTES", 10)
    give_spec(agent, tmp_path)
    folder = SupervisorFolder(tmp_path / "node" / FOLDER)
    (tmp_path / "node" / HERE / "reports").mkdir()
    report = tmp_path / "node" / HERE / f"reports/g000001-{WORKER}.jsonl"
    report.write_bytes(b"x" * 25)
    folder.write_status(Status(workers={WORKER: WorkerStatus(rank=0, ended=True)}, ended=True))
    answer, got, version, rounds = pull(agent), 0, 0, 0
    while "supervisors/g000001-n0/status.json" not in paths(answer):
        got += sum(len(file.data) for file in answer.files if file.path.endswith(".jsonl"))
        version, rounds = answer.version, rounds + 1
        answer = agent.pull(Pull(epoch=1, version=version, sizes={f"{HERE}/reports/g000001-{WORKER}.jsonl": got}))
        assert rounds < 5
    assert got + sum(len(file.data) for file in answer.files if file.path.endswith(".jsonl")) == 25


def test_whose_end_is_held_back_counts_as_running_and_a_lost_answer_loses_nothing(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_agent, "PART_BYTES", 10)
    give_spec(agent, tmp_path)
    (tmp_path / "node" / HERE / "reports").mkdir()
    report = f"{HERE}/reports/g000001-{WORKER}.jsonl"
    (tmp_path / "node" / report).write_bytes(b"x" * 25)
    ended = Status(workers={WORKER: WorkerStatus(rank=0, ended=True)}, ended=True)
    SupervisorFolder(tmp_path / "node" / FOLDER).write_status(ended)
    answer = pull(agent)
    assert "supervisors/g000001-n0/status.json" not in paths(answer)
    assert answer.supervisors == {FOLDER: "alive"}
    last = agent.pull(Pull(epoch=1, version=answer.version, sizes={report: 25}))
    assert "supervisors/g000001-n0/status.json" in paths(last)
    assert last.supervisors == {}
    again = agent.pull(Pull(epoch=1, version=answer.version, sizes={report: 25}))  # The last one was lost on its way.
    assert "supervisors/g000001-n0/status.json" in paths(again)


def test_a_new_agent_tells_of_ends_that_the_one_before_may_not_have_told(agent: NodeAgent, tmp_path: Path) -> None:
    give_spec(agent, tmp_path)
    ended = Status(workers={WORKER: WorkerStatus(rank=0, ended=True)}, ended=True)
    SupervisorFolder(tmp_path / "node" / FOLDER).write_status(ended)
    (node,) = agent.introduce().facts.nodes
    other = NodeAgent(tmp_path / "node", tmp_path / "shared", [node], tmp_path / "locks", {}, TOKEN)
    assert "supervisors/g000001-n0/status.json" in paths(pull(other))


def a_loop(path: Path) -> None:
    path.symlink_to(path)


def a_folder(path: Path) -> None:
    path.mkdir()


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def nested(path: Path) -> None:
    path.write_bytes(b"[" * 100_000)


def nonsense(path: Path) -> None:
    path.write_bytes(b'{"workers": [[]], "worker_id": [], "supervisor": 3}')


@pytest.mark.parametrize("make", [a_loop, a_folder, a_pipe, nested, nonsense])
@pytest.mark.parametrize(
    "name",
    [
        *("logs", "heartbeats", "reports", "rendezvous", "supervisors", "session.json", "membership.json"),
        *(f"supervisors/g000001-n0/{name}" for name in ("status.json", "spec.json", "warm", "go", "order.json")),
        *(f"heartbeats/{WORKER}.json", f"reports/g000001-{WORKER}.jsonl", f"logs/{WORKER}.log.000000000000"),
        *("checkpoints", "supervisors/g000009-n0", "supervisors/g000001.failed"),
    ],
)
def test_what_a_script_makes_of_its_folder_stops_nobody_else(
    agent: NodeAgent, tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    give_spec(agent, tmp_path)
    path = tmp_path / "node" / HERE / name
    path.parent.mkdir(exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        remove(path)
    path.unlink(missing_ok=True)
    make(path)
    other = f"{FOLDER.replace('/job/', '/other/')}"
    for _ in range(2):
        answer = give(
            agent,
            (f"{HERE}/session.json", b"{}"),
            (f"{HERE}/membership.json", b'{"generation": 2}'),
            (f"{FOLDER}/go", b""),
            (f"{HERE}/heartbeats/g000001-r001.json", b"{}"),
            (f"{other}/spec.json", json.dumps(asdict(spec(tmp_path))).encode()),
            renewed=[FOLDER, other],
            starts=[SupervisorStart(path=FOLDER, sealed_env=Seal(TOKEN).close({}))],
        )
        assert not any("/other/" in path for path in (*answer.refused, *answer.failures))
        (tmp_path / "node" / other / "warm").touch()
        assert f"{other}/warm" in [file.path for file in pull(agent).files]
        (node,) = agent.introduce().facts.nodes
        agent = NodeAgent(tmp_path / "node", tmp_path / "shared", [node], tmp_path / "locks", {}, TOKEN)
    give(agent, discarded=[HERE])
    pull(agent)


def test_what_came_from_others_is_not_sent_back(agent: NodeAgent, tmp_path: Path) -> None:
    give_spec(agent, tmp_path)
    give(agent, (f"{HERE}/heartbeats/g000001-r001.json", b"{}"), (f"{HERE}/rendezvous/g000001.json", b"{}"))
    own = tmp_path / "node" / HERE / "heartbeats" / f"{WORKER}.json"
    own.write_bytes(b'{"step": 1}')
    assert paths(pull(agent)) == [f"heartbeats/{WORKER}.json"]
    give(agent, (f"{HERE}/heartbeats/{WORKER}.json", b'{"step": 0}'))  # late, and from the wrong side
    assert own.read_bytes() == b'{"step": 1}'


def test_nothing_is_told_twice_and_everything_to_a_new_service(agent: NodeAgent, tmp_path: Path) -> None:
    give_spec(agent, tmp_path)
    SupervisorFolder(tmp_path / "node" / FOLDER).warm.touch()
    first = pull(agent)
    assert "supervisors/g000001-n0/warm" in paths(first)
    assert not pull(agent, first.version).files
    assert paths(pull(agent, 0)) == paths(first)


def test_a_plan_that_nobody_is_in_is_not_undone(agent: NodeAgent, tmp_path: Path) -> None:
    """A supervisor has written it when its lease expired; the service that comes back still has the old one."""
    give_spec(agent, tmp_path)
    folder = tmp_path / "node" / HERE
    plan = Membership(generation=1, mode=RescaleMode.RESTART, members=(), reason="no service")
    plan.write(folder)
    old = json.dumps({"generation": 1, "mode": "restart", "members": [{"worker_id": WORKER}], "reason": "", "lost": []})
    give(agent, (f"{HERE}/membership.json", old.encode()))
    assert Membership.read(folder) == plan
    new = json.dumps({**json.loads(old), "generation": 2, "members": []})
    give(agent, (f"{HERE}/membership.json", new.encode()))
    found = Membership.read(folder)
    assert found is not None
    assert found.generation == 2


@pytest.mark.parametrize("what", ["starts", "renewed"])
def test_a_supervisor_that_is_started_long_after_its_files_came_is_told_of(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    give_spec(agent, tmp_path, code_dir=str(tmp_path / "node" / "snapshots" / "abc"))
    with monkeypatch.context() as later:
        later.setattr(node_agent, "REST_S", -1.0)
        assert pull(agent).supervisors == {FOLDER: "dead"}
    assert pull(agent).supervisors == {}  # Nothing has happened for long.
    start = SupervisorStart(path=FOLDER, sealed_env=Seal(TOKEN).close({}))
    give(agent, **{what: [start if what == "starts" else FOLDER]})
    SupervisorFolder(tmp_path / "node" / FOLDER).write_status(Status())
    assert "supervisors/g000001-n0/status.json" in paths(pull(agent))


def test_why_a_supervisor_is_not_started(agent: NodeAgent, tmp_path: Path) -> None:
    code = tmp_path / "node" / "snapshots" / "abc"
    give_spec(agent, tmp_path, code_dir=str(code))
    start = SupervisorStart(path=FOLDER, sealed_env=Seal(TOKEN).close({"A": "secret"}))
    assert give(agent, starts=[start]).lacking == {FOLDER: "snapshots/abc"}
    other = SupervisorStart(path=FOLDER, sealed_env=Seal("another").close({}))
    assert "sealed with another token" in give(agent, starts=[other]).failures[FOLDER]
    code.mkdir(parents=True)
    give_spec(agent, tmp_path, code_dir=str(code), python="/nowhere/python")
    answer = give(agent, starts=[start])
    while answer.waiting:  # The interpreter is looked at aside.
        time.sleep(0.01)
        answer = give(agent, starts=[start])
    assert "/nowhere/python" in answer.failures[FOLDER]
    give_spec(agent, tmp_path, code_dir="/nowhere/code")
    assert "must be on every node" in give(agent, starts=[start]).failures[FOLDER]


def test_code_arrives_as_it_was(client: TestClient, tmp_path: Path) -> None:
    code = tmp_path / "code"
    (code / "sub").mkdir(parents=True)
    (code / "sub" / "a.py").write_text("print(1)")
    tar = node_link._tar_of(code)
    for path, digest, status in (
        ("snapshots/abc", "wrong", 422),
        ("jobs/abc", tree_digest(code), 422),
        ("snapshots/..", tree_digest(code), 422),
        ("snapshots/abc", tree_digest(code), 204),
        ("snapshots/abc", tree_digest(code), 204),
    ):
        answer = client.put(f"/code/{path}", content=tar, headers={"x-digest": digest})
        assert answer.status_code in (status, 404), (path, answer.text)
        assert answer.status_code != 404 or ".." in path
    assert (tmp_path / "node" / "snapshots" / "abc" / "sub" / "a.py").read_text() == "print(1)"
    assert [path.name for path in (tmp_path / "node" / "snapshots").iterdir()] == ["abc"]
    assert client.put("/code/snapshots/def", content=b"no tar", headers={"x-digest": "x"}).status_code == 422


def test_files_that_are_no_longer_needed_are_deleted(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_spec(agent, tmp_path)
    checkpoint = tmp_path / "shared" / HERE / "checkpoints" / "kept"
    (tmp_path / "node" / HERE / "checkpoints" / "kept").touch()
    for name in ("abc", "def"):
        (tmp_path / "node" / "snapshots" / name).mkdir(parents=True)
    other = asdict(spec(tmp_path, code_dir=str(tmp_path / "node" / "snapshots" / "def")))
    give(agent, (f"{FOLDER.replace('/job/', '/other/')}/spec.json", json.dumps(other).encode()))
    give(agent, discarded=[HERE])
    assert not (tmp_path / "node" / HERE).exists()
    assert checkpoint.exists()
    assert len(list((tmp_path / "node" / "snapshots").iterdir())) == 2, "the next run has probably the same code"
    monkeypatch.setattr(node_agent, "CODE_REST_S", -1.0)
    give_spec(agent, tmp_path)
    give(agent, discarded=[HERE])
    assert [path.name for path in (tmp_path / "node" / "snapshots").iterdir()] == ["def"]
    assert "not the folder of an incarnation" in give(agent, discarded=["engine"]).refused["engine"]


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_storage_that_is_not_the_same_is_told(client: TestClient, tmp_path: Path, scheme: str) -> None:
    storage = open_shared_storage(f"{scheme}{tmp_path}/shared")
    probe = StorageProbe(storage)
    asked = {"name": probe.name, "content": probe.content}
    assert client.post("/probe", json=asked).status_code == 204
    instance = client.get("/introduction").json()["instance"]
    probe.check_answer(instance)
    with pytest.raises(ValueError, match="does not arrive"):
        probe.check_answer(instance)
    probe.close()
    answer = client.post("/probe", json=asked)
    assert answer.status_code == 422
    assert "here is not the storage that the service has" in answer.text
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.parametrize("url", ["nonsense://bucket/x", "memory://x", "file://{folder}/a-file"])
def test_storage_that_cannot_be_used_is_told(tmp_path: Path, url: str) -> None:
    (tmp_path / "a-file").touch()
    url = url.format(folder=tmp_path)
    with pytest.raises(EngineError, match="cannot write to the shared storage"):
        open_cluster_engine(tmp_path / "state", url, ["http://127.0.0.1:9"], TOKEN, wait_s=0.5)


def test_times_are_converted() -> None:
    beat = FilePart(path="x", data=b'{"step": 3, "at_s": 100.0}')
    assert json.loads(with_time(beat, 40.0)) == {"step": 3, "at_s": 140.0}
    for damaged in (b"[1", b"[" * 100_000, b'{"at_s": 1' + b"0" * 400 + b"}", b'{"at_s": "x"}', b"[]", b"\xff"):
        assert with_time(FilePart(path="x", data=damaged), 40.0) == damaged


def open_link(root: Path, suspicion_s: float = 5.0) -> NodeLink:
    probe, nothing = StorageProbe(open_shared_storage(root / "shared")), lambda *_: None
    return NodeLink("x", "http://x", TOKEN, root, OwnEpoch(), probe, nothing, nothing, Arrivals(), suspicion_s)


def test_what_has_come_of_a_job_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, job = open_link(tmp_path), "jobs/job/i000001"
    folder, arrivals = f"{job}/supervisors/g000001-node0", link._arrivals
    (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(NodeLink, "node_ids", ("node0",))

    def change(*paths: str, supervisors: dict[str, str] | None = None) -> tuple[bool, bool]:
        """Return whether the states, and whether the reports, of the job have changed by an answer."""
        before, other = arrivals.of(job), arrivals.of("jobs/other/i000001")
        files = [FilePart(path=path, data=b"{}", offset=0 if "jsonl" in path else None) for path in paths]
        link._take(PullAnswer(instance="a", version=1, now_s=0.0, files=files, supervisors=supervisors or known))
        assert other == arrivals.of("jobs/other/i000001") or link.answers == 1
        after = arrivals.of(job)
        return before.states != after.states, before.reports != after.reports

    known = {folder: "alive"}
    assert change() == (True, True)  # From its first answer on, what a node does not tell of is not there.
    assert change() == (False, False)
    assert change(f"{job}/heartbeats/g000001-r000.json") == (False, False)
    assert change(f"{job}/reports/g000001-g000001-r000.jsonl") == (False, True)
    assert change(f"{folder}/status.json") == (True, False)
    assert change(f"{job}/supervisors/g000001.failed") == (True, False)
    assert change(supervisors={folder: "dead"}) == (True, False)
    assert change(supervisors={"jobs/another/i000001/supervisors/g000001-node0": "alive"}) == (True, False)


@pytest.mark.parametrize("refused", [False, True])
async def test_the_rest_of_a_long_file_follows_unless_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    link, job, sent = open_link(tmp_path), "jobs/job/i000001", list[bytes]()
    monkeypatch.setattr(NodeLink, "node_ids", ("node0",))
    monkeypatch.setattr(node_link, "PART_BYTES", 10)
    report = tmp_path / job / "reports/g000001-g000001-r001.jsonl"
    report.parent.mkdir(parents=True)
    report.write_bytes(bytes(range(25)))

    async def answer(_link: NodeLink, _path: str, body: str) -> bytes:
        (part,) = Push.model_validate_json(body).files
        sent.append(part.data)
        return PushAnswer(instance="", refused={part.path: "full"} if refused else {}).model_dump_json().encode()

    monkeypatch.setattr(NodeLink, "_post", answer)
    link.mark(job)
    while link._wanted.incarnations:
        await link._push()
    assert b"".join(sent) == bytes(range(10 if refused else 25))


async def test_renewed_leases_wait_for_the_turn_of_their_node_and_go_with_whatever_is_sent_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, sent = open_link(tmp_path, suspicion_s=20.0), asyncio.Queue[list[str]]()

    async def answer(_link: NodeLink, _path: str, body: str) -> bytes:
        push = Push.model_validate_json(body)
        sent.put_nowait([*push.renewed_jobs, *push.renewed, *push.discarded])
        return PushAnswer(instance="").model_dump_json().encode()

    async def next_push() -> list[str]:
        return await asyncio.wait_for(sent.get(), 5.0)

    monkeypatch.setattr(NodeLink, "_post", answer)
    link._loop, link._connected = asyncio.get_running_loop(), True
    assert 1.0 < link._turn_s < 10.0
    pushing = asyncio.ensure_future(link._push_for_ever())
    try:
        link.renew_job("first")
        assert await next_push() == ["first"]  # It may have waited for a new leader.
        link.renew_job("second")
        link.renew("folder")
        await asyncio.sleep(0.1)
        assert sent.empty()
        link.discard("gone")
        assert await next_push() == ["second", "folder", "gone"]
        link._turn_s = 0.05
        link.renew_job("third")
        assert await next_push() == ["third"]
        link._turn_s = 10.0
        link.renew_job("last")
        await asyncio.wait_for(link.flush(), 5.0)
        assert await next_push() == ["last"]
        assert link._turn is None
    finally:
        pushing.cancel()


def test_no_supervisor_counts_as_dead_while_an_answer_is_taken_that_tells_of_its_start_or_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, folder = open_link(tmp_path), "jobs/job/i000001/supervisors/g000001-node0"
    (tmp_path / folder).mkdir(parents=True)
    monkeypatch.setattr(NodeLink, "node_ids", ("node0",))
    write_whole, seen = job_folder.write_whole, list[SupervisorState]()

    def look(path: Path, data: bytes) -> None:
        write_whole(path, data)
        seen.append(link.state_of(folder))  # as the engine may, which reads the file that is there now

    monkeypatch.setattr(job_folder, "write_whole", look)
    status = FilePart(path=f"{folder}/status.json", data=b"{}")
    link._take(PullAnswer(instance="a", version=1, now_s=0.0, files=[status], supervisors={folder: "alive"}))
    link._take(PullAnswer(instance="a", version=2, now_s=0.0, files=[status], supervisors={folder: "dead"}))
    assert seen == [SupervisorState.ALIVE, SupervisorState.ALIVE]
    assert link.state_of(folder) is SupervisorState.DEAD


def test_the_better_comparison_of_clocks_counts(tmp_path: Path) -> None:
    link = open_link(tmp_path)
    link._compare_clocks(1000.0, 0.002, 960.001)
    assert link.offset_s == pytest.approx(40.0)
    link._compare_clocks(1000.0, 3.0, 962.9)  # It had waited for news.
    assert link.offset_s == pytest.approx(40.0)
    link._compare_clocks(1000.0, 3.0, 1002.0)  # Somebody has set a clock.
    assert link.offset_s == pytest.approx(0.95)
    for _ in range(8000):  # In calm times all trips are long: drift is found, and the wait is no part of it.
        link._compare_clocks(2000.0, 1.02, 2000.01)
    assert link.offset_s == pytest.approx(0.96)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"listen": "0.0.0.0:0"}, "--address"),
        ({"listen": "127.0.0.1"}, "no HOST:PORT"),
        ({"listen": "127.0.0.1:0", "slots": 0}, "at least 1 slot"),
        ({"listen": "127.0.0.1:0", "address": "203.0.113.9"}, "no network interface of this machine"),
        ({"listen": "127.0.0.1:0", "node_id": "a/b"}, "letters, digits"),
    ],
)
def test_bad_options_of_an_agent(
    tmp_path: Path,
    options: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_agent(AgentOptions(state_dir=tmp_path, shared_dir=tmp_path, **options), TOKEN) == 2
    assert message in capsys.readouterr().err


def test_an_agent_without_token_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ELASTICFLOW_NODE_TOKEN", raising=False)
    options = ["--folder", str(tmp_path), "--shared-dir", str(tmp_path), "--listen", "127.0.0.1:0"]
    found = CliRunner().invoke(app, ["node", *options])
    assert found.exit_code == 2
    assert "ELASTICFLOW_NODE_TOKEN" in found.output


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.0.0.2") == "lo"


def test_a_node_that_does_not_answer_at_the_start_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9 is not used"):
        open_cluster_engine(tmp_path / "state", tmp_path / "shared", ["http://127.0.0.1:9"], TOKEN, wait_s=0.5)
    with pytest.raises(EngineError, match="no nodes are configured"):
        open_cluster_engine(tmp_path / "state", tmp_path / "shared", [], TOKEN, wait_s=0.5)
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="cannot write to the shared storage"):
        open_cluster_engine(tmp_path / "state", tmp_path / "file", ["http://127.0.0.1:9"], TOKEN, wait_s=0.5)


def test_secrets_are_not_readable_on_the_way() -> None:
    sealed = Seal(TOKEN).close({"PASSWORD": "hunter2"})
    assert "hunter2" not in sealed
    assert Seal(TOKEN).open(sealed) == {"PASSWORD": "hunter2"}


def test_the_spec_of_a_job_without_requirements_is_one_that_earlier_agents_read(tmp_path: Path) -> None:
    folder = SupervisorFolder(tmp_path)
    folder.write_spec(spec(tmp_path))
    assert {"base_python", "requirements"}.isdisjoint(json.loads((tmp_path / "spec.json").read_text()))
    assert folder.read_spec() == spec(tmp_path)
    asked = spec(tmp_path, requirements=("numpy==2.1",), base_python="/usr/bin/python3")
    folder.write_spec(asked)
    assert folder.read_spec() == asked


def plan_of(members: int) -> bytes:
    found = [{"worker_id": f"g000001-r{n:03d}", "rank": n, "node_id": "n0", "slot_index": n} for n in range(members)]
    return json.dumps({"generation": 1, "mode": "restart", "members": found}).encode()


def test_signs_of_life_are_told_of_workers_that_have_others(agent: NodeAgent, tmp_path: Path) -> None:
    """Of one alone nobody compares them with anything, and each costs the service the writing of a file."""
    give_spec(agent, tmp_path)
    beat = agent.root / HERE / "heartbeats" / f"{WORKER}.json"
    beat.parent.mkdir(parents=True)
    beat.write_text('{"step": 1, "phase": "train", "at_s": 1.0}')
    assert f"heartbeats/{beat.name}" in paths(pull(agent)), "there is no plan yet"
    for members, is_told in ((1, False), (2, True), (1, False)):
        give(agent, (f"{HERE}/membership.json", plan_of(members)))
        beat.write_text(json.dumps({"step": members, "phase": "train", "at_s": time.time()}))
        assert (f"heartbeats/{beat.name}" in paths(pull(agent))) == is_told


def report_line(kind: str, **data: Any) -> bytes:
    return Report(kind=ReportKind(kind), generation=1, worker_id=WORKER, rank=0, step=3, data=data).to_line()


@pytest.mark.parametrize(
    ("name", "content", "is_urgent"),
    [
        (f"reports/g000001-{WORKER}.jsonl", report_line("progress", loss=1.0) + report_line("worker"), False),
        (f"reports/g000001-{WORKER}.jsonl", report_line("progress") + report_line("started"), True),
        (f"reports/g000001-{WORKER}.jsonl", report_line("progress", note='"kind":"started"'), False),
        (f"reports/g000001-{WORKER}.jsonl", b"what a script has written\n", True),
        (f"reports/g000001-{WORKER}.jsonl", b"x" * node_agent.PART_BYTES, True),
        (f"heartbeats/{WORKER}.json", b'{"step": 1, "phase": "train", "at_s": 1.0}', False),
        (f"logs/{WORKER}.log.0", b"epoch 1\n", False),
        ("supervisors/g000001.failed", b"{}", True),
        ("supervisors/g000001-n0/warm", b"", True),
        (f"rendezvous/{WORKER}.json", b"{}", True),
    ],
)
def test_what_nobody_waits_for_is_collected_for_a_moment(
    agent: NodeAgent, client: TestClient, tmp_path: Path, name: str, content: bytes, is_urgent: bool
) -> None:
    give_spec(agent, tmp_path)
    pull(agent)
    version = pull(agent).version
    path = agent.root / HERE / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    answer = pull(agent, version)
    assert paths(answer) == [name]
    assert agent.is_urgent(answer, version) == is_urgent
    asked = {"epoch": 1, "version": version, "wait_s": 0.2}  # It waits no longer than it is asked to.
    assert [file["path"] for file in client.post("/pull", json=asked).json()["files"]] == [f"{HERE}/{name}"]


def test_a_state_that_changes_is_told_at_once(agent: NodeAgent, tmp_path: Path) -> None:
    give_spec(agent, tmp_path)
    version = pull(agent).version
    SupervisorFolder(agent.root / FOLDER).write_status(Status())
    answer = pull(agent, version)
    assert agent.is_urgent(answer, version)
    assert not agent.is_urgent(pull(agent, answer.version), answer.version)


def test_where_workers_only_train_on_it_looks_for_changes_less_often(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [time.monotonic()]
    monkeypatch.setattr(node_agent.time, "monotonic", lambda: now_s[0])
    order = (f"{HERE}/membership.json", plan_of(2))
    of_others = [(f"{HERE}/heartbeats/w1.json", b"{}"), (f"{HERE}/reports/g000001-w1.jsonl", b"")]
    give_spec(agent, tmp_path)

    def later() -> float:
        now_s[0] += node_agent.CALM_AFTER_S + 1.0
        return agent.look_s

    assert agent.look_s == node_agent.LOOK_S
    assert later() == node_agent.CALM_LOOK_S
    give(agent, *of_others, renewed=[FOLDER])
    assert agent.look_s == node_agent.CALM_LOOK_S
    give(agent, order)
    assert agent.look_s == node_agent.LOOK_S
    assert later() == node_agent.CALM_LOOK_S
    give(agent, leaving_jobs=["job"])
    assert agent.look_s == node_agent.LOOK_S
    assert later() == node_agent.CALM_LOOK_S
    version = pull(agent).version
    SupervisorFolder(agent.root / FOLDER).write_status(Status())
    assert agent.is_urgent(pull(agent, version), version)
    assert agent.look_s == node_agent.LOOK_S


@pytest.mark.parametrize("kind", ["finished", "checkpoint"])
def test_a_change_that_somebody_waits_for_ends_the_calm_however_late_in_a_request_it_comes(
    agent: NodeAgent, client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """But not that a checkpoint was written, as some job does all the time."""
    give_spec(agent, tmp_path)
    reports = agent.root / HERE / "reports"
    reports.mkdir(parents=True)
    version, before_s = pull(agent).version, agent._stirred_s
    monkeypatch.setattr(node_agent, "CALM_AFTER_S", -1.0)
    report = reports / f"g000001-{WORKER}.jsonl"
    timer = threading.Timer(0.3, report.write_bytes, [report_line(kind)])
    timer.start()
    answer = client.post("/pull", json={"epoch": 1, "version": version, "wait_s": 1.0}).json()
    timer.join()
    assert [file["path"] for file in answer["files"]] == [f"{HERE}/reports/{report.name}"]
    assert (agent._stirred_s > before_s) == (kind == "finished")


@pytest.mark.parametrize("is_calm", [True, False])
def test_in_calm_times_what_nobody_waits_for_is_collected_as_long_as_the_service_waits(
    agent: NodeAgent, client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_calm: bool
) -> None:
    give_spec(agent, tmp_path)
    (agent.root / HERE / "reports").mkdir(parents=True)
    version = pull(agent).version
    monkeypatch.setattr(node_agent, "CALM_AFTER_S", -1.0 if is_calm else 1000.0)
    monkeypatch.setattr(node_agent, "CALM_LOOK_S", node_agent.LOOK_S)
    (agent.root / HERE / "reports" / f"g000001-{WORKER}.jsonl").write_bytes(report_line("progress"))
    begun_s = time.monotonic()
    answer = client.post("/pull", json={"epoch": 1, "version": version, "wait_s": 1.5}).json()
    assert len(answer["files"]) == 1
    assert (time.monotonic() - begun_s >= 1.5) == is_calm


def test_it_is_not_calm_while_there_is_more_to_tell_than_an_answer_holds(
    agent: NodeAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_spec(agent, tmp_path)
    monkeypatch.setattr(node_agent, "CALM_AFTER_S", -1.0)
    monkeypatch.setattr(node_agent, "ANSWER_BYTES", node_agent.PART_BYTES + 1)
    pull(agent)
    assert agent.is_calm
    (agent.root / HERE / "logs").mkdir(parents=True)
    log = agent.root / HERE / "logs" / f"{WORKER}.log.1"
    log.write_bytes(b"x" * (node_agent.PART_BYTES + 5))
    pull(agent)
    assert not agent.is_calm
    pull(agent, **{f"logs/{log.name}": node_agent.PART_BYTES})
    assert not agent.is_calm  # What it has just told may not be all, either.
    pull(agent, **{f"logs/{log.name}": node_agent.PART_BYTES + 5})
    assert agent.is_calm


@pytest.mark.parametrize(("suspicion_s", "wait_s"), [(5.0, 1.0), (60.0, 1.0), (1.0, 0.2)])
async def test_a_node_that_lives_answers_often_before_its_silence_is_suspicious(
    tmp_path: Path, suspicion_s: float, wait_s: float
) -> None:
    link = open_link(tmp_path, suspicion_s)
    asked: list[float] = []

    async def post(path: str, body: str) -> bytes:
        asked.append(json.loads(body)["wait_s"])
        raise asyncio.CancelledError

    link._connected, link.is_current, link._post = True, True, post  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        await link._pull_for_ever()
    assert asked == [pytest.approx(wait_s)]


def test_signs_of_life_go_on_while_workers_leave(agent: NodeAgent, tmp_path: Path) -> None:
    """The plan has one worker already, and the others may hang before they have left."""
    give_spec(agent, tmp_path)
    beats = agent.root / HERE / "heartbeats"
    beats.mkdir(parents=True)
    (beats / "g000001-r001.json").write_text('{"step": 1, "phase": "wait", "at_s": 1.0}')
    give(agent, (f"{HERE}/membership.json", plan_of(1)))
    (beats / f"{WORKER}.json").write_text('{"step": 1, "phase": "train", "at_s": 1.0}')
    assert f"heartbeats/{WORKER}.json" in paths(pull(agent))


async def test_refused_files_are_sent_again_by_one_timer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often the job is published meanwhile."""
    monkeypatch.setattr(node_link, "REFUSED_S", 0.05)
    monkeypatch.setattr(NodeLink, "node_ids", ("n0",))
    link = open_link(tmp_path)
    path = f"{HERE}/membership.json"
    (tmp_path / HERE).mkdir(parents=True)
    (tmp_path / path).write_bytes(plan_of(1))
    refusals, pushes = {path: "its disk is full"}, list[list[str]]()

    async def answer(_link: NodeLink, _path: str, body: str) -> bytes:
        pushes.append([file.path for file in Push.model_validate_json(body).files])
        return PushAnswer(instance="", refused=refusals).model_dump_json().encode()

    monkeypatch.setattr(NodeLink, "_post", answer)
    link._loop = asyncio.get_running_loop()
    for _ in range(3):
        link.mark(HERE)
        await link._push()
    assert pushes == [[path]] * 3
    await asyncio.sleep(0.2)
    assert link._wanted.incarnations == {HERE}, "once more, and not once for each refusal"
    refusals.clear()
    await link._push()
    await asyncio.sleep(0.1)
    await link._push()
    assert pushes[3:] == [[path]], "and then no more"
