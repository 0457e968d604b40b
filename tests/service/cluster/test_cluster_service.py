"""The service over two machines: a job grows over both, one loses its power, and the deadline is kept."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cluster_trial import ClusterTrial, running
from support.machines import need_namespaces
from support.trial import trial_parts

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def trial(daemons, open_client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterTrial]:
    need_namespaces()
    with running(ClusterTrial(*trial_parts(daemons, open_client, tmp_path, monkeypatch)), suspicion_s=10) as trial:
        yield trial


@pytest.mark.soak
def test_a_job_over_two_machines_keeps_its_deadline_though_one_loses_its_power(trial: ClusterTrial) -> None:
    short = trial.submit("short", 2, max_workers=1, scaling_curve={1: 8.0})
    deadline = time.time() + 400
    job = trial.submit("long", 40, scaling_curve={1: 6.0, 2: 9.0}, logical_workers=4, deadline_at=deadline)
    trial.ends(short, 2)
    trial.changed(job, 2, 1)
    assert {node_id for node_id, _ in trial.client.status(job).slots} == {"node0", "node1"}
    trial.machines.cut_power(1)
    trial.wait(lambda: trial.events(job, "worker_lost"), "it is seen that a worker is lost")
    changes = len(trial.wait(lambda: trial.events(job, "rescaled")[1:], "the other goes on")) + 1
    trial.machines.heal(1)
    trial.start_node(1)
    grown = lambda: [event for event in trial.events(job, "rescaled")[changes:] if event.data["workers"] == 2]  # noqa: E731
    trial.wait(grown, "it grows over both again")
    trial.ends(job, 40, hurried=False)
    assert time.time() < deadline


def test_a_training_goes_on_while_the_service_and_the_agents_are_exchanged(trial: ClusterTrial) -> None:
    job = trial.submit("only", 25, scaling_curve={1: 6.0, 2: 9.0}, max_workers=2)
    trial.wait(lambda: trial.client.status(job).step > 20, "it trains with both")
    assert trial.service is not None
    trial.service.kill()
    trial.service.wait()
    trial.start()
    trial.ends(job, 25)
    assert not trial.events(job, "worker_lost"), trial.story()
