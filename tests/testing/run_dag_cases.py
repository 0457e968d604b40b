"""What users' suites do with ``run_dag``: run by test_run_dag.py in a pytest of its own, as users have it."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from elasticflow_airflow.testing import DagError, SimulatedTraining, find_dag

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}


@pytest.fixture(autouse=True)
def note_the_home(airflow_home):
    """The test outside looks whether it is gone."""
    with Path(os.environ["HOMES_SEEN"]).open("a") as file:
        file.write(f"{airflow_home}\n")
    assert os.environ["AIRFLOW_HOME"] == str(airflow_home)


@pytest.fixture
def new_dag(tmp_path):
    """Make a DAG in whose folder a script stands."""
    from airflow.sdk import DAG

    (tmp_path / "train.py").write_text("no interpreter ever reads this")

    def make(dag_id, **options):
        dag = DAG(dag_id, schedule=None, **options)
        dag.fileloc = str(tmp_path / "dag.py")
        return dag

    return make


def train(task_id, **changes):
    from elasticflow_airflow.operators import ElasticTrainOperator

    given = {"steps": 3_600, "global_batch_size": 32, "deadline": timedelta(hours=1), "scaling_curve": CURVE}
    return ElasticTrainOperator(task_id=task_id, script="train.py", **{**given, **changes})


def test_parallel_trainings_share_the_slots_and_later_ones_begin_when_those_before_have_ended(run_dag, new_dag):
    with new_dag("shared") as dag:
        first, second, third = train("first", steps=36_000), train("second", steps=36_000), train("third")
        [first, second] >> third
    result = run_dag(dag)
    assert result.succeeded, result
    jobs = result.jobs
    assert abs((jobs["first"].submitted - jobs["second"].submitted).total_seconds()) < 1
    assert max(jobs["first"].sizes) < 4, "they share four slots"
    ended = max(jobs["first"].finished, jobs["second"].finished)
    assert timedelta(0) <= jobs["third"].submitted - ended < timedelta(seconds=30)
    assert jobs["third"].status.acknowledged
    assert list(result.tasks) == ["first", "second", "third"]


def test_a_hopeless_deadline_fails_the_run_and_the_result_tells_why(run_dag, new_dag):
    with new_dag("hopeless") as dag:
        train("train", steps=1_000_000, retries=3)
    result = run_dag(dag)
    assert not result.succeeded
    assert result.jobs["train"].verdict == "rejected"
    assert result.jobs["train"].earliest_deadline > result.jobs["train"].deadline
    assert result.tasks["train"].tries == 1
    text = repr(result)
    assert "hopeless" in text
    assert "earliest feasible deadline" in text
    assert "rejected: " in text
    with pytest.raises(KeyError, match="no job of task 'trian'; there are: train"):
        result.jobs["trian"]


def test_a_retry_comes_at_once_and_goes_on(run_dag, new_dag):
    with new_dag("again") as dag:
        task = train("train", retries=1, retry_delay=timedelta(minutes=5))
    result = run_dag(dag, simulated={"train": SimulatedTraining(fails_at_step=1_000, failures=3)})
    assert result.succeeded, result
    assert result.tasks["train"].tries == 2
    assert result.jobs["train"].status.incarnation == 2
    assert task.retry_delay == timedelta(minutes=5)


def test_a_retry_after_the_deadline_ends_late(run_dag, new_dag):
    with new_dag("late") as dag:
        train("train", deadline=timedelta(minutes=12), retries=2)
    slow = SimulatedTraining(speed=0.05, fails_at_step=2_000, failures=3)
    result = run_dag(dag, simulated={"train": slow})
    assert result.succeeded, result
    assert result.tasks["train"].tries == 2
    assert result.jobs["train"].status.step == 3_600


def test_a_deadline_that_has_passed_names_the_earliest_and_a_soft_one_is_taken(run_dag, new_dag):
    with new_dag("past") as dag:
        early = train("early", steps=36_000)
        soft = {"on_reject": "late", "latest_deadline": timedelta(hours=9)}
        early >> [train("hard", deadline=timedelta(minutes=1)), train("soft", deadline=timedelta(minutes=1), **soft)]
    result = run_dag(dag)
    assert result.jobs["hard"].verdict == "rejected"
    assert result.jobs["hard"].earliest_deadline is not None
    assert "on_past_deadline='best_effort'" in repr(result)
    assert result.jobs["soft"].verdict == "renegotiated"
    assert result.tasks["soft"].state == "success"


def test_a_dag_with_deadline_alerts_survives_its_run(run_dag, new_dag):
    from airflow.sdk import DeadlineAlert, DeadlineReference, SyncCallback

    alert = DeadlineAlert(
        reference=DeadlineReference.DAGRUN_LOGICAL_DATE,
        interval=timedelta(hours=2),
        callback=SyncCallback("elasticflow_airflow.testing.find_dag"),
    )
    with new_dag("alerted", deadline=alert) as dag:
        train("train", deadline=None, deadline_of="dag_run", downstream_reserve=timedelta(minutes=10))
    before = dag.deadline
    assert before
    due = datetime(2026, 11, 3, 1, 0, tzinfo=UTC)
    result = run_dag(dag, run_after=due)
    assert result.succeeded, result
    assert dag.deadline is before
    assert due + timedelta(minutes=100) < result.jobs["train"].deadline <= due + timedelta(minutes=110)


def test_mapped_trainings_have_results_of_their_own(run_dag, new_dag):
    from elasticflow_airflow.operators import ElasticTrainOperator

    with new_dag("mapped") as dag:
        ElasticTrainOperator.partial(
            task_id="train",
            script="train.py",
            global_batch_size=32,
            deadline=timedelta(hours=1),
            scaling_curve=CURVE,
        ).expand(steps=[1_000, 2_000])
    result = run_dag(dag, simulated={"train[1]": SimulatedTraining(metrics={"which": "second"})})
    assert result.succeeded, result
    assert [result.jobs[f"train[{index}]"].status.step for index in range(2)] == [1_000, 2_000]
    assert result.tasks["train[1]"].returned["metrics"] == {"which": "second"}
    assert result.tasks["train[0]"].returned["metrics"] == {}


def test_a_task_that_waits_in_its_worker_lets_time_pass(run_dag, new_dag):
    with new_dag("blocking") as dag:
        train("train", deferrable=False, steps=36_000)
    result = run_dag(dag)
    assert result.succeeded, result
    assert result.jobs["train"].finished - result.jobs["train"].submitted > timedelta(minutes=10)


def test_a_sensor_sees_the_first_checkpoint_while_the_training_goes_on(run_dag, new_dag):
    from elasticflow_airflow.operators import ElasticTrainSensor

    with new_dag("watched") as dag:
        train("train", steps=36_000)
        ElasticTrainSensor(task_id="first_checkpoint", external_task_id="train", until="checkpoint")
    result = run_dag(dag)
    assert result.succeeded, result
    assert 0 < result.tasks["first_checkpoint"].returned["step"] < 36_000


def test_an_execution_timeout_is_one_of_simulated_time(run_dag, new_dag):
    with new_dag("limited") as dag:
        train(
            "train",
            steps=36_000,
            max_workers=1,
            deadline=None,
            best_effort=True,
            execution_timeout=timedelta(minutes=20),
        )
    result = run_dag(dag)
    assert result.tasks["train"].state == "failed"
    assert "execution_timeout" in result.tasks["train"].error
    cancelled = result.jobs["train"].events[-1].at - result.jobs["train"].status.submitted_at
    assert 1_200 <= cancelled < 1_300


def test_a_connection_by_another_name_leads_to_the_simulation_too(run_dag, new_dag):
    with new_dag("named") as dag:
        train("train", elasticflow_conn_id="the_gpu_cluster")
    assert run_dag(dag).succeeded


def test_the_clock_is_where_the_run_is_due(run_dag, new_dag):
    with new_dag("timed") as dag:
        train("train", deadline="06:00")
    first = datetime(2027, 3, 1, 1, 0, tzinfo=UTC)  # whether that is past or to come makes no difference
    for due in (first, first + timedelta(days=1)):
        result = run_dag(dag, run_after=due)
        assert result.succeeded, result
        assert result.jobs["train"].deadline == due.replace(hour=6)
        assert timedelta(0) <= result.jobs["train"].submitted - due < timedelta(seconds=5)


def test_what_is_no_dag_is_said(run_dag, tmp_path):
    def write(text):
        path = tmp_path / "dag.py"
        path.write_text(text)
        return path

    with pytest.raises(DagError, match="there is no file"):
        run_dag(tmp_path / "nowhere.py")
    with pytest.raises(DagError, match="defines no DAG: a function decorated with @dag must be called"):
        run_dag(write("from airflow.sdk import dag\n\n@dag()\ndef mine(): ...\n"))
    with pytest.raises(DagError, match=r"(?s)cannot be imported.*ZeroDivisionError"):
        run_dag(write("from airflow.sdk import DAG\n1 / 0\n"))
    with pytest.raises(DagError, match="mine is a function, not a DAG: decorated with @dag it makes one when called"):
        run_dag(_a_function_called_mine())
    two = write("from airflow.sdk import DAG\na, b = DAG('one', schedule=None), DAG('two', schedule=None)\n")
    with pytest.raises(DagError, match=r"several DAGs \(one, two\): say which one with dag_id="):
        run_dag(two)
    with pytest.raises(DagError, match="no DAG 'three', only one, two"):
        run_dag(two, dag_id="three")
    with pytest.raises(DagError, match="is a int: give a DAG"):
        run_dag(3)
    assert find_dag(two, "two").dag_id == "two"


def test_arguments_that_do_not_go_together_are_said(run_dag, new_dag):
    with new_dag("arguments") as dag:
        train("train")
    with pytest.raises(ValueError, match="has no task 'trian'; it has train"):
        run_dag(dag, simulated={"trian": SimulatedTraining()})
    with pytest.raises(ValueError, match="slots=0: give at least 1"):
        run_dag(dag, slots=0)
    with pytest.raises(ValueError, match="has no time zone"):
        run_dag(dag, run_after=datetime(2026, 1, 1))
    with pytest.raises(ValueError, match='belong to engine="simulated"'):
        run_dag(dag, engine="local", nodes=2)
    with pytest.raises(ValueError, match="is none of"):
        run_dag(dag, engine="fast")
    with pytest.raises(ValueError, match="give one of the two"):
        run_dag(dag, simulated={"train": SimulatedTraining(steps_per_s=CURVE)}, simulated_curves={"train": CURVE})


def _a_function_called_mine():
    def mine(): ...

    return mine
