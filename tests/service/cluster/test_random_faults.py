"""Faults at random on a cluster of three machines, judged by the history that the workers themselves write.

Whatever is killed, stopped, cut off or drained: no two workers ever train on one slot at a time, no checkpoint is
published twice, every sample is used once an epoch, the weights are those of an undisturbed training, and nobody is
left. What is random comes from ``FAULTS_SEED``, which is printed; ``FAULTS`` is their number.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster_trial import running
from support.faulty_replicas import REPLICAS, Crowd, FaultyReplicas, replicas_running
from support.faulty_trial import FAULTY, NODES, SCRIPT, FaultyRayTrial, FaultyTrial, suffer, two_on_one_slot
from support.machines import Machines, need_namespaces
from support.postgres import postgres
from support.ray_machines import RayMachines
from support.ray_trial import on_ray
from support.trial import trial_parts

from elasticflow_airflow.client import snapshot_script

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    # The short run has the same faults each time: what it finds is due to the change that it is run for.
    usual = random.randrange(2**31) if request.node.get_closest_marker("soak") else 2
    seed = int(os.environ.get("FAULTS_SEED", usual))
    print(f"FAULTS_SEED={seed}")
    return random.Random(seed)


@pytest.fixture
def history(tmp_path: Path) -> Path:
    folder = tmp_path / "history"
    folder.mkdir()
    return folder


@pytest.fixture
def trial(
    daemons, open_client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chance: random.Random, history: Path
) -> Iterator[FaultyTrial]:
    need_namespaces()
    parts = trial_parts(daemons, open_client, tmp_path, monkeypatch)
    with running(FaultyTrial(*parts, random=chance, history=history), **FAULTY) as trial:
        yield trial


@pytest.fixture
def ray_trial(
    daemons, open_client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chance: random.Random, history: Path
) -> Iterator[FaultyRayTrial]:
    need_namespaces()
    pytest.importorskip("ray", reason="needs Ray: pip install elasticflow-airflow[ray]")
    parts = trial_parts(daemons, open_client, tmp_path, monkeypatch)
    machines = RayMachines(NODES, own_folder=daemons.state_dir("state").parent / "locks")
    faulty = FaultyRayTrial(*parts, random=chance, history=history, machines=machines)
    with on_ray(faulty, machines, monkeypatch, **FAULTY) as trial:
        machines.start_head()
        for index in range(NODES):
            machines.start_node(index)
        trial.start()
        yield trial


@pytest.fixture
def replicas(
    daemons, open_client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chance: random.Random, history: Path
) -> Iterator[FaultyReplicas]:
    need_namespaces()
    machines = Machines(NODES + len(REPLICAS))
    try:
        with postgres(machines.outside) as server:
            server.sql("CREATE DATABASE service")
            parts = trial_parts(daemons, open_client, tmp_path, monkeypatch)
            trial = FaultyReplicas(*parts, random=chance, history=history, machines=machines, postgres=server)
            with replicas_running(trial) as trial:
                yield trial
    finally:
        machines.close()


def test_two_workers_on_one_slot_are_found() -> None:
    one, other = "machine0 11 g000001-r000 one", "machine0 12 g000001-r000 other"
    assert two_on_one_slot(f"1.0 {one} 0\n2.0 {one} 1\n3.0 {other} 0\n4.0 {other} 1\n") == []
    (wrong,) = two_on_one_slot(f"1.0 {one} 0\n2.5 {other} 0\n3.0 {one} 1\n4.0 {other} 1\n")
    assert wrong == "machine0: 11 g000001-r000 one trained until 3.00, 12 g000001-r000 other from 2.50"
    assert two_on_one_slot(f"1.0 {one} 0\n2.5 {other.replace('machine0', 'machine1')} 0\n3.0 {one} 1\n") == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_history_of_faults_is_one_of_a_training_without_any(trial: FaultyTrial, tmp_path: Path) -> None:
    suffer(trial, tmp_path, 9)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_a_history_of_a_hundred_faults_is_one_of_a_training_without_any(trial: FaultyTrial, tmp_path: Path) -> None:
    suffer(trial, tmp_path, 100)


@pytest.mark.soak
@pytest.mark.ray
@pytest.mark.timeout(7200)
def test_nor_do_faults_of_ray_and_its_machines_change_the_history(ray_trial: FaultyRayTrial, tmp_path: Path) -> None:
    suffer(ray_trial, tmp_path, 30)


def suffer_with_a_crowd(trial: FaultyReplicas, root: Path, count: int) -> None:
    snapshot = snapshot_script(SCRIPT)
    trial.client.upload_snapshot(snapshot)
    with Crowd(trial, snapshot.sha256) as crowd:
        suffer(trial, root, count)
    wrong = crowd.wrong()
    trial.leader()
    print(f"{len(crowd.asked)} jobs of the crowd, epochs {sorted(map(int, trial.led))}")
    assert len(crowd.asked) > count
    assert not wrong, "\n".join([*wrong, trial.story()])


@pytest.mark.slow
@pytest.mark.postgres
@pytest.mark.timeout(1200)
def test_faults_of_replicas_and_their_database_change_no_history(replicas: FaultyReplicas, tmp_path: Path) -> None:
    suffer_with_a_crowd(replicas, tmp_path, 6)


@pytest.mark.soak
@pytest.mark.postgres
@pytest.mark.timeout(7200)
def test_nor_do_a_hundred_of_them(replicas: FaultyReplicas, tmp_path: Path) -> None:
    suffer_with_a_crowd(replicas, tmp_path, 100)
