"""Benches on which the engine contract is tried: the fake engine in modelled time, the local one with real torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr
from support.leaders import Leader, Lease
from support.machines import Machines, need_namespaces
from support.node_agents import TOKEN, start_agent
from support.shared_pool import SharedPool, shared_pool

from elasticflow_airflow.engines.cluster.agent_card import AgentCard
from elasticflow_airflow.engines.cluster.cluster_engine import open_cluster_engine
from elasticflow_airflow.engines.fake.engine import FakeBehaviour, FakeEngine, fake_nodes
from elasticflow_airflow.engines.local import LocalEngine, detect_nodes
from elasticflow_airflow.engines.local.engine import TorchrunEngine
from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder
from elasticflow_airflow.engines.local.machine.layout import NodeLayout
from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.engines.port import Engine, GangObservation, GangSpec, GangState
from elasticflow_airflow.engines.ray.messages import AgentSettings, ClientSettings
from elasticflow_airflow.engines.ray.ray_engine import open_ray_engine
from elasticflow_airflow.runtime.protocol import Report, SessionConfig
from elasticflow_airflow.scheduler_core.model.values import Slot

ELSEWHERE = "127.0.0.2"
"""The address of the second of the two nodes; that of the first is 127.0.0.1."""
AGENTS = ("cli.main import main", "support.shared_pool", "engines.ray.agent_process")
"""In the command lines of agents: one started by users, one of a test with a pool, one on a Ray cluster."""
TRAIN = """
import importlib.metadata, os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from elasticflow_airflow.runtime.protocol import (
    GENERATION_ENV, SESSION_ENV, WORKER_ENV, Membership, Report, ReportKind, SessionConfig, append_report, report_path)

session = SessionConfig.read(Path(os.environ[SESSION_ENV]))
worker, generation = os.environ[WORKER_ENV], int(os.environ[GENERATION_ENV])
folder = Path(session.incarnation_dir)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

def say(kind, step, **data):
    report = Report(kind=kind, generation=generation, worker_id=worker, rank=rank, step=step, data=data)
    append_report(report_path(folder, generation, worker), report)

saved = session.checkpoint_dir / "saved-step"
saved.parent.mkdir(exist_ok=True)
step = int(saved.read_text()) if saved.exists() else 0
say(ReportKind.STARTED, step)
print("training from step", step, "with", world, "workers", flush=True)
print(*(f"{one.name} {one.version}" for one in importlib.metadata.distributions(name="extra_package")), flush=True)
while step < session.steps:
    leaving = Membership.read(folder).rank_of(worker) is None
    votes = torch.tensor([1.0, float(leaving)])
    dist.all_reduce(votes)
    assert votes[0] == world
    step += 1
    time.sleep(0.02)
    if rank == 0 and step % 5 == 0:
        say(ReportKind.PROGRESS, step)
        print("step", step, flush=True)
    if votes[1] > 0:
        if rank == 0:
            saved.write_text(str(step))
        say(ReportKind.STOPPED, step)
        sys.exit(0)
if rank == 0:
    say(ReportKind.FINISHED, step)
