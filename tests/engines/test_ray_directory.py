"""What the service makes of its Ray client's words, with a client that says what the test wants."""

from __future__ import annotations

import io
import json
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from pydantic import SecretStr

from elasticflow_airflow.engines.cluster.agent_server import AgentOptions
from elasticflow_airflow.engines.cluster.cluster_nodes import OwnEpoch
from elasticflow_airflow.engines.local.files.records import FileRecords
from elasticflow_airflow.engines.port import EngineError, Fencing, SupersededError
from elasticflow_airflow.engines.ray import agent_process, node_actor, ray_directory, ray_engine
from elasticflow_airflow.engines.ray.messages import AgentSettings, ClientSettings, ClusterView, WantedNodes
from elasticflow_airflow.engines.ray.node_actor import NodeActor
from elasticflow_airflow.engines.ray.ray_directory import RayDirectory
from elasticflow_airflow.service.engine_choice import open_engine
from elasticflow_airflow.service.settings import ServiceSettings

TOKEN = "a-token-of-the-tests"


def settings(tmp_path: Path, **changes: object) -> ClientSettings:
    agent = AgentSettings(token=SecretStr(TOKEN), folder=tmp_path, namespace="n", shared_dir=str(tmp_path / "s"))
    return ClientSettings(
        address="10.0.0.1:6379",
        slots=None,
        allow_insecure=False,
        agent=agent.model_copy(update=changes),
    )


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the client say lines, and then wait until it is told to leave, or end."""
    monkeypatch.setattr(ray_directory, "_AGAIN_S", 0.05)

    def have_said(*lines: str, then: str = "cat >/dev/null") -> None:
        words = "\n".join(f"echo '{line}'" for line in lines)
        client = tmp_path / "client"
        began = f'read given; echo x >>{tmp_path}/started; printf %s "$given" >{tmp_path}/given'
        client.write_text(f"#!/bin/sh\n{began}\n{words}\n{then}\n")
        client.chmod(0o755)
        monkeypatch.setattr(ray_directory.sys, "executable", str(client))

    return have_said


@pytest.fixture
def follow(tmp_path: Path) -> Iterator[Callable[[], tuple[RayDirectory, list[Mapping[str, str]]]]]:
    made: list[RayDirectory] = []

    def begin(leads: Fencing | None = None) -> tuple[RayDirectory, list[Mapping[str, str]]]:
        moves: list[Mapping[str, str]] = []
        records, fencing = FileRecords(tmp_path), leads or OwnEpoch()
        made.append(RayDirectory(settings(tmp_path), tmp_path, records, moves.append, fencing))
        return made[-1], moves

    yield begin
    for one in made:
        one.close()


def view(**fields: object) -> str:
    return ClusterView.model_validate(fields).model_dump_json()


def wait_until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_what_is_wanted_is_said_to_each_client(tmp_path, say, follow) -> None:
    heard = tmp_path / "heard"
    say(
        view(nodes={"n0": "http://a"}),
        then=f"while read line; do echo $line >>{heard}; [ -e {tmp_path}/die ] && exit; done",
    )
    directory, _ = follow()
    directory.wait(20.0)
    first, second = WantedNodes(count=3), WantedNodes(count=2, released=frozenset({"n1"}))

    def words() -> list[WantedNodes]:
        lines = heard.read_text().splitlines() if heard.exists() else []
        return [WantedNodes.model_validate_json(line) for line in lines if line]

    for one in (first, first):
        directory.want(one)
    wait_until(lambda: words() == [first])
    (tmp_path / "die").touch()
    directory.want(second)
    wait_until(lambda: len(words()) >= 3)  # The next client hears it, too.
    assert words()[:3] == [first, second, second]


def test_the_last_addresses_are_known_to_a_service_that_starts_while_ray_is_away(tmp_path, say, follow) -> None:
    both = {"n0": "http://a", "n1": "http://b"}
    say(view(nodes={}), view(nodes={"n0": "http://a"}), view(nodes=both, draining={"n1": 5.0}))
    directory, moves = follow()
    directory.wait(20.0)
    wait_until(lambda: directory.draining == {"n1": 5.0} and len(moves) == 2)
    assert moves == [{"n0": "http://a"}, both]
    directory.close()
    away = view(is_usable=False, problems=["Ray cannot be used: it is away"])
    say(away, then="exit 1")
    directory, moves = follow()
    assert moves == [both]
    wait_until(lambda: directory.problems == ["Ray cannot be used: it is away"])
    assert moves == [both], "nothing is known to have changed"


def test_a_service_that_does_not_lead_lets_its_client_leave_and_starts_none(tmp_path, say, follow, monkeypatch) -> None:
    monkeypatch.setattr(ray_directory, "_ASSURE_S", 0.05)
    say(view(nodes={"n0": "http://a"}), then=f"while read line; do echo x >>{tmp_path}/beats; done")
    started, beats = tmp_path / "started", tmp_path / "beats"

    class Lease(OwnEpoch):
        leads = True

        def epoch(self) -> int:
            if not self.leads:
                raise SupersededError("another service leads")
            return super().epoch()

    lease = Lease()
    directory, _ = follow(lease)
    wait_until(lambda: beats.exists() and len(beats.read_text().split()) > 3)
    lease.leads = False
    time.sleep(0.2)
    before = beats.read_text()
    time.sleep(0.3)
    assert beats.read_text() == before, "it hears no more, and leaves after a while"
    assert directory._client is not None
    directory._client.kill()
    time.sleep(0.3)
    assert started.read_text().split() == ["x"]
    lease.leads = True
    wait_until(lambda: len(started.read_text().split()) == 2)


def test_a_client_leaves_when_its_service_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_client = pytest.importorskip("elasticflow_airflow.engines.ray.ray_client", reason="needs Ray")
    left: list[int] = []
    service = ray_client.Listener()
    monkeypatch.setattr(ray_client, "SILENCE_S", 0.2)
    service.listen([b'{"count": 3}\n', b"\n"], left.append)
    assert (service.wanted, service.is_silent, left) == (WantedNodes(count=3), False, [0])
    wait_until(lambda: service.is_silent)
    service.listen([b"\n"], left.append)
    assert not service.is_silent


def test_a_client_that_ends_is_started_again_and_what_nobody_understands_is_passed_over(tmp_path, say, follow) -> None:
    say("Traceback", '{"nodes": 3}', view(nodes={"n0": "http://a"}), then="exit 3")
    _, moves = follow()
    wait_until(lambda: (tmp_path / "started").exists() and len((tmp_path / "started").read_text().split()) >= 3)
    assert moves == [{"n0": "http://a"}]


def test_secrets_reach_the_client_by_its_standard_input_only(tmp_path, say, follow) -> None:
    say(view(nodes={"n0": "http://a"}))
    directory, _ = follow()
    directory.wait(20.0)
    assert json.loads((tmp_path / "given").read_text())["agent"]["token"] == TOKEN
    assert TOKEN not in repr(settings(tmp_path))
    assert TOKEN not in (tmp_path / "ray-nodes.json").read_text()
    assert stat.S_IMODE((tmp_path / "ray-nodes.json").stat().st_mode) == 0o600


def test_a_client_that_does_not_leave_does_not_keep_the_service(tmp_path, say, follow, monkeypatch) -> None:
    monkeypatch.setattr(ray_directory, "_LEAVE_LIMIT_S", 0.3)
    say(view(nodes={"n0": "http://a"}), then="exec sleep 600")
    directory, _ = follow()
    directory.wait(20.0)
    begun_s = time.monotonic()
    directory.close()
    assert time.monotonic() - begun_s < 10.0


def test_only_the_same_settings_have_the_same_fingerprint(tmp_path) -> None:
    same = settings(tmp_path).agent.fingerprint
    assert settings(tmp_path).agent.fingerprint == same
    others = [
        {"token": SecretStr("b")},
        {"slots": 3},
        {"reserved": True},
        {"version": "0"},
        {"shared_dir": str(tmp_path)},
    ]
    assert len({same, *(settings(tmp_path, **other).agent.fingerprint for other in others)}) == 1 + len(others)


def test_one_service_at_a_time_uses_a_node(tmp_path, monkeypatch) -> None:
    actor, clock = NodeActor(), [1000.0]
    monkeypatch.setattr(node_actor.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(NodeActor, "_start", lambda *_: "http://there")
    first = settings(tmp_path, owner="on a in /x").agent.model_dump_json()
    second = settings(tmp_path, owner="on b in /y").agent.model_dump_json()
    assert actor.ensure_agent(first) == "http://there"
    clock[0] += 20.0
    with pytest.raises(RuntimeError, match=r"it is used by the service on a in /x: .*ELASTICFLOW_RAY_NAMESPACE"):
        actor.ensure_agent(second)
    clock[0] += 20.0
    assert actor.ensure_agent(second) == "http://there", "the first has ended"


def test_a_folder_that_somebody_else_may_have_made_is_not_used(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(node_actor, "Path", lambda text: tmp_path / Path(text).name)
    found = node_actor._own_folder()
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    found.chmod(0o777)
    with pytest.raises(RuntimeError, match="ELASTICFLOW_NODE_FOLDER"):
        node_actor._own_folder()
    found.rmdir()
    found.symlink_to(tmp_path)
    with pytest.raises(RuntimeError, match="belongs to somebody else"):
        node_actor._own_folder()


def test_what_is_missing_is_named(tmp_path, monkeypatch) -> None:
    with pytest.raises(EngineError, match=r"ENGINE=ray needs ELASTICFLOW_SHARED_DIR, ELASTICFLOW_NODE_TOKEN or"):
        open_engine(ServiceSettings(state_dir=tmp_path, engine="ray"))
    monkeypatch.setattr(ray_engine.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(EngineError, match=r"pip install 'elasticflow-airflow\[ray\]'"):
        open_engine(ServiceSettings(state_dir=tmp_path, engine="ray", shared_dir=tmp_path / "s", node_token="t"))


def test_without_a_node_it_says_why(tmp_path, say) -> None:
    say(view(is_usable=False, problems=["Ray at 10.0.0.1:6379 cannot be used: nobody answers"]), then="exit 1")
    with pytest.raises(EngineError, match="cannot be used: nobody answers"):
        ray_engine.open_ray_engine(tmp_path / "state", settings(tmp_path), wait_s=20.0)


def test_who_finds_a_closed_port_does_not_ask_there_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray_client = pytest.importorskip("elasticflow_airflow.engines.ray.ray_client", reason="needs Ray")
    asked: list[str] = []
    monkeypatch.setattr(ray_client, "GcsClient", lambda address: asked.append(address))
    with pytest.raises(ConnectionRefusedError) as refused:
        ray_client._knock("127.0.0.1:9")
    assert "Connection refused" in ray_client._reason(refused.value, "127.0.0.1:9")
    assert "no instance" in ray_client._reason(ConnectionError("no instance"), "auto")
    assert not asked


def test_what_the_service_says_of_its_agents_reaches_them(tmp_path, monkeypatch) -> None:
    started: list[AgentOptions] = []
    monkeypatch.setattr(agent_process, "run_agent", lambda options, _: started.append(options) or 0)
    for name in ("fork", "setsid", "closerange"):
        monkeypatch.setattr(agent_process.os, name, lambda *_: 0)
    given = {"notice_file": tmp_path / "leaving", "slots": 3, "node_id": "a", "slot_lock_dir": tmp_path / "locks"}
    agent = settings(tmp_path, **given).agent
    monkeypatch.setattr(agent_process.sys, "stdin", io.TextIOWrapper(io.BytesIO(agent.model_dump_json().encode())))
    assert agent_process.main([str(tmp_path), "10.0.0.2"]) == 0
    (options,) = started
    assert {name: getattr(options, name) for name in given} == given
    assert (options.shared_dir, options.listen) == (str(tmp_path / "s"), "10.0.0.2:0")


def test_the_settings_of_agents_are_the_services(tmp_path, monkeypatch) -> None:
    opened: list[ClientSettings] = []
    monkeypatch.setattr(ray_engine, "open_ray_engine", lambda _, client, **__: opened.append(client))
    given = {"node_notice_file": tmp_path / "leaving", "node_folder": tmp_path / "f", "node_port": 7}
    shared = "s3://bucket/folder"
    open_engine(ServiceSettings(state_dir=tmp_path, engine="ray", shared_dir=shared, node_token="t", **given))
    agent = opened[0].agent
    assert (agent.notice_file, agent.folder, agent.port, agent.shared_dir) == (*given.values(), shared)
