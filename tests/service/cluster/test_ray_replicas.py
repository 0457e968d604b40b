"""Two replicas over a Ray cluster: Ray's head is away when the leader dies, and training notices neither."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.machines import need_namespaces
from support.postgres import service_database
from support.ray_machines import RayMachines
from support.ray_trial import settings_for
from support.replica_trial import ReplicaTrial, replicas
from support.trial import SCALING

pytest.importorskip("ray", reason="needs Ray: pip install elasticflow-airflow[ray]")
pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")
pytestmark = [pytest.mark.ray, pytest.mark.postgres, pytest.mark.timeout(600)]

NODES = 2
EPOCHS = 40


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayMachines]:
    need_namespaces()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = RayMachines(NODES, own_folder=tmp_path / "locks")
    try:
        found.start_head()
        for index in range(NODES):
            found.start_node(index)
        yield found
    finally:
        found.close()


@pytest.fixture
def trial(machines: RayMachines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplicaTrial]:
    base = tmp_path / "trial"
    settings = {**settings_for(machines, base, monkeypatch), "suspicion_s": 10}
    with (
        service_database("postgresql") as url,
        replicas(ReplicaTrial(base, str(url), SCALING, nodes=0, settings=settings)) as found,
    ):
        yield found
        machines.close()


def test_the_leader_dies_while_rays_head_is_away(trial: ReplicaTrial, machines: RayMachines) -> None:
    """Who leads then was a follower before the head went, and asks the nodes that the former leader knew."""
    curve = {1: 6.0, 2: 9.0}
    job = trial.submit("only", EPOCHS, scaling_curve=curve, max_workers=NODES)
    trial.wait(lambda: len(trial.client.status(job).slots) == NODES, "it has both nodes")
    trial.trains(job)
    machines.kill_head()
    trial.trains(job)
    killed = trial.leader()
    trial.replica(killed).kill()
    begun_s = time.monotonic()
    leads = trial.leader()
    print(f"another leads after {time.monotonic() - begun_s:.1f} s")
    assert leads != killed
    late = trial.submit("late", 1, scaling_curve=curve, deadline_at=time.time() + 5)
    trial.wait(lambda: trial.client.status(late).state == "rejected", "it decides")
    trial.trains(job)
    for index in range(NODES):  # As they end by themselves after a minute without their head.
        machines.kill_raylet(index)
    machines.start_head()
    for index in range(NODES):
        machines.start_ray(index)
    trial.replica(killed).start()
    trial.wait(lambda: not trial.client.health().problems, "Ray is well again", 90)
    trial.trains(job)
    assert trial.ends(job).metrics == {"least": EPOCHS, "most": EPOCHS}
    assert len(trial.events(job, "started")) == 1