"""


def wait_until(condition: Callable[[], Any], what: str, limit_s: float = 60.0) -> Any:
    """Wait for something to be true; fails the test after a limit."""
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"waited {limit_s} s in vain: {what}")


def processes_of(state_dir: Path) -> list[str]:
    """Command lines of all processes that belong to a state directory: by arguments, environment, or where they are."""
    needle = str(state_dir).encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            command = Path(f"/proc/{name}/cmdline").read_bytes()
            environ = Path(f"/proc/{name}/environ").read_bytes()
            folder = os.fsencode(os.readlink(f"/proc/{name}/cwd"))
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
        if needle in command or needle in environ or needle in folder:
            found.append(f"{name}: {command.replace(bytes(1), b' ').decode(errors='replace')}")
    return found


@dataclass(kw_only=True)
class Bench:
    """An engine, a way to let time pass, and ways to do harm."""

    engine: Engine
    base: Path
    nodes: tuple[str, ...]
    reports: dict[tuple[str, int], list[Report]] = field(default_factory=dict)
    is_modelled: bool = False
    """Whether there are no processes."""

    def spec(self, generation: int = 1, workers: int = 1, job_id: str = "job", **changes: Any) -> GangSpec:
        folder = self.base / "state" / "jobs" / job_id / f"i{changes.get('incarnation', 1):06d}"
        session = SessionConfig(
            job_id=job_id,
            incarnation=changes.get("incarnation", 1),
            incarnation_dir=str(folder),
            code_dir=str(self.base / "code"),
            **{"script": "train.py", "steps": 100_000, **changes.pop("session", {})},
        )
        values: dict[str, Any] = {
            "job_id": job_id,
            "incarnation": 1,
            "generation": generation,
            "cleared_generation": 0,
            "placement": tuple(Slot(self.nodes[0], index) for index in range(workers)),
            "session": session,
            "python": sys.executable,
            "env": {},
            "grace_s": 10.0,
        }
        return GangSpec(**{**values, **changes})

    def look(self, job_id: str = "job") -> dict[int, GangObservation]:
        """Observe once; reports are collected by generation."""
        found = {}
        for gang in self.engine.observe():
            self.reports.setdefault((gang.job_id, gang.generation), []).extend(gang.reports)
            if gang.job_id == job_id:
                found[gang.generation] = gang
        return found

    def pass_time(self) -> None:
        raise AssertionError("a bench says how time passes")

    def wait(
        self, condition: Callable[[dict[int, GangObservation]], Any], what: str, job_id: str = "job"
    ) -> dict[int, GangObservation]:
        """Observe until a condition holds."""
        end_s = time.monotonic() + 150.0
        while time.monotonic() < end_s:
            gangs = self.look(job_id)
            if condition(gangs):
                return gangs
            self.pass_time()
        raise AssertionError(f"waited in vain: {what}; last seen: {gangs}\n{self.story()}")

    def wait_state(self, generation: int, state: GangState, job_id: str = "job") -> GangObservation:
        gangs = self.wait(
            lambda gangs: generation in gangs and gangs[generation].state in (state, GangState.ENDED),
            f"generation {generation} {state}",
            job_id,
        )
        assert gangs[generation].state is state, gangs[generation]
        return gangs[generation]

    def pids(self, generation: int, job_id: str = "job") -> list[int]:
        """The workers' processes, by rank, once all are known: a worker's own reports may come before its pid."""
        gangs = self.wait(
            lambda gangs: all(worker.pid is not None for worker in gangs[generation].workers), "all pids known", job_id
        )
        return [worker.pid for worker in gangs[generation].workers if worker.pid is not None]

    def prepare_environment(self, requirements: tuple[str, ...]) -> None:
        """Wait for an environment."""
        end_s = time.monotonic() + 150.0
        while not self.engine.prepare_environment(sys.executable, requirements):
            assert time.monotonic() < end_s, f"waited in vain for {requirements}\n{self.story()}"
            self.pass_time()

    def kinds(self, generation: int, job_id: str = "job") -> list[str]:
        return [report.kind.value for report in self.reports.get((job_id, generation), [])]

    def restart(self) -> None:
        """The service is killed and started again."""
        raise AssertionError("a bench says how")

    def kill_worker(self, rank: int) -> None:
        raise AssertionError("a bench says how")

    def lose(self) -> None:
        raise AssertionError("a bench says how")

    def spoil(self, job_id: str) -> None:
        """A job's script makes something else of the files that tell of its workers."""
        raise AssertionError("a bench says how")

    def hold_slot(self, index: int) -> None:
        """Another service takes a slot."""
        raise AssertionError("a bench says how")

    def left_behind(self) -> list[str]:
        """Processes that should be gone by now; waits a moment for those on their last lines."""
        return []

    def story(self) -> str:
        """What was done, for whoever looks for the reason of a failure."""
        return ""


@dataclass(kw_only=True)
class FakeBench(Bench):
    now_s: list[float]
    is_modelled: bool = True

    def pass_time(self) -> None:
        self.now_s[0] += 0.25

    def restart(self) -> None:
        assert isinstance(self.engine, FakeEngine)
        self.engine = self.engine.restarted()
        self.reports.clear()

    def kill_worker(self, rank: int) -> None:
        assert isinstance(self.engine, FakeEngine)
        self.engine.fail_worker("job", rank)

    def lose(self) -> None:
        assert isinstance(self.engine, FakeEngine)
        self.engine.lose("job")

    def spoil(self, job_id: str) -> None:
        assert isinstance(self.engine, FakeEngine)
        self.engine.spoil(job_id)

    def hold_slot(self, index: int) -> None:
        assert isinstance(self.engine, FakeEngine)
        self.engine.set_busy(self.nodes[0], index, "job other of the service in /elsewhere")


