"""The service over a Ray cluster: nodes come and go, Ray dies here and there, and jobs keep their deadlines."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.machines import need_namespaces
from support.ray_machines import RayMachines
from support.ray_provider import FileProvider
from support.ray_trial import on_ray
from support.trial import Trial, trial_parts

pytest.importorskip("ray", reason="needs Ray: pip install elasticflow-airflow[ray]")
pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@dataclass
class RayTrial(Trial):
    """A Ray cluster of machines with a slot each; the head is beside the service."""

    machines: RayMachines = field(kw_only=True)

    def nodes(self) -> set[str]:
        return {slot.node_id for slot in self.client.health().slots}

    def trains_on(self, job: str) -> None:
        step = self.client.status(job).step
        self.wait(lambda: self.client.status(job).step > step + 3, "it trains on")


@pytest.fixture
def empty(daemons, open_client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayTrial]:
    """No head and no node yet."""
    need_namespaces()
    parts = trial_parts(daemons, open_client, tmp_path, monkeypatch)
    machines = RayMachines(3, own_folder=daemons.state_dir("state").parent / "locks")
    with on_ray(RayTrial(*parts, machines=machines), machines, monkeypatch, suspicion_s=10) as trial:
        yield trial


@pytest.fixture
def trial(empty: RayTrial) -> RayTrial:
    empty.machines.start_head()
    for index in range(2):
        empty.machines.start_node(index)
    return empty


def test_a_job_over_two_machines_keeps_its_deadline_though_one_loses_its_power(trial: RayTrial) -> None:
    trial.start()
    trial.wait(lambda: trial.nodes() == {"node0", "node1"}, "both are there")
    deadline = time.time() + 500
    job = trial.submit("long", 30, scaling_curve={1: 6.0, 2: 9.0}, logical_workers=4, deadline_at=deadline)
    trial.wait(lambda: len(trial.client.status(job).slots) == 2, "it has both")
    trial.trains_on(job)
    trial.machines.cut_power(1)
    trial.wait(lambda: trial.events(job, "worker_lost"), "it is seen that a worker is lost")
    changes = len(trial.wait(lambda: trial.events(job, "rescaled"), "the other goes on"))
    trial.machines.start_node(2)  # another one comes
    grown = lambda: [event for event in trial.events(job, "rescaled")[changes:] if event.data["workers"] == 2]  # noqa: E731
    trial.wait(grown, "it grows onto the new one")
    assert {node_id for node_id, _ in trial.client.status(job).slots} == {"node0", "node2"}
    trial.ends(job, 30, hurried=False)
    assert time.time() < deadline


@pytest.mark.soak  # With replicas it is more: see test_ray_replicas.py.
def test_training_goes_on_while_rays_head_is_away_and_the_service_starts_again(trial: RayTrial) -> None:
    trial.start()
    job = trial.submit("only", 40, scaling_curve={1: 6.0, 2: 9.0}, max_workers=2)
    trial.wait(lambda: len(trial.client.status(job).slots) == 2, "it has both")
    trial.trains_on(job)
    trial.machines.kill_head()
    trial.trains_on(job)
    assert trial.service is not None
    trial.service.kill()
    trial.service.wait()
    trial.start()  # It knows the nodes from before.
    trial.trains_on(job)
    trial.wait(lambda: any("cannot be used" in said for said in trial.client.health().problems), "it is said")
    for index in range(2):  # As they do by themselves after a minute without their head.
        trial.machines.kill_raylet(index)
    trial.machines.start_head()
    for index in range(2):
        trial.machines.start_ray(index)
    trial.wait(lambda: not trial.client.health().problems, "Ray is well again", 60)
    trial.trains_on(job)
    trial.ends(job, 40)
    assert not trial.events(job, "worker_lost"), trial.story()


def test_without_reservation_workers_end_when_ray_does_and_the_job_goes_on_elsewhere(trial: RayTrial) -> None:
    trial.settings["ray_reserved"] = False
    trial.start()
    job = trial.submit("only", 12, scaling_curve={1: 6.0, 2: 9.0}, max_workers=2)
    trial.wait(lambda: len(trial.client.status(job).slots) == 2, "it has both")
    trial.trains_on(job)
    trial.machines.kill_raylet(1)
    lost = trial.wait(lambda: trial.events(job, "worker_lost"), "its worker there ends", 30)
    trial.trains_on(job)
    assert not trial.machines.workers(1), "Ray gives the GPUs to others"
    assert len(lost) == 1
    begun_s = time.monotonic()
    trial.machines.start_ray(1)
    trial.wait(lambda: "node1" in trial.nodes(), "it comes again")
    print(f"joined {time.monotonic() - begun_s:.1f} s after `ray start`")
    trial.ends(job, 12)


@pytest.mark.soak
def test_with_reservation_workers_outlive_ray_and_its_actor(trial: RayTrial) -> None:
    trial.start()
    job = trial.submit("only", 20, scaling_curve={1: 6.0, 2: 9.0}, max_workers=2)
    trial.wait(lambda: len(trial.client.status(job).slots) == 2, "it has both")
    trial.trains_on(job)
    trial.machines.kill_raylet(1)
    trial.trains_on(job)
    trial.machines.start_ray(1)
    trial.trains_on(job)
    trial.ends(job, 20)
    assert not trial.events(job, "worker_lost"), trial.story()


@pytest.mark.soak
def test_a_node_that_ray_takes_away_is_left_before(trial: RayTrial) -> None:
    trial.settings |= {"drain_lead_s": 5, "ray_address": trial.machines.client_address}
    trial.start()
    job = trial.submit("only", 20, scaling_curve={1: 6.0, 2: 9.0}, max_workers=2)
    trial.wait(lambda: len(trial.client.status(job).slots) == 2, "it has both")
    trial.trains_on(job)
    trial.machines.drain(1, 15)
    trial.wait(lambda: {node for node, _ in trial.client.status(job).slots} == {"node0"}, "it leaves", 15)
    trial.machines.cut_power(1)
    trial.ends(job, 20)
    assert not trial.events(job, "worker_lost"), trial.story()


def test_what_cannot_be_used_is_said(trial: RayTrial, daemons, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(name: str, **settings: object) -> subprocess.Popen[bytes]:
        return daemons.popen(name, **{**trial.settings, **settings})

    def cannot_start(service: subprocess.Popen[bytes]) -> str:
        _, said = service.communicate(timeout=120)
        assert service.returncode == 1
        assert b"Traceback" not in said
        return said.decode().splitlines()[-1]

    # All at once, as Ray takes its time for each.
    nobody_there = start("nobody-there", ray_address="127.0.0.1:9")
    too_many_slots = start("too-many-slots", slots=2)
    with monkeypatch.context() as without_token:
        without_token.setenv("RAY_AUTH_MODE", "disabled")
        refused = start("refused")
        # A busy head is slow to refuse: Ray then tells of a lost connection alone.
        program = (
            "import sys; from elasticflow_airflow.engines.ray import ray_client;"
            "print(ray_client._reason(ConnectionError('lost'), sys.argv[1]))"
        )
        command = [sys.executable, "-c", program, trial.machines.address]
        lost = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "token is missing or incorrect" in lost
    assert "token is missing or incorrect" in cannot_start(refused)
    assert "Ray at 127.0.0.1:9 cannot be used: " in cannot_start(nobody_there)
    assert "2 slots are configured, and it has 1 CPUs: it is not used" in cannot_start(too_many_slots)
    trial.machines.start_node(2, "node1")
    trial.start()
    trial.wait(
        lambda: any("2 nodes of Ray are named node1" in said for said in trial.client.health().problems), "named"
    )
    trial.wait(lambda: trial.nodes() == {"node0", "node1"}, "one of them is used")


@contextmanager
def provided(machines: RayMachines, folder: Path) -> Iterator[None]:
    """Start and end machines as ``FileProvider`` says."""
    done = threading.Event()

    def follow() -> None:
        while not done.wait(0.2):
            there = {int(path.stem) for path in folder.glob("*.json")}
            for index in there - set(machines.running):
                machines.heal(index)
                machines.start_node(index)
            for index in set(machines.running) - there:
                machines.cut_power(index)

    following = threading.Thread(target=follow)
    following.start()
    try:
        yield
    finally:
        done.set()
        following.join()


@pytest.mark.soak
def test_rays_autoscaler_adds_nodes_that_are_wanted_and_removes_those_that_nobody_needs(empty: RayTrial) -> None:
    trial, machines = empty, empty.machines
    folder = trial.state_dir.parent / "provided"
    folder.mkdir()
    trial.settings |= {"ray_autoscale_hours": 1, "ray_unneeded_s": 15}
    machines.start_head(FileProvider.config(folder, machines.outside, machines.addresses, least=1))
    with provided(machines, folder):
        trial.wait(lambda: (folder / "0.json").exists(), "Ray wants its first node")
        trial.start()
        long = trial.submit("long", 60, scaling_curve={1: 6.0}, max_workers=1)
        trial.trains_on(long)
        short = trial.submit("short", 4, scaling_curve={1: 6.0}, max_workers=1)
        trial.wait(lambda: trial.nodes() == {"node0", "node1"}, "another node comes")
        trial.ends(short, 4)
        assert {node_id for node_id, _ in trial.client.status(long).slots} == {"node0"}
        trial.wait(lambda: not (folder / "1.json").exists(), "Ray removes it")
        trial.trains_on(long)
        assert (trial.nodes(), trial.client.health().problems) == ({"node0"}, [])
        again = trial.submit("again", 4, scaling_curve={1: 6.0}, max_workers=1)
        trial.ends(again, 4)
        assert not trial.client.status(long).state.terminal, "too short for this"
        trial.ends(long, 60)
    assert not trial.events(long, "worker_lost"), trial.story()
