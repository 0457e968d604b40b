"""What the calendar is fed: from serialized DAGs in a real metadata database, to one service per connection."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace

import pendulum
import pytest
from airflow.sdk import DAG, task

from elasticflow_airflow import calendar_feed
from elasticflow_airflow.calendar_feed import ElasticTaskOfDag, TaskDue, elastic_tasks, feed_services, find_due_runs
from elasticflow_airflow.feed_command import feed
from elasticflow_airflow.insight import CalendarAnswer
from elasticflow_airflow.operators import ElasticTrainOperator

START = pendulum.datetime(2026, 1, 1, tz="UTC")


class OurOwnTrain(ElasticTrainOperator):
    """A team's subclass: known by its fields, not by its name."""


def train(task_id="train", kind=ElasticTrainOperator, **changes):
    arguments = {"script": "train.py", "steps": 10, "global_batch_size": 8, "deadline": "07:30", **changes}
    return kind(task_id=task_id, **arguments)


def serialized(dag):
    from airflow.serialization.serialized_objects import DagSerialization

    return DagSerialization.to_dict(dag)


def test_elastic_tasks_are_found_in_a_serialized_dag():
    with DAG("mixed", schedule="@daily", start_date=START) as dag:

        @task
        def extract():
            return [1]

        @task.elastic_train(script="train.py", steps=5, global_batch_size=8, deadline="07:30")
        def decided():
            return ["--n", "3"]

        train()
        decided()
        train("ours", kind=OurOwnTrain, elasticflow_conn_id="gpus")
        ElasticTrainOperator.partial(
            task_id="many", script="t.py", global_batch_size=8, deadline="07:30", elasticflow_conn_id="gpus"
        ).expand(steps=extract())
    assert elastic_tasks(serialized(dag)) == [
        ElasticTaskOfDag(task_id="train", conn_id="elasticflow_default", mapped=False),
        ElasticTaskOfDag(task_id="decided", conn_id="elasticflow_default", mapped=False),
        ElasticTaskOfDag(task_id="ours", conn_id="gpus", mapped=False),
        ElasticTaskOfDag(task_id="many", conn_id="gpus", mapped=True),
    ]


def test_each_service_is_told_of_its_own_tasks_in_pieces():
    due = (pendulum.datetime(2026, 11, 21, 5),)

    def one(name, conn_id, indexes=(-1,)):
        return TaskDue(dag_id="d", task_id=name, conn_id=conn_id, map_indexes=indexes, due=due)

    sent = []

    def post(conn_id, make):
        request = make(f"ns-{conn_id}")
        sent.append((conn_id, len(request.tasks)))
        assert {run.namespace for run in request.tasks} == {f"ns-{conn_id}"}
        assert request.tasks[0].due_at == [due[0].timestamp()]
        return CalendarAnswer(taken=len(request.tasks), unknown=[request.tasks[-1].task_id])

    answers = feed_services([one("a", "x"), one("b", "y", tuple(range(1500))), one("c", "x")], post)
    assert sent == [("x", 2), *[("y", 250)] * 6]
    assert (answers["x"].taken, answers["x"].unknown) == (2, ["c"])
    assert (answers["y"].taken, answers["y"].unknown) == (1500, ["b"] * 6)


@pytest.fixture
def store(airflow_db, request):
    """Serialize a DAG into the metadata database; its DagModel can be changed."""
    from airflow.dag_processing.collection import update_dag_parsing_results_in_db
    from airflow.models.dag import DagModel
    from airflow.models.dagbundle import DagBundleModel
    from airflow.serialization.serialized_objects import LazyDeserializedDAG
    from airflow.utils.session import create_session

    def put(dag, **changes):
        with create_session() as session:
            session.merge(DagBundleModel(name="dags-folder"))
            session.flush()
            parsed = [LazyDeserializedDAG.from_dag(dag)]
            update_dag_parsing_results_in_db("dags-folder", None, parsed, {}, None, set(), session)
            model = session.get(DagModel, dag.dag_id)
            model.is_paused = False
            for name, value in changes.items():
                setattr(model, name, value)

    return put


def found(*dag_ids, **options):
    from airflow.utils.session import create_session

    with create_session() as session:
        return find_due_runs(session, now=NOW, dag_ids=dag_ids, **options)


NOW = pendulum.datetime(2026, 11, 20, 6)