@dataclass(kw_only=True)
class LocalBench(Bench):
    others: list[TorchrunEngine] = field(default_factory=list)
    pool: SharedPool | None = None
    """What workers are forked from; None: they import for themselves, as by default."""

    def pass_time(self) -> None:
        time.sleep(0.05)

    def make(self, state: str = "state", **options: Any) -> TorchrunEngine:
        first, second = detect_nodes(virtual_nodes="2x2", environ={"CUDA_VISIBLE_DEVICES": ""})
        nodes = (first, replace(second, address=ELSEWHERE))
        return LocalEngine(self.base / state, nodes, self.base / "locks", **{"pool": self.pool, **options})

    def restart(self) -> None:
        self.engine.close()
        self.engine = self.make()
        self.reports.clear()

    def folder(self, generation: int = 1, node: int = 0, job_id: str = "job") -> SupervisorFolder:
        incarnation_dir = self.base / "state" / "jobs" / job_id / "i000001"
        return SupervisorFolder.of(incarnation_dir, generation, self.nodes[node])

    def worker_process(self, rank: int, what: str = "trainer", job_id: str = "job") -> ProcessId:
        """A worker's process; its own reports may come before the supervisor has written down who it is."""

        def known() -> ProcessId | None:
            status = self.folder(job_id=job_id).read_status()
            worker = None if status is None else status.workers.get(f"g000001-r{rank:03d}")
            process = None if worker is None else getattr(worker, what)
            return process if isinstance(process, ProcessId) else None

        found = wait_until(known, f"{what} of rank {rank} is known")
        assert isinstance(found, ProcessId)
        return found

    def kill_worker(self, rank: int) -> None:
        self.worker_process(rank).kill()

    def lose(self) -> None:
        status = self.folder().read_status()
        assert status is not None
        assert status.supervisor is not None
        status.supervisor.kill()

    def spoil(self, job_id: str) -> None:
        status = self.folder(job_id=job_id).path / "status.json"
        while not status.is_dir():  # Its supervisor may write it anew in between.
            status.unlink(missing_ok=True)
            with suppress(FileExistsError):
                status.mkdir()

    def hold_slot(self, index: int) -> None:
        other = self.make("elsewhere")
        self.others.append(other)
        spec = self.spec(job_id="other", placement=(Slot(self.nodes[0], index),))
        folder = self.base / "elsewhere" / "jobs" / "other" / "i000001"
        other.apply(replace(spec, session=replace(spec.session, incarnation_dir=str(folder))))
        wait_until(lambda: other.observe()[0].workers[0].slot and self.engine.inventory()[0].busy, "slot held")

    def left_behind(self) -> list[str]:
        end_s = time.monotonic() + 90.0
        while (found := self.processes()) and time.monotonic() < end_s:
            time.sleep(0.05)
        return found

    def story(self) -> str:
        """The ends of all logs, and the processes that are there."""
        found = {*self.base.rglob("*.log"), *self.base.rglob("status.json")}
        logs = sorted(path for path in found if path.is_file())
        ends = [f"-- {log.relative_to(self.base)}\n{log.read_text(errors='replace')[-1500:]}" for log in logs]
        return "\n".join([*ends, *self.processes()])

    def processes(self) -> list[str]:
        """All processes that belong to this bench, as of now."""
        return processes_of(self.base)

    def end(self) -> None:
        engines = (self.engine, *self.others)
        for engine in engines:
            for job_id in ("job", "other", *{gang.job_id for gang in engine.observe()}):
                engine.stop(job_id, 0.1, "the test is over")
            engine.close()
        if left := self.left_behind():
            raise AssertionError(f"processes left behind: {left}\n{self.story()}")


