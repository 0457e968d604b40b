"""A simulated cluster: what its tasks would see, by the real client, without Airflow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticflow_airflow.api import Attachment, Command, JobIdentity, JobStatus, JobSubmission, Length, State
from elasticflow_airflow.client import ElasticFlowClient, Snapshot, snapshot_script
from elasticflow_airflow.testing import SimulatedCluster, SimulatedTraining, SimulationStuckError
from elasticflow_airflow.testing.running import RunDag

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
START_AT = 1_800_000_000.0


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("empty") / "elasticflow.db"


@pytest.fixture
def cluster(tmp_path: Path, empty_store: Path) -> Iterator[SimulatedCluster]:
    made = SimulatedCluster(tmp_path / "s", start_at=START_AT, empty_store=empty_store)
    yield made
    made.close()


@pytest.fixture
def client(cluster: SimulatedCluster) -> Iterator[ElasticFlowClient]:
    with ElasticFlowClient(cluster.endpoint, timeout_s=60.0) as opened:
        yield opened


@pytest.fixture
def code(tmp_path: Path) -> Snapshot:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("no interpreter ever reads this")
    return snapshot_script(tmp_path / "code" / "train.py", max_bytes=10_000)


@pytest.fixture
def submit(cluster: SimulatedCluster, client: ElasticFlowClient, code: Snapshot) -> Callable[..., Attachment]:
    def submit(task: str = "train", *, steps: int = 3600, within: float | None = 3600, **given: Any) -> Attachment:
        client.upload_snapshot(code)
        values: dict[str, Any] = {
            "identity": JobIdentity(dag_id="daily", run_id=given.pop("run", "run1"), task_id=task),
            "command": Command(snapshot=code.sha256, script="train.py"),
            "length": Length(steps=steps),
            "global_batch_size": 32,
            "scaling_curve": CURVE,
            "lease_s": 60.0,
            "orphan_s": 300.0,
            "best_effort": within is None,
            "deadline_at": None if within is None else cluster.clock() + within,
        }
        return client.submit(JobSubmission(**{**values, **given}))

    return submit


def until_over(cluster: SimulatedCluster, client: ElasticFlowClient, job: Attachment) -> JobStatus:
    while not (status := client.status(job.job.job_id)).state.terminal:
        cluster.wait()
        cluster.next_turn()
    return status


def kinds(client: ElasticFlowClient, job: Attachment) -> list[str]:
    return [event.kind for event in client.events(job.job.job_id)]


def test_an_hour_of_training_takes_its_hour_on_the_clock_and_none_of_ours(cluster, client, submit):
    began = time.monotonic()
    job = submit(steps=36_000, within=2 * 3600, max_workers=1)
    status = until_over(cluster, client, job)
    assert status.state is State.SUCCEEDED
    assert status.result.met
    assert cluster.clock() - START_AT == pytest.approx(3600 + 8 + 2, abs=5)
    assert Path(status.result.checkpoint_path).is_dir()
    assert time.monotonic() - began < 600  # far from the limit even where everything is slow: it is not waited for


def test_a_hopeless_deadline_is_rejected_and_the_one_that_is_offered_is_kept(cluster, client, submit):
    hopeless = submit(steps=100_000, within=120)
    assert hopeless.job.state is State.REJECTED
    earliest = hopeless.job.verdict.earliest_deadline_at
    offered = submit("again", steps=100_000, deadline_at=earliest)
    assert until_over(cluster, client, offered).result.met


def test_trainings_contend_for_slots(cluster, client, submit):
    first, second = (submit(task, steps=20_000, within=1_000) for task in ("first", "second"))
    assert first.job.verdict.decision == "admitted"
    assert second.job.state is State.REJECTED, "alone it would be in time, but the slots are promised"
    assert until_over(cluster, client, first).result.met


def test_lateness_shows(cluster, client, submit):
    cluster.trainings = {"train": SimulatedTraining(speed=0.25)}
    status = until_over(cluster, client, job := submit(steps=20_000, within=1_000))
    assert status.result.met is False
    assert status.result.slack_s < -100
    seen = kinds(client, job)
    assert seen.index("at_risk") < seen.index("deadline_missed")


def test_news_of_a_deadline_that_is_missed_come_at_that_moment(cluster, client, submit):
    cluster.trainings = {"train": SimulatedTraining(speed=0.25)}
    job = submit(steps=20_000, within=1_000, on_miss="fail")
    status = until_over(cluster, client, job)
    assert status.state is State.FAILED
    assert cluster.clock() - START_AT == pytest.approx(1_000, abs=5)


def test_losses_and_metrics_are_as_said(cluster, client, submit):
    training = SimulatedTraining(losses={0: 2.0, 1000: 1.0, 3600: 0.25}, metrics={"accuracy": 0.93})
    cluster.trainings = {"train": training}
    status = until_over(cluster, client, submit())
    assert status.result.final_loss == pytest.approx(0.25)
    assert status.result.metrics == {"accuracy": 0.93}


def test_a_target_is_reached_where_the_losses_are_there(cluster, client, submit):
    cluster.trainings = {"train": SimulatedTraining(losses={0: 2.0, 1000: 1.0})}
    status = until_over(cluster, client, submit(target_loss=1.5))
    assert status.result.steps == 500
    assert status.target_reached


def test_a_training_that_fails_is_restarted_as_often_as_production_does_it(cluster, client, submit):
    cluster.trainings = {"train": SimulatedTraining(fails_at_step=1_000, failure="ValueError: bad row")}
    status = until_over(cluster, client, submit())
    assert status.state is State.FAILED
    assert "ValueError: bad row" in status.failure


def test_a_training_that_fails_once_goes_on(cluster, client, submit):
    cluster.trainings = {"train": SimulatedTraining(fails_at_step=1_000, failures=1)}
    status = until_over(cluster, client, job := submit())
    assert status.state is State.SUCCEEDED
    assert kinds(client, job).count("restarting") == 1


def test_a_training_that_hangs_is_noticed(cluster, client, submit):
    cluster.trainings = {"train": SimulatedTraining(hangs_at_step=1_000)}
    status = until_over(cluster, client, job := submit(within=None))
    assert status.state is State.FAILED
    assert "hangs" in status.failure
    assert "hang" in kinds(client, job)
    assert cluster.clock() - START_AT < 3600


def test_a_training_that_never_reports_becomes_best_effort(cluster, client, submit):
    cluster.trainings = {"train": SimulatedTraining(silent=True)}
    job = submit(steps=3600)
    until_over(cluster, client, job)
    said = [event.reason for event in client.events(job.job.job_id) if event.kind == "warning"]
    assert any("reports no steps" in reason for reason in said)


def test_without_a_curve_the_speed_is_measured(cluster, client, submit):
    job = submit(scaling_curve=None)
    until_over(cluster, client, job)
    measured = [event.data for event in client.events(job.job.job_id) if event.kind == "measured"]
    assert measured[0]["workers"] == 1
    assert measured[0]["steps_per_s"] == pytest.approx(10.0, rel=0.1)


def test_leases_are_renewed_while_a_run_waits_and_run_out_when_nobody_does(cluster, client, submit):
    job = submit(steps=360_000, within=None, max_workers=1)
    cluster.wait(until=cluster.clock() + 3600)
    assert client.status(job.job.job_id).state is State.RUNNING
    cluster.move_to(cluster.clock() + 120)
    assert client.status(job.job.job_id).state is State.SUSPENDED
    cluster.move_to(cluster.clock() + 400)
    assert client.status(job.job.job_id).state is State.CANCELLED


def test_who_only_looks_again_and_again_lets_time_pass(cluster, client, submit):
    """A task that waits in its worker (deferrable=False) does nothing else."""
    job = submit()
    looks = 0
    with cluster.running():
        while not client.renew(job.job.job_id, job.claim, "the Airflow task waits").state.terminal:
            looks += 1
            assert looks < 20
    assert looks >= 1


def test_looking_after_the_run_does_not_move_the_clock(cluster, client, submit):
    job = submit()
    for _ in range(5):
        client.status(job.job.job_id)
    assert cluster.clock() == START_AT


def test_the_thread_that_keeps_leases_alive_does_not_move_the_clock(cluster, client, submit):
    job = submit()
    with cluster.running():
        for _ in range(5):
            client.renew(job.job.job_id, job.claim, "dag.test() is alive")
    assert cluster.clock() == START_AT


def test_a_job_for_which_there_will_never_be_room_does_not_hang_the_test(cluster, client, submit, monkeypatch):
    cluster.trainings = {"train": SimulatedTraining(hangs_at_step=10)}
    monkeypatch.setattr("elasticflow_airflow.testing.cluster._LONGEST_WAIT_S", 100.0)
    submit(within=None)
    with pytest.raises(SimulationStuckError, match="simulated days: train is running"):
        cluster.wait()


def test_other_machines_count_from_the_next_submission_on(cluster, client, submit):
    cluster.resize(nodes=2, slots=8)
    assert cluster.shape == (2, 8)
    assert len(client.health().slots) == 16
    cluster.resize(nodes=1, slots=1)
    assert submit(steps=20_000, within=1_000).job.state is State.REJECTED


@pytest.mark.parametrize("shape", [{"slots": 0}, {"nodes": -1}, {"nodes": 0, "slots": 2}])
def test_a_cluster_without_slots_is_refused_with_what_was_given(cluster, tmp_path, shape):
    (name, given), *_ = shape.items()
    message = f"{name}={given}: give at least 1"
    with pytest.raises(ValueError, match=message):
        SimulatedCluster(tmp_path / "none", **shape)
    with pytest.raises(ValueError, match=message):
        cluster.resize(**{"nodes": 1, "slots": 4, **shape})
    assert cluster.shape == (1, 4)
    run_dag = RunDag(
        prepare=lambda: pytest.fail("it began"), cluster=lambda _: cluster, local=lambda _: pytest.fail("it began")
    )
    for engine in ("simulated", "local"):
        with pytest.raises(ValueError, match=message):
            run_dag("dags/none.py", engine=engine, **shape)


def test_what_a_training_cannot_be_is_said():
    with pytest.raises(ValueError, match="speed=0 must be positive"):
        SimulatedTraining(speed=0)
    with pytest.raises(ValueError, match="needs positive speeds by workers"):
        SimulatedTraining(steps_per_s={1: -1.0})