def test_what_is_due_of_every_kind_of_dag(store):
    with DAG("feed_nightly", schedule="0 5 * * *", start_date=START) as nightly:
        train()
    store(nightly, next_dagrun_create_after=NOW.add(days=1, hours=-1))
    with DAG("feed_paused", schedule="0 5 * * *", start_date=START) as paused:
        train()
    store(paused, is_paused=True)
    with DAG("feed_by_hand", schedule=None) as by_hand:
        train()
    store(by_hand)
    with DAG("feed_delta", schedule=timedelta(hours=20), start_date=START) as delta:
        train()
    store(
        delta,
        next_dagrun_create_after=NOW.add(hours=3),
        next_dagrun_data_interval_start=NOW.add(hours=-17),
        next_dagrun_data_interval_end=NOW.add(hours=3),
    )
    with DAG("feed_late", schedule="0 5 * * *", start_date=START) as late:
        train()
    store(
        late,
        next_dagrun_create_after=NOW.add(days=-3, hours=-1),
        next_dagrun_data_interval_start=NOW.add(days=-4, hours=-1),
        next_dagrun_data_interval_end=NOW.add(days=-3, hours=-1),
    )
    with DAG("feed_other", schedule="0 5 * * *", start_date=START) as other:

        @task
        def nothing(): ...

        nothing()
    store(other)
    with DAG("feed_template", schedule="0 5 * * *", start_date=START, params={"conn": "a"}) as template:
        train(elasticflow_conn_id="{{ params.conn }}")
    store(template)
    names = ("nightly", "paused", "by_hand", "delta", "late", "other", "template")
    answer = found(*(f"feed_{name}" for name in names), "feed_missing")
    due = {task.dag_id.removeprefix("feed_"): [when.strftime("%d %H:%M") for when in task.due] for task in answer.tasks}
    assert due == {
        "nightly": ["21 05:00", "22 05:00"],
        "paused": [],
        "by_hand": [],
        "delta": ["20 09:00", "21 05:00", "22 01:00"],
        "late": ["21 05:00", "22 05:00"],
    }
    assert [problem.split(":")[0] for problem in answer.problems] == [
        "DAG 'feed_missing' is not there",
        "task feed_template.train",
    ]


def test_a_mapped_task_is_expected_with_the_indexes_of_its_newest_run(store):
    from airflow.models.dagrun import DagRun
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState
    from airflow.utils.types import DagRunType

    with DAG("feed_mapped", schedule="0 5 * * *", start_date=START) as dag:
        ElasticTrainOperator.partial(task_id="many", script="t.py", global_batch_size=8, deadline="07:30").expand(
            steps=[10, 20, 30]
        )
    store(dag, next_dagrun_create_after=NOW.add(days=1, hours=-1))
    (task,) = found("feed_mapped").tasks
    assert task.map_indexes == ()
    with create_session() as session:
        known = SerializedDagModel.get_dag("feed_mapped", session=session)
        version = SerializedDagModel.get("feed_mapped", session=session).dag_version_id
        for day, indexes in ((1, 3), (2, 2)):
            run = DagRun(
                dag_id="feed_mapped",
                run_id=f"run{day}",
                logical_date=START.add(days=day),
                run_after=START.add(days=day),
                run_type=DagRunType.SCHEDULED,
                state=DagRunState.SUCCESS,
            )
            session.add(run)
            session.flush()
            for index in range(indexes):
                session.add(
                    TaskInstance(known.get_task("many"), run_id=run.run_id, map_index=index, dag_version_id=version)
                )
    (task,) = found("feed_mapped").tasks
    assert task.map_indexes == (0, 1)


def test_the_command_tells_and_prints(store, monkeypatch, capsys):
    with DAG("feed_command", schedule="* * * * *", start_date=START) as dag:
        train()
    store(dag)
    told = []

    def post(conn_id, make):
        told.append(make("default"))
        return CalendarAnswer(taken=1, unknown=["feed_command.train"])

    monkeypatch.setattr("elasticflow_airflow.feed_command.post_to_service", post)
    feed(SimpleNamespace(hours=1.0, dag_id="feed_command", dry_run=True))
    assert told == []
    assert "told to nobody" in capsys.readouterr().out
    feed(SimpleNamespace(hours=1.0, dag_id="feed_command", dry_run=False))
    (request,) = told
    assert (request.tasks[0].dag_id, request.tasks[0].task_id, request.tasks[0].namespace) == (
        "feed_command",
        "train",
        "default",
    )
    assert 59 <= len(request.tasks[0].due_at) <= 60
    said = capsys.readouterr().out
    assert "feed_command.train" in said
    assert "1 tasks told; nothing can be kept free yet for feed_command.train" in said


def test_a_service_that_is_away_ends_the_command_with_a_status(store, monkeypatch, capsys, tmp_path):
    with DAG("feed_away", schedule="@daily", start_date=START) as dag:
        train()
    store(dag)
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")
    monkeypatch.setenv("AIRFLOW_CONN_ELASTICFLOW_DEFAULT", "elasticflow://127.0.0.1:1")
    with pytest.raises(SystemExit) as ended:
        feed(SimpleNamespace(hours=48.0, dag_id="feed_away", dry_run=False))
    assert ended.value.code == 1
    assert "the service was not told:" in capsys.readouterr().out


def test_the_function_for_people_with_a_dag_of_their_own(store, monkeypatch):
    with DAG("feed_function", schedule="0 5 * * *", start_date=START) as dag:
        train()
    store(dag)
    monkeypatch.setattr(calendar_feed, "post_to_service", lambda conn_id, make: CalendarAnswer(taken=1, unknown=[]))
    assert calendar_feed.feed_calendar()["elasticflow_default"].taken >= 1