@dataclass(kw_only=True)
class ClusterBench(LocalBench):
    """Two machines, each with an agent and a folder of its own: on this one, or in namespaces."""

    machines: Machines | None = None
    agents: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    urls: dict[str, str] = field(default_factory=dict)
    suspicion_s: float

    def start_agent(self, node_id: str) -> None:
        """Start the agent of a node, at the address that it had before, if any."""
        index = self.nodes.index(node_id)
        addresses = ["127.0.0.1", ELSEWHERE] if self.machines is None else self.machines.addresses
        listen = self.urls.get(node_id, f"http://{addresses[index]}:0").removeprefix("http://")
        agent, self.urls[node_id] = start_agent(self.base, node_id, listen, 2, self.machines, index, pool=self.pool)
        self.agents[node_id] = agent

    def make(self, state: str = "state", **options: Any) -> TorchrunEngine:
        urls, shared = list(self.urls.values()), self.base / "shared"
        return open_cluster_engine(self.base / state, shared, urls, TOKEN, suspicion_s=self.suspicion_s, **options)

    def spec(self, generation: int = 1, workers: int = 1, job_id: str = "job", **changes: Any) -> GangSpec:
        found = super().spec(generation, workers, job_id, **changes)
        self.engine.files.prepare(job_id, found.incarnation)
        return found

    def folder(self, generation: int = 1, node: int = 0, job_id: str = "job") -> SupervisorFolder:
        incarnation_dir = self.base / self.nodes[node] / "jobs" / job_id / "i000001"
        return SupervisorFolder.of(incarnation_dir, generation, self.nodes[node])

    def hold_slot(self, index: int) -> None:
        """A service on that machine alone takes a slot."""
        node_id = self.nodes[0]
        other = LocalEngine(self.base / "elsewhere", [self.layout_elsewhere()], self.locks())
        self.others.append(other)
        spec = LocalBench.spec(self, job_id="other", placement=(Slot(node_id, index),))
        folder = self.base / "elsewhere" / "jobs" / "other" / "i000001"
        other.apply(replace(spec, session=replace(spec.session, incarnation_dir=str(folder))))
        wait_until(lambda: other.observe()[0].workers[0].slot and self.engine.inventory()[0].busy, "slot held")

    def layout_elsewhere(self) -> NodeLayout:
        """The first node as a service on its machine alone sees it."""
        (node,) = detect_nodes(slots=2, environ={"CUDA_VISIBLE_DEVICES": ""})
        return replace(node, node_id=self.nodes[0])

    def locks(self) -> Path:
        """The folder of the slot locks there."""
        return self.base / f"locks-{self.nodes[0]}"

    def processes(self) -> list[str]:
        """All processes of the machines but their agents."""
        return [line for line in super().processes() if not any(name in line for name in AGENTS)]

    def end(self) -> None:
        try:
            super().end()
        finally:
            self.end_agents()

    def end_agents(self) -> None:
        if self.machines is not None:
            self.machines.close()
            return
        for agent in self.agents.values():
            agent.kill()
            agent.wait()
            assert agent.stdout is not None
            agent.stdout.close()


@dataclass(kw_only=True)
class TakeoverBench(ClusterBench):
    """Two agents, and one service after the other."""

    lease: Lease
    leader: Leader | None = None
    former: list[TorchrunEngine] = field(default_factory=list)

    def take_over(self) -> TorchrunEngine:
        """A service with an empty folder leads; return the engine of the one before, which has not heard of it."""
        before = self.engine
        if self.leader is not None:
            self.leader.knows = False
            self.former.append(before)  # type: ignore[arg-type]
        self.leader = self.lease.elect()
        urls, shared = list(self.urls.values()), self.base / "shared"
        self.engine = open_cluster_engine(
            self.leader.root, shared, urls, TOKEN, leadership=self.leader.leadership(), suspicion_s=self.suspicion_s
        )
        self.reports.clear()
        return before  # type: ignore[return-value]

    def spec(self, generation: int = 1, workers: int = 1, job_id: str = "job", **changes: Any) -> GangSpec:
        found = super().spec(generation, workers, job_id, **changes)
        folder = self.engine.files.folder(job_id, found.incarnation)
        return replace(found, session=replace(found.session, incarnation_dir=str(folder)))

    def end(self) -> None:
        try:
            super().end()
        finally:
            for engine in self.former:
                engine.close()


@dataclass(kw_only=True)
class RayBench(ClusterBench):
    """The two nodes of a Ray cluster on this machine."""

    address: str

    def make(self, state: str = "state", **options: Any) -> TorchrunEngine:
        (self.base / "shared").mkdir(exist_ok=True)
        agent = AgentSettings(
            token=SecretStr(TOKEN),
            folder=self.base,
            namespace="ours",
            shared_dir=str(self.base / "shared"),
            slot_lock_dir=self.base / "locks",
            reserved=True,
        )
        client = ClientSettings(address=self.address, slots=2, allow_insecure=True, agent=agent)
        root = options["leadership"].fencing.root if "leadership" in options else self.base / state
        engine = open_ray_engine(root, client, suspicion_s=self.suspicion_s, **options)
        wait_until(lambda: len(engine.inventory()) == 2, "both nodes are there")
        return engine

    def folder(self, generation: int = 1, node: int = 0, job_id: str = "job") -> SupervisorFolder:
        incarnation_dir = self.base / "ours" / self.nodes[node] / "jobs" / job_id / "i000001"
        return SupervisorFolder.of(incarnation_dir, generation, self.nodes[node])

    def layout_elsewhere(self) -> NodeLayout:
        found = super().layout_elsewhere()
        slots = (replace(slot, lock_name=f"{found.node_id}-{slot.lock_name}") for slot in found.slots)
        return replace(found, slots=tuple(slots))

    def locks(self) -> Path:
        return self.base / "locks"

    def end_agents(self) -> None:
        for node_id in self.nodes:
            card = AgentCard.read(self.base / "ours" / node_id)
            if card is not None:
                card.end()


