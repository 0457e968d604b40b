"""Real replicas on a real PostgreSQL over real workers: whoever leads is killed, stopped, or told to leave."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.replica_trial import ReplicaTrial, replicas
from support.trial import SCALING

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")
pytestmark = [pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def trial(postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ReplicaTrial]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    url = postgres_url.replace("postgresql+psycopg:", "postgresql:")
    with replicas(ReplicaTrial(tmp_path / "trial", url, SCALING)) as trial:
        yield trial


def test_training_notices_nothing_when_the_leader_is_killed_and_killed_again(trial: ReplicaTrial) -> None:
    job = trial.submit("only", 40, scaling_curve={1: 6.0, 2: 9.0}, max_workers=2, secret_env={"TOKEN": "hunter2"})
    trial.wait(lambda: trial.client.status(job).step > 20, "it trains with both")
    first = trial.leader()
    other = trial.follower()
    trial.replica(first).kill()
    began_s = time.monotonic()
    asked = trial.submit("second", 1, trial.client_of(other), max_workers=1, scaling_curve={1: 6.0})
    trial.wait(lambda: trial.client.status(asked).state != "submitted", "it is decided on")
    assert time.monotonic() - began_s < 12.0, trial.story()
    assert trial.leader() == other
    trial.trains(job)
    trial.replica(first).start()
    assert trial.role(first) == "leader", "a follower tells the leader's health"
    trial.wait(lambda: len(trial.health(other).leadership.replicas) == 2, "both are there")
    trial.replica(other).kill()
    assert trial.leader() == first
    trial.trains(job)
    log = trial.client_of(first).read_log(job, trial.client.status(job).log_names[0])
    assert not log.end_of_file
    trial.ends(job)
    trial.ends(asked)


def test_a_leader_that_is_told_to_leave_hands_over_within_a_second(trial: ReplicaTrial) -> None:
    leader, other = trial.leader(), trial.follower()
    client = trial.client_of(other)
    trial.submit("before", 1, client, max_workers=1, scaling_curve={1: 6.0})
    trial.signal(leader, signal.SIGTERM)
    began_s = time.monotonic()
    trial.wait(lambda: trial.health(other).role == "leader" and trial.health(other).slots, "it leads", 10)
    took_s = time.monotonic() - began_s
    assert trial.replica(leader).process.wait(20) == 0
    change = trial.health(other).leadership
    assert change.change == "hand-over"
    assert change.failed_over_at is None
    print(f"handed over in {took_s:.2f} s")
    assert took_s < 5.0, trial.story()


def test_a_leader_that_stood_still_changes_nothing_when_it_wakes_up(trial: ReplicaTrial) -> None:
    job = trial.submit("only", 30, scaling_curve={1: 6.0, 2: 9.0}, max_workers=2)
    trial.wait(lambda: trial.client.status(job).step > 10, "it trains")
    first, other = trial.leader(), trial.follower()
    trial.signal(first, signal.SIGSTOP)
    client = trial.client_of(other)
    trial.wait(lambda: trial.health(other).role == "leader" and trial.health(other).slots, "the other leads", 20)
    generations = {event.data["generation"] for event in client.events(job) if event.kind == "resized"}
    trial.signal(first, signal.SIGCONT)
    time.sleep(3.0)
    health = trial.health(other)
    assert (health.role, health.leadership.change) == ("leader", "fail-over")
    assert health.leadership.epoch == 2
    trial.trains(job)
    assert {event.data["generation"] for event in client.events(job) if event.kind == "resized"} >= generations
    trial.ends(job)
