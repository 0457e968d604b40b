"""A service with an empty folder takes over running gangs: what it asks of nodes, and what the former one may not do.

Real node agents behind real sockets; supervisors and workers are played by this process and by the files they write.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from support.leaders import FIRST_EPOCH, Leader, Lease
from support.node_agents import TOKEN

from elasticflow_airflow.engines.cluster import node_agent
from elasticflow_airflow.engines.cluster.agent_server import create_app
from elasticflow_airflow.engines.cluster.cluster_engine import open_cluster_engine
from elasticflow_airflow.engines.cluster.job_files import cluster_files
from elasticflow_airflow.engines.cluster.log_archive import StorageArchive
from elasticflow_airflow.engines.cluster.messages import FilePart, Pull, Push, Recall
from elasticflow_airflow.engines.cluster.node_agent import EarlierRequestError, NodeAgent
from elasticflow_airflow.engines.cluster.recall import Recalled, Taker
from elasticflow_airflow.engines.cluster.shared_storage import open_shared_storage
from elasticflow_airflow.engines.job_files import remove
from elasticflow_airflow.engines.local import detect_nodes
from elasticflow_airflow.engines.local.engine import TorchrunEngine
from elasticflow_airflow.engines.local.files.generation_folder import (
    Status,
    StopOrder,
    SupervisorFolder,
    SupervisorSpec,
    WorkerSpec,
    WorkerStatus,
)
from elasticflow_airflow.engines.local.files.records import FileRecords, GangRecord, JobRecord
from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.engines.port import EngineError, GangObservation, GangOutcome, GangState, SupersededError
from elasticflow_airflow.runtime.protocol import (
    Membership,
    Report,
    ReportKind,
    RescaleMode,
    SessionConfig,
    append_report,
    report_path,
)
from elasticflow_airflow.scheduler_core.model.values import Slot

HERE = "jobs/job/i000001"
SUSPICION_S = 1.0


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = 20.0) -> Any:
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"waited {limit_s} s in vain: {what}")


@dataclass
class Node:
    """A machine with an agent, which can be ended and started anew."""

    base: Path
    name: str
    port: int = 0
    is_old: bool = False
    """Its agent is of a release that knows no takeover."""
    agent: NodeAgent = field(init=False)
    server: uvicorn.Server | None = None
    thread: threading.Thread | None = None
    asked: list[str] = field(default_factory=list)
    """The paths of all requests."""
    pull_pause_s: float = 0.0
    """For so long it does not answer a pull."""

    @property
    def root(self) -> Path:
        return self.base / self.name

    @property
    def folder(self) -> Path:
        return self.root / HERE

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Node:
        (node,) = detect_nodes(slots=2, environ={"CUDA_VISIBLE_DEVICES": ""})
        self.agent = NodeAgent(
            self.root,
            self.base / "shared",
            [replace(node, node_id=self.name)],
            self.base / f"locks-{self.name}",
            {},
            TOKEN,
        )
        app = create_app(self.agent, TOKEN)
        if self.is_old:
            app.router.routes[:] = [route for route in app.routes if getattr(route, "path", "") != "/recall"]

        async def noting(scope: Any, receive: Any, send: Any) -> None:
            self.asked.append(scope.get("path", ""))
            if self.pull_pause_s and self.asked[-1] == "/pull":
                await asyncio.sleep(self.pull_pause_s)
            await app(scope, receive, send)

        config = uvicorn.Config(noting, port=self.port, log_level="error", lifespan="off")
        self.server = server = uvicorn.Server(config)
        self.thread = threading.Thread(target=server.run, daemon=True)
        self.thread.start()
        wait_until(lambda: server.started, "the agent listens")
        self.port = server.servers[0].sockets[0].getsockname()[1]
        return self

    def stop(self) -> None:
        if self.server is not None and self.thread is not None:
            self.server.should_exit = self.server.force_exit = True
            self.thread.join()
            self.agent.close()
            self.server = None

    def supervisor(self, generation: int = 1) -> SupervisorFolder:
        return SupervisorFolder.of(self.folder, generation, self.name)


@dataclass
class Cluster:
    base: Path
    lease: Lease
    nodes: list[Node]
    engines: list[TorchrunEngine] = field(default_factory=list)

    @contextmanager
    def led_by(self, leader: Leader) -> Iterator[TorchrunEngine]:
        engine = self.open(leader)
        try:
            yield engine
        finally:
            engine.close()

    def open(self, leader: Leader, **options: Any) -> TorchrunEngine:
        urls = [node.url for node in self.nodes]
        options = {"suspicion_s": SUSPICION_S, "wait_s": 10.0, **options}
        return open_cluster_engine(
            leader.root, self.base / "shared", urls, TOKEN, leadership=leader.leadership(), **options
        )

    def gang(self, generation: int = 1, **changes: Any) -> GangRecord:
        """A gang of a worker on each node."""
        values: dict[str, Any] = {
            "generation": generation,
            "incarnation": 1,
            "incarnation_dir": HERE,
            "placement": tuple(Slot(node.name, 0) for node in self.nodes),
            "plain": False,
            "grace_s": 5.0,
            "started": True,
            "chain": 1,
        }
        return GangRecord(**{**values, **changes})

    def record(self, *gangs: GangRecord, **changes: Any) -> None:
        """Put on record what a leader has put there."""
        job = JobRecord(
            job_id="job",
            latest=max((gang.generation for gang in gangs), default=1),
            incarnation_dirs={1: HERE},
            gangs={gang.generation: gang for gang in gangs},
            **changes,
        )
        FileRecords(self.base / "database").save("job", job.to_json(self.base))

    def lay(self, node: Node, gang: GangRecord, *, plan: Membership | None = None) -> None:
        """Lay down what is on a node while the gang trains there."""
        worker = gang.worker_id(self.nodes.index(node))
        session = SessionConfig(
            job_id="job", incarnation=1, incarnation_dir=str(node.folder), code_dir=f"{node.root}/snapshots/abc"
        )
        session.write()
        (plan or self.plan(gang)).write(node.folder)
        folder = node.supervisor(gang.generation)
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_spec(self.spec(node, gang, worker))
        folder.go.touch()
        folder.warm.touch()
        me = ProcessId.current()
        folder.write_status(Status(supervisor=me, workers={worker: WorkerStatus(rank=0, trainer=me)}))
        rank = self.nodes.index(node)
        said = Report(kind=ReportKind.STARTED, generation=gang.generation, worker_id=worker, rank=rank, step=0, data={})
        append_report(report_path(node.folder, gang.generation, worker), said)
        (node.folder / "heartbeats").mkdir(exist_ok=True)
        (node.folder / "heartbeats" / f"{worker}.json").write_text('{"step": 7, "phase": "step", "at_s": 5.0}')
        (node.folder / "logs").mkdir(exist_ok=True)
        (node.folder / "logs" / f"{worker}.log.000000000000").write_text(f"the log of {worker}\n")

    def plan(self, gang: GangRecord, **changes: Any) -> Membership:
        values: dict[str, Any] = {
            "generation": gang.generation,
            "mode": RescaleMode.IN_PLACE if gang.in_place else RescaleMode.RESTART,
            "members": gang.members,
        }
        return Membership(**{**values, **changes})

    def spec(self, node: Node, gang: GangRecord, worker: str) -> SupervisorSpec:
        one = WorkerSpec(worker_id=worker, rank=0, slot_index=0, lock_name="cpu-0", env={})
        return SupervisorSpec(
            job_id="job",
            incarnation=1,
            generation=gang.generation,
            chain=1,
            node_id=node.name,
            world_size=len(self.nodes),
            incarnation_dir=str(node.folder),
            state_dir=str(node.root),
            lock_dir=str(self.base / f"locks-{node.name}"),
            python=sys.executable,
            env={},
            workers=(one,),
            lease_s=600.0,
            grace_s=5.0,
            log_segment_bytes=1000,
            log_segments=2,
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    nodes = [Node(tmp_path, name).start() for name in ("n0", "n1")]
    yield Cluster(tmp_path, Lease(tmp_path), nodes)
    for node in nodes:
        node.stop()


def end(node: Node, gang: GangRecord, exit_code: int = 0) -> None:
    """The supervisor says that its workers, and itself, have ended."""
    status = node.supervisor(gang.generation).read_status()
    assert status is not None
    for worker in status.workers.values():
        worker.ended, worker.exit_code = True, exit_code
    node.supervisor(gang.generation).write_status(replace(status, ended=True))


def states(engine: TorchrunEngine) -> dict[int, GangObservation]:
    return {gang.generation: gang for gang in engine.observe()}


def test_the_first_look_of_a_new_leader_shows_what_runs(cluster: Cluster) -> None:
    gang = cluster.gang()
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
    leader = cluster.lease.elect()
    with cluster.led_by(leader) as engine:
        seen = states(engine)[1]
        assert seen.state is GangState.RUNNING
        assert sorted(report.worker_id for report in seen.reports) == ["g000001-r000", "g000001-r001"]
        assert [worker.exit_code for worker in seen.workers] == [None, None]
        beat = engine.files.heartbeat("job", 1, "g000001-r001")
        assert beat is not None
        assert beat.step == 7
        session = SessionConfig.read(leader.root / HERE / "session.json")
        assert session.incarnation_dir == str(leader.root / HERE)
        assert session.code_dir == str(leader.code_root / "snapshots" / "abc")
        log = wait_until(lambda: engine.read_log("job", 1, "g000001-r000", 0, 100).data, "its log arrives")
        assert log == b"the log of g000001-r000\n"
        engine.renew("job")
        wait_until(lambda: cluster.nodes[1].supervisor().lease.exists(), "it renews the leases")
        assert engine.inventory()[0].busy == {}
        assert states(engine)[1].reports == (), "everything is told once"
    for node in cluster.nodes:
        assert node.asked.index("/recall") < node.asked.index("/push")
        assert SessionConfig.read(node.folder / "session.json").incarnation_dir == str(node.folder)


@pytest.mark.parametrize("first", [0, 1])
def test_a_plan_that_had_reached_one_node_only_reaches_the_other(cluster: Cluster, first: int) -> None:
    """Whichever of them answers first."""
    before = cluster.gang()
    later = cluster.gang(2, ids=("g000001-r000", "g000001-r001"))
    cluster.record(before, later)
    for node in cluster.nodes:
        cluster.lay(node, before)
    there, other = cluster.nodes[first], cluster.nodes[1 - first]
    cluster.plan(later).write(there.folder)
    with cluster.led_by(cluster.lease.elect()) as engine:
        engine.renew("job")
        wait_until(lambda: Membership.read(other.folder) == cluster.plan(later), "the plan reaches the other node")
        assert Membership.read(there.folder) == cluster.plan(later)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_what_two_nodes_have_the_files_of_the_newer_plan_count(cluster: Cluster, order: tuple[int, int]) -> None:
    before, later = cluster.gang(), cluster.gang(2, ids=("g000001-r000", "g000001-r001"))
    older, newer = cluster.nodes
    for node, gang in ((older, before), (newer, later)):
        cluster.lay(node, before)
        cluster.plan(gang).write(node.folder)
        order_of = node.supervisor().path / "kill.json"
        order_of.write_text(json.dumps({"workers": [f"of {node.name}"]}))
    session = json.loads((newer.folder / "session.json").read_text())
    (newer.folder / "session.json").write_text(json.dumps({**session, "seed": 7}))
    root, said = cluster.base / "new", set[str]()
    for node in (cluster.nodes[index] for index in order):
        recalled = node.agent.recall(Recall(epoch=1))
        taker = Taker(
            root=root,
            code_root=root,
            facts=node.agent.introduce().facts,
            with_our_time=lambda beat: beat.data,
            complain=lambda path, _: said.add(path),
        )
        alien = FilePart(path=f"{HERE}/supervisors/g000001-elsewhere/go", data=b"")
        taken = taker.take(Recalled([*recalled.files, alien], recalled.copies))
        assert (f"{HERE}/membership.json" in taken) == (node is newer or order[0] == 0)
    assert Membership.read(root / HERE) == cluster.plan(later)
    assert SessionConfig.read(root / HERE / "session.json").seed == 7
    assert said == {alien.path}
    own = SupervisorFolder.of(root / HERE, 1, "n0")
    own.order_kill(["another"])
    taker_again = replace(taker, facts=older.agent.introduce().facts)
    taker_again.take(Recalled(older.agent.recall(Recall(epoch=1)).files))
    assert own.read_kills() == {"another", "of n0"}, "whoever was to be killed is"


def test_the_plan_of_a_supervisor_whose_lease_has_ended_is_kept(cluster: Cluster) -> None:
    gang = cluster.gang()
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
    nobody = cluster.plan(gang, members=(), reason="no service")
    nobody.write(cluster.nodes[1].folder)
    leader = cluster.lease.elect()
    with cluster.led_by(leader) as engine:
        engine.renew("job")
        wait_until(lambda: Membership.read(cluster.nodes[0].folder) == nobody, "nobody is brought back")
        assert Membership.read(leader.root / HERE) == nobody


def test_a_stop_of_which_one_node_has_not_heard_is_told_to_it(cluster: Cluster) -> None:
    gang = cluster.gang(told=True)
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
    order = StopOrder(5.0, "the former leader has said so")
    cluster.nodes[0].supervisor().write_order(order)
    cluster.plan(gang, members=()).write(cluster.nodes[0].folder)
    with cluster.led_by(cluster.lease.elect()) as engine:
        assert states(engine)[1].state is GangState.LEAVING
        engine.stop("job", 5.0, "the user wants it")
        wait_until(lambda: cluster.nodes[1].supervisor().has_order(), "the order arrives")
        plan = wait_until(lambda: Membership.read(cluster.nodes[1].folder), "a plan")
        assert plan.members == ()
        for node in cluster.nodes:
            end(node, gang)
        wait_until(lambda: states(engine)[1].outcome is GangOutcome.STOPPED, "it is over")


def test_a_node_that_is_silent_at_the_takeover_is_given_up_and_told_so_when_it_answers(cluster: Cluster) -> None:
    gang = cluster.gang(capable=True)
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
    silent = cluster.nodes[1]
    silent.stop()
    with cluster.led_by(cluster.lease.elect()) as engine:
        seen = wait_until(lambda: (g := states(engine)[1]).workers[1].exit_code and g, "it is given up")
        assert seen.workers[0].exit_code is None
        assert seen.state is not GangState.ENDED, "the other one trains on"
        assert [node.node_id for node in engine.inventory()] == ["n0"]
        silent.start()
        order = wait_until(
            lambda: (engine.observe(), silent.supervisor().has_order() and silent.supervisor().read_order())[1],
            "it is told to end what was given up",
        )
        assert order.kill
        assert states(engine)[1].workers[1].exit_code is not None, "it stays given up"
        assert silent.asked.index("/recall") < silent.asked.index("/push")


def test_a_gang_on_a_silent_node_alone_is_lost_after_the_suspicion_and_not_before(cluster: Cluster) -> None:
    gang = cluster.gang(placement=(Slot("n1", 0),))
    cluster.record(gang)
    cluster.nodes[1].stop()
    began_s = time.monotonic()
    with cluster.led_by(cluster.lease.elect()) as engine:
        seen = wait_until(lambda: (g := states(engine)[1]).state is GangState.ENDED and g, "it is lost")
        assert seen.outcome is GangOutcome.LOST
        assert time.monotonic() - began_s > SUSPICION_S


def test_an_agent_that_knows_no_takeover_is_named_and_neither_commanded_nor_given_up(cluster: Cluster) -> None:
    gang = cluster.gang(capable=True)
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
    old = cluster.nodes[1]
    old.stop()
    old.is_old = True
    old.start()
    with cluster.led_by(cluster.lease.elect()) as engine:
        end_s = time.monotonic() + 2 * SUSPICION_S
        while time.monotonic() < end_s:
            assert states(engine)[1].workers[1].exit_code is None
            engine.renew("job")
            time.sleep(0.05)
        assert "install the version of this package there" in " ".join(engine.problems())
        assert not {"/push", "/pull"} & set(old.asked)
        old.stop()
        old.is_old = False
        old.start()  # as it said
        wait_until(lambda: states(engine)[1].state is GangState.RUNNING, "both are there")


def test_a_former_leader_that_knows_sends_nothing_and_leaves_at_once(cluster: Cluster) -> None:
    gang = cluster.gang()
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
    engine = cluster.open(cluster.lease.elect())
    try:
        assert states(engine)[1].state is GangState.RUNNING
        cluster.lease.elect()
        engine.renew("job")  # What it has not sent yet.
        with pytest.raises(SupersededError):
            engine.observe()
        with pytest.raises(SupersededError):
            engine.stop("job", 1.0)
        wait_until(lambda: "another service leads" in " ".join(engine.problems() or _said(engine)), "it says why")
        for node in cluster.nodes:
            node.asked.clear()
        time.sleep(0.5)
        assert [node.asked for node in cluster.nodes] == [[], []]
    finally:
        began_s = time.monotonic()
        engine.close()
        took_s = time.monotonic() - began_s
    assert [node.asked for node in cluster.nodes] == [[], []]
    assert took_s < 1.5, "it does not wait for what may not be sent"
    assert not any(node.supervisor().has_order() for node in cluster.nodes)


def _said(engine: TorchrunEngine) -> list[str]:
    return [str(link.problem) for link in engine._machines._links]  # type: ignore[attr-defined]


def test_a_former_leader_that_was_asleep_is_refused_and_does_not_outbid(cluster: Cluster) -> None:
    gang = cluster.gang()
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
    former = cluster.lease.elect()
    former.knows = False
    old = cluster.open(former)
    try:
        assert states(old)[1].state is GangState.RUNNING
        with cluster.led_by(cluster.lease.elect()) as new:
            plan = cluster.plan(gang, members=(), reason="by the sleeper")
            plan.write(former.root / HERE)  # It was about to.
            SupervisorFolder.of(former.root / HERE, 1, "n0").write_order(StopOrder(0.0, "by the sleeper", kill=True))
            old.renew("job")
            wait_until(lambda: "taken over" in " ".join(_said(old)), "it is refused")
            cluster.nodes[0].stop()  # Its agent is started again: it remembers who leads.
            cluster.nodes[0].start()
            new.renew("job")
            with pytest.raises(EngineError, match="number 2 leads"):
                cluster.open(former, wait_s=0.5)  # Nor does it when it meets the nodes anew.
            wait_until(lambda: states(new)[1].state is GangState.RUNNING, "the new one goes on")
            for node in cluster.nodes:
                found = Membership.read(node.folder)
                assert found is not None
                assert found.members
                assert not node.supervisor().has_order()
                assert node.agent.introduce().epoch == FIRST_EPOCH + 2
            with pytest.raises(SupersededError):
                old.stop("job", 1.0)
    finally:
        old.close()


def test_a_leader_that_leads_again_begins_with_an_empty_folder(cluster: Cluster) -> None:
    """What it had written in its first leadership is never pushed."""
    gang = cluster.gang()
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
    with cluster.led_by(cluster.lease.elect()) as first:
        assert states(first)[1].state is GangState.RUNNING
    later = cluster.gang(2, ids=("g000001-r000", "g000001-r001"))
    leader = cluster.lease.elect()
    with cluster.led_by(leader) as second:
        assert states(second)[1].state is GangState.RUNNING
        cluster.record(gang, later)
        cluster.plan(later).write(leader.root / HERE)  # It changes the gang in place.
        second.renew("job")
        plans = [cluster.plan(later)] * 2
        wait_until(lambda: [Membership.read(node.folder) for node in cluster.nodes] == plans, "the plan arrives")
    with cluster.led_by(cluster.lease.elect()) as third:
        third.renew("job")
        time.sleep(0.3)
        assert [Membership.read(node.folder) for node in cluster.nodes] == plans
        assert third.latest("job") == 2


def test_what_a_worker_of_a_dead_node_has_said_is_known_from_the_others(cluster: Cluster) -> None:
    gang = cluster.gang(capable=True)
    cluster.record(gang)
    alive, dead = cluster.nodes
    cluster.lay(alive, gang)
    said = Report(kind=ReportKind.STARTED, generation=1, worker_id="g000001-r001", rank=1, step=3, data={})
    append_report(report_path(alive.folder, 1, "g000001-r001"), said)
    dead.stop()
    with cluster.led_by(cluster.lease.elect()) as engine:
        reports = states(engine)[1].reports
        assert {report.worker_id: report.step for report in reports} == {"g000001-r000": 0, "g000001-r001": 3}


def test_an_end_is_told_after_the_log(cluster: Cluster) -> None:
    gang = cluster.gang()
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
        end(node, gang, exit_code=3)
    with cluster.led_by(cluster.lease.elect()) as engine:
        seen = wait_until(lambda: (g := states(engine)[1]).state is GangState.ENDED and g, "it has ended")
        assert seen.outcome is GangOutcome.FAILED
        assert "the log of g000001-r000" in (seen.failure or "")
        assert engine.read_log("job", 1, "g000001-r001", 0, 100).data == b"the log of g000001-r001\n"


@pytest.mark.parametrize("ended", [False, True], ids=["trains", "has ended"])
@pytest.mark.parametrize("where", ["save", "_follow_up"])
def test_what_was_read_in_a_look_that_failed_is_told_by_the_next_one(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, ended: bool, where: str
) -> None:
    """Each report is told once: who counts them knows by their numbers which ones it has had from a leader before."""
    gang = cluster.gang()
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
    node = cluster.nodes[0]
    for step in range(1, 4):
        kind, data = (ReportKind.STARTED, {"in_place": True}) if step == 1 else (ReportKind.PROGRESS, {})
        said = Report(kind=kind, generation=1, worker_id="g000001-r000", rank=0, step=step, data=data)
        append_report(report_path(node.folder, 1, "g000001-r000"), said)
    if ended:
        for node in cluster.nodes:
            end(node, gang, exit_code=3)
    place = FileRecords if where == "save" else TorchrunEngine
    original, failures = getattr(place, where), iter(range(2))

    def fail_at_first(*given: Any) -> Any:
        if next(failures, None) is not None:
            raise EngineError("the records cannot be written in the database")
        return original(*given)

    with cluster.led_by(cluster.lease.elect()) as engine:
        monkeypatch.setattr(place, where, fail_at_first)
        told: list[Report] = []
        refused = 0

        def all_told() -> bool:
            nonlocal refused
            try:
                told.extend(states(engine)[1].reports)
            except EngineError:
                refused += 1
            return len(told) >= 5

        wait_until(all_told, "all five reports")
        for _ in range(3):
            assert states(engine)[1].reports == ()
    assert refused == 2
    assert [report.step for report in told if report.worker_id == "g000001-r000"] == [0, 1, 2, 3]


def test_damaged_files_of_one_job_do_not_stop_the_takeover(cluster: Cluster) -> None:
    gang = cluster.gang()
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
    for name in ("session.json", "membership.json", "supervisors/g000001-n0/kill.json"):
        (cluster.nodes[0].folder / name).write_bytes(b"[" * 100_000)
    with cluster.led_by(cluster.lease.elect()) as engine:
        assert states(engine)[1].state is GangState.RUNNING


def test_many_incarnations_come_in_several_answers(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_agent, "ANSWER_BYTES", 100)
    gang = cluster.gang()
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
        for job in ("another", "third"):
            folder = SupervisorFolder.of(node.root / "jobs" / job / "i000001", 1, node.name)
            folder.path.mkdir(parents=True)
            folder.write_spec(cluster.spec(node, gang, "g000001-r000"))
    leader = cluster.lease.elect()
    with cluster.led_by(leader) as engine:
        assert states(engine)[1].state is GangState.RUNNING
        assert (leader.root / "jobs/third/i000001/supervisors/g000001-n0/spec.json").exists()
    assert cluster.nodes[0].asked.count("/recall") >= 3


# The agent's number of who leads.


def test_an_agent_remembers_who_leads(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    node.agent.recall(Recall(epoch=7))
    node.stop()
    node.start()
    assert node.agent.introduce().epoch == 7
    for ask in (lambda: node.agent.push(Push(epoch=6, number=1)), lambda: node.agent.pull(Pull(epoch=6, version=0))):
        with pytest.raises(EarlierRequestError, match="taken over"):
            ask()
    (node.root / "epoch").write_text("seven")
    node.stop()
    with pytest.raises(ValueError, match="does not hold the number of a service"):
        node.start()


def test_nothing_is_done_for_a_leader_that_cannot_be_remembered(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = cluster.nodes[0].agent

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(node_agent, "write_atomic", full)
        for ask in (lambda: agent.push(Push(epoch=7, number=1)), lambda: agent.recall(Recall(epoch=7))):
            with pytest.raises(OSError, match="the disk is full"):
                ask()
        assert agent.pull(Pull(epoch=7, version=0)).holders, "but it is heard"
    agent.push(Push(epoch=7, number=1))
    assert (cluster.nodes[0].root / "epoch").read_text() == "7\n"


# Logs of jobs that are over.


def test_a_node_whose_agent_is_exchanged_stays_in_the_inventory(cluster: Cluster) -> None:
    """It was not silent for long; what it had is not looked for elsewhere before the new agent tells of it."""
    gang = cluster.gang()
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
    engine, exchanged = cluster.open(cluster.lease.elect(), suspicion_s=30.0), cluster.nodes[0]
    try:
        assert states(engine)[1].state is GangState.RUNNING
        exchanged.stop()
        exchanged.pull_pause_s = 0.5
        exchanged.asked.clear()
        exchanged.start()

        def new_one_is_heard() -> bool:
            assert [node.node_id for node in engine.inventory()] == [node.name for node in cluster.nodes]
            return exchanged.asked.count("/pull") > 1

        wait_until(new_one_is_heard, "the new agent has answered")
        assert states(engine)[1].state is GangState.RUNNING
    finally:
        engine.close()


def test_the_log_of_a_job_that_is_over_is_read_by_the_next_leader(cluster: Cluster) -> None:
    gang = cluster.gang()
    cluster.record(gang)
    for node in cluster.nodes:
        cluster.lay(node, gang)
        end(node, gang, exit_code=1)
    with cluster.led_by(cluster.lease.elect()) as first:
        wait_until(lambda: states(first)[1].state is GangState.ENDED, "it has ended")
        first.forget("job")
        wait_until(lambda: (first.observe(), _archived(cluster))[1] == [1], "its logs are kept")
    shared = cluster.base / "shared" / HERE / "logs"
    assert sorted(path.name for path in shared.iterdir()) == [f"g000001-r00{rank}.log.000000000000" for rank in (0, 1)]
    for node in cluster.nodes:
        node.stop()
        remove(node.folder)  # The nodes have cleaned up.
        node.start()
    with cluster.led_by(cluster.lease.elect()) as second:
        found = second.read_log("job", 1, "g000001-r001", 4, 100)
        assert (found.data, found.end_of_file) == (b"log of g000001-r001\n", True)
        for name in ("g000001-r007", "../x"):
            with pytest.raises(KeyError):
                second.read_log("job", 1, name, 0, 100)
        second.files.discard("job", 1)
        wait_until(lambda: not list(shared.iterdir()), "they are removed with the job's files")


def _archived(cluster: Cluster) -> list[int]:
    return FileRecords(cluster.base / "database").load()[0]["job"].get("archived", [])  # type: ignore[no-any-return]


def test_logs_that_the_former_leader_had_no_time_to_keep_are_kept_by_the_next(cluster: Cluster) -> None:
    gang = cluster.gang()
    cluster.record()  # It was forgotten.
    for node in cluster.nodes:
        cluster.lay(node, gang)
        end(node, gang)
    with cluster.led_by(cluster.lease.elect()) as engine:
        wait_until(lambda: (engine.observe(), _archived(cluster))[1] == [1], "its logs are kept")
    assert len(list((cluster.base / "shared" / HERE / "logs").iterdir())) == 2


def test_logs_that_were_kept_and_not_noted_are_found(cluster: Cluster) -> None:
    """The former leader died in between, and no node has anything of the job any more."""
    cluster.record()
    log = cluster.base / "shared" / HERE / "logs" / "g000001-r000.log.000000000000"
    log.parent.mkdir(parents=True)
    log.write_text("said")
    with cluster.led_by(cluster.lease.elect()) as engine:
        wait_until(lambda: (engine.observe(), _archived(cluster))[1] == [1], "it is noted")
        assert engine.read_log("job", 1, "g000001-r000", 0, 100).data == b"said"


def test_logs_that_only_a_service_without_others_has_are_kept(cluster: Cluster) -> None:
    """It had no others beside it when the job ended, and nodes have cleaned up since."""
    cluster.record()
    leader = cluster.lease.elect()
    logs = leader.code_root / HERE / "logs"
    logs.mkdir(parents=True)
    for rank in (0, 1):
        (logs / f"g000001-r00{rank}.log.000000000000").write_text("said")
    kept = cluster.base / "shared" / HERE / "logs" / "g000001-r001.log.000000000000"
    kept.parent.mkdir(parents=True)
    kept.write_text("said, and more")  # By a node that had it then.
    with cluster.led_by(leader) as engine:
        wait_until(lambda: (engine.observe(), _archived(cluster))[1] == [1], "its logs are kept")
        assert engine.read_log("job", 1, "g000001-r000", 0, 100).data == b"said"
    remove(logs)
    with cluster.led_by(cluster.lease.elect()) as engine:
        assert engine.read_log("job", 1, "g000001-r000", 0, 100).data == b"said"
        assert engine.read_log("job", 1, "g000001-r001", 0, 100).data == b"said, and more"


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_logs_are_kept_once_the_storage_is_there(tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elasticflow_airflow.engines.cluster.log_archive.AGAIN_S", 0.05)
    root = tmp_path / "root"
    folder = SupervisorFolder.of(root / HERE, 1, "n0")
    folder.path.mkdir(parents=True)
    folder.write_status(Status(ended=True))
    (root / HERE / "logs").mkdir()
    (root / HERE / "logs" / "w.log.000000000000").write_text("said")
    (root / HERE / "logs" / "w.log.000000000004").symlink_to("/etc/passwd")  # by a script
    (root / HERE / "logs" / "private.txt").write_text("of the script")
    storage = open_shared_storage(f"{scheme}{tmp_path}/shared")
    (tmp_path / "shared").write_text("something is in the way")
    archive = StorageArchive(root, storage)
    archive.keep(root / HERE)
    time.sleep(0.3)
    assert archive.kept() == []
    (tmp_path / "shared").unlink()
    assert wait_until(archive.kept, "the logs are kept") == [root / HERE]
    archive.keep(root / HERE)
    wait_until(archive.kept, "again")
    assert [path.name for path in (tmp_path / "shared" / HERE / "logs").iterdir()] == ["w.log.000000000000"]
    archive.close()
    other = StorageArchive(tmp_path / "other", storage)
    other.fetch(tmp_path / "other" / HERE, "w")
    assert (tmp_path / "other" / HERE / "logs" / "w.log.000000000000").read_text() == "said"
    other.remove(tmp_path / "other" / HERE)
    wait_until(lambda: not list((tmp_path / "shared" / HERE / "logs").iterdir()), "they are removed")
    other.close()


# Records and folders.


def test_a_record_is_read_with_another_folder_and_one_of_the_release_before_as_it_is(tmp_path: Path) -> None:
    gang = GangRecord(
        generation=1,
        incarnation=1,
        incarnation_dir=str(tmp_path / "a" / HERE),
        placement=(Slot("n0", 0),),
        plain=False,
        grace_s=1.0,
    )
    job = JobRecord(job_id="job", latest=1, incarnation_dirs={1: str(tmp_path / "a" / HERE)}, gangs={1: gang})
    raw = json.loads(json.dumps(job.to_json(tmp_path / "a")))
    assert str(tmp_path) not in json.dumps(raw)
    there = JobRecord.from_json(raw, tmp_path / "b")
    assert there.incarnation_dirs == {1: str(tmp_path / "b" / HERE)}
    assert there.gangs[1].incarnation_dir == str(tmp_path / "b" / HERE)
    assert JobRecord.from_json(raw, tmp_path / "a") == job
    before = {**raw, "incarnation_dirs": {"1": gang.incarnation_dir}, "gangs": [asdict(gang)]}
    assert JobRecord.from_json(json.loads(json.dumps(before)), tmp_path / "a") == job


def test_a_service_that_gets_others_beside_it_takes_its_own_records_along_once(cluster: Cluster) -> None:
    gang = cluster.gang()
    for node in cluster.nodes:
        cluster.lay(node, gang)
    first, second = cluster.lease.elect(), Leader(cluster.lease, 2)
    for one, job_id in ((first, "job"), (second, "ancient")):
        here = replace(gang, incarnation_dir=str(one.code_root / HERE))
        job = JobRecord(job_id=job_id, latest=1, incarnation_dirs={1: here.incarnation_dir}, gangs={1: here})
        FileRecords(one.code_root).save(job_id, job.to_json(Path("/")) | {"gangs": [asdict(here)]})
    with cluster.led_by(first) as engine:
        assert states(engine)[1].state is GangState.RUNNING
    cluster.lease.elect()
    with cluster.led_by(second) as engine:
        assert [(seen.job_id, seen.state) for seen in engine.observe()] == [("job", GangState.RUNNING)]


def test_checkpoints_are_found_from_an_empty_folder(tmp_path: Path) -> None:
    class NoNodes:
        def discard(self, folder: Path) -> None: ...

    storage = open_shared_storage(tmp_path / "shared")
    name = "g000001/step-000000000005"
    (tmp_path / "shared" / HERE / "checkpoints" / name).mkdir(parents=True)
    files = cluster_files(tmp_path / "new", storage, NoNodes())  # type: ignore[arg-type]
    assert files.candidates("job", 1, 1) == [name]
    assert files.is_checkpoint(files.checkpoint("job", 1, name))
    assert files.exists("job", 1)
    assert not files.exists("job", 2)
    files.delete("job", 1, name)
    assert files.candidates("job", 1, 1) == []