@pytest.fixture
def code_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "train.py").write_text(TRAIN)
    return folder


@pytest.fixture
def fake_bench(tmp_path: Path) -> FakeBench:
    now_s = [1000.0]
    engine = FakeEngine(
        fake_nodes(2, 2), tmp_path / "jobs", clock=lambda: now_s[0], behaviour=FakeBehaviour(startup_s=0.5)
    )
    return FakeBench(engine=engine, base=tmp_path, nodes=("node0", "node1"), now_s=now_s)


@pytest.fixture
def local_bench(tmp_path: Path, code_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBench]:
    yield from open_local(tmp_path, monkeypatch, None)


@pytest.fixture
def warm_bench(tmp_path: Path, code_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalBench]:
    """The local engine, with the pool of all tests."""
    yield from open_local(tmp_path, monkeypatch, shared_pool())


def open_local(base: Path, monkeypatch: pytest.MonkeyPatch, pool: SharedPool | None) -> Iterator[LocalBench]:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    bench = LocalBench(engine=FakeEngine(jobs_dir=base), base=base, nodes=("local0", "local1"), pool=pool)
    bench.engine = bench.make()
    yield bench
    bench.end()


def open_cluster(
    base: Path, machines: Machines | None, suspicion_s: float, pool: SharedPool | None
) -> Iterator[ClusterBench]:
    nodes = ("local0", "local1")
    fake = FakeEngine(jobs_dir=base)
    bench = ClusterBench(engine=fake, base=base, nodes=nodes, machines=machines, suspicion_s=suspicion_s, pool=pool)
    try:
        for node_id in bench.nodes:
            bench.start_agent(node_id)
        bench.engine = bench.make()
    except BaseException:
        bench.end_agents()
        raise
    yield bench
    bench.end()


@pytest.fixture
def cluster_bench(tmp_path: Path, code_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterBench]:
    """Two agents on this machine, with the pool of all tests."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    # Longer than the default: a busy machine that runs these tests is no silent node.
    yield from open_cluster(tmp_path, None, 20.0, shared_pool())


@pytest.fixture
def takeover_bench(tmp_path: Path, code_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TakeoverBench]:
    """Two agents on this machine, with the pool of all tests, and services that take over from each other."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    fake, nodes = FakeEngine(jobs_dir=tmp_path), ("local0", "local1")
    bench = TakeoverBench(
        engine=fake, base=tmp_path, nodes=nodes, suspicion_s=20.0, lease=Lease(tmp_path), pool=shared_pool()
    )
    try:
        for node_id in nodes:
            bench.start_agent(node_id)
        bench.take_over()
    except BaseException:
        bench.end_agents()
        raise
    yield bench
    bench.end()


@pytest.fixture
def machines_bench(tmp_path: Path, code_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterBench]:
    """Two machines in namespaces."""
    need_namespaces()
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    yield from open_cluster(tmp_path, Machines(2), 5.0, None)


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray cluster of two nodes on this machine, for all tests of this process."""
    pytest.importorskip("ray", reason="needs Ray: pip install elasticflow-airflow[ray]")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "node_name": "head"})
    try:
        for name in ("local0", "local1"):
            cluster.add_node(num_cpus=2, node_name=name)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.fixture
def ray_bench(tmp_path: Path, code_dir: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayBench]:
    """Node agents that actors of a Ray cluster have started."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    fake = FakeEngine(jobs_dir=tmp_path)
    bench = RayBench(engine=fake, base=tmp_path, nodes=("local0", "local1"), suspicion_s=20.0, address=ray_address)
    bench.engine = bench.make()
    yield bench
    bench.end()


@pytest.fixture(
    params=[
        "fake",
        "local",
        pytest.param("cluster", marks=pytest.mark.slow),
        pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.soak]),
    ]
)
def bench(request: pytest.FixtureRequest) -> Bench:
    """The same contract for every engine."""
    kind = "warm" if request.param == "local" else request.param
    found = request.getfixturevalue(f"{kind}_bench")
    assert isinstance(found, Bench)
    return found
