"""What the calendar is fed: from serialized DAGs in a real metadata database, to one service per connection."""

from __future__ import annotations

import time
from datetime import timedelta

import pendulum
import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowNotFoundException

from elasticflow_airflow.airflow_cli.feed import feed
from elasticflow_airflow.api.insight import CalendarAnswer, CalendarRequest, DueRuns
from elasticflow_airflow.client import ElasticFlowClient, ElasticFlowError, ServiceUnavailable
from elasticflow_airflow.operators import ElasticTrainOperator
from elasticflow_airflow.recurring import calendar_feed
from elasticflow_airflow.recurring.calendar_feed import (
    ElasticTaskOfDag,
    Found,
    TaskDue,
    elastic_tasks,
    feed_services,
    find_due_runs,
)

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

    told = feed_services(found_as(one("a", "x"), one("b", "y", tuple(range(1500))), one("c", "x")), post, whole=False)
    assert sent == [("x", 2), *[("y", 250)] * 6]
    answers = told.answers
    assert (answers["x"].taken, answers["x"].unknown) == (2, ["c"])
    assert (answers["y"].taken, answers["y"].unknown) == (1500, ["b"] * 6)


def found_as(*tasks, **more):
    return Found(read_at=READ_AT, tasks=list(tasks), **more)


READ_AT = pendulum.datetime(2026, 11, 20, 6)


def test_a_service_that_is_away_keeps_no_other_from_being_told():
    tasks = [
        TaskDue(dag_id="d", task_id=name, conn_id=name, map_indexes=(-1,), due=(READ_AT.add(hours=1),))
        for name in ("a", "b", "c", "d")
    ]
    wrong = {"a": ServiceUnavailable("nobody answers"), "c": AirflowNotFoundException("no such connection")}

    def post(conn_id, make):
        if conn_id in wrong:
            raise wrong[conn_id]
        return CalendarAnswer(taken=len(make("default").tasks), unknown=[])

    told = feed_services(found_as(*tasks), post, whole=True)
    assert told.errors == wrong
    assert set(told.answers) == {"b", "d"}


def test_each_service_hears_what_there_is_besides_and_nobody_of_a_part():
    due = (READ_AT.add(hours=1),)
    found = found_as(
        TaskDue(dag_id="d", task_id="one", conn_id="x", map_indexes=(-1,), due=due),
        TaskDue(dag_id="d", task_id="many", conn_id="x", map_indexes=(0, 1), due=due),
        TaskDue(dag_id="d", task_id="countless", conn_id="x", map_indexes=tuple(range(1000)), due=due),
        TaskDue(dag_id="d", task_id="elsewhere", conn_id="y", map_indexes=(-1,), due=due),
        unsure=[("d", "templated")],
        former={"z"},
    )
    sent = {}

    def post(conn_id, make):
        request = make(f"ns-{conn_id}")
        if request.whole is not None:
            named = {f"{task.dag_id}.{task.task_id}": task.map_indexes for task in request.whole.tasks}
            assert request.whole.read_at == READ_AT.timestamp()
            sent[conn_id] = (request.whole.namespace, named)
        return CalendarAnswer(taken=len(request.tasks), unknown=[], forgotten=["d.old"] if request.whole else [])

    told = feed_services(found, post, whole=True)
    everywhere = {"d.countless": None, "d.elsewhere": None, "d.many": None, "d.one": None, "d.templated": None}
    assert sent == {
        "x": ("ns-x", {**everywhere, "d.one": [-1], "d.many": [0, 1]}),
        "y": ("ns-y", {**everywhere, "d.elsewhere": [-1]}),
        "z": ("ns-z", everywhere),
    }
    assert [answer.forgotten for answer in told.answers.values()] == [["d.old"]] * 3
    sent.clear()
    assert set(feed_services(found, post, whole=False).answers) == {"x", "y"}
    assert sent == {}


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
    store(
        nightly,
        next_dagrun_create_after=NOW.add(days=1, hours=-1),
        next_dagrun_data_interval_start=NOW.add(hours=-1),
        next_dagrun_data_interval_end=NOW.add(days=1, hours=-1),
    )
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
    assert answer.unsure == [("feed_template", "train")]
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

    monkeypatch.setattr("elasticflow_airflow.airflow_cli.feed.post_to_service", post)
    feed(hours=1.0, dag_id="feed_command", dry_run=True)
    assert told == []
    assert "told to nobody" in capsys.readouterr().out
    feed(hours=1.0, dag_id="feed_command", dry_run=False)
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


@pytest.mark.slow
def test_a_service_that_is_away_ends_the_command_with_a_status(store, monkeypatch, capsys, tmp_path):
    with DAG("feed_away", schedule="@daily", start_date=START) as dag:
        train()
    store(dag)
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")
    monkeypatch.setenv("AIRFLOW_CONN_ELASTICFLOW_DEFAULT", "elasticflow://127.0.0.1:1")
    with pytest.raises(SystemExit) as ended:
        feed(hours=48.0, dag_id="feed_away", dry_run=False)
    assert ended.value.code == 1
    assert "elasticflow_default: the service was not told:" in capsys.readouterr().out


def test_the_command_tells_the_others_when_a_service_is_away(store, monkeypatch, capsys):
    with DAG("feed_both", schedule="0 5 * * *", start_date=START) as dag:
        train("first", elasticflow_conn_id="a_is_away")
        train("second", elasticflow_conn_id="b_is_there")
    store(dag)

    def post(conn_id, make):
        if conn_id != "b_is_there":
            raise ServiceUnavailable("nobody answers", "start it")
        return CalendarAnswer(taken=len(make("default").tasks), unknown=[])

    monkeypatch.setattr("elasticflow_airflow.airflow_cli.feed.post_to_service", post)
    with pytest.raises(SystemExit) as ended:
        feed(hours=48.0, dag_id="feed_both", dry_run=False)
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert "a_is_away: the service was not told: nobody answers (start it)" in said
    assert "b_is_there: 1 tasks told" in said
    monkeypatch.setattr(calendar_feed, "post_to_service", post)
    with pytest.raises(ElasticFlowError, match="not every service was told: a_is_away: nobody answers"):
        calendar_feed.feed_calendar()
    store(dag, is_stale=True)


def expected_in_two_days(client):
    items = client.forecast(48.0).items
    return {f"{item.namespace}: {item.task}" for item in items if item.kind == "expected"}


def test_the_real_service_forgets_what_is_no_more(store, embedded_service, monkeypatch, capsys):
    """A DAG that is deleted, one that loses a task, one that is paused; and another Airflow's."""
    monkeypatch.setenv("AIRFLOW__CORE__MIN_SERIALIZED_DAG_UPDATE_INTERVAL", "0")
    monkeypatch.setenv("_AIRFLOW_PROCESS_CONTEXT", "server")

    def put(dag_id, *task_ids, conn_id="elasticflow_default", **changes):
        with DAG(dag_id, schedule="0 5 * * *", start_date=START) as dag:
            for task_id in task_ids:
                train(task_id, elasticflow_conn_id=conn_id)
        store(dag, **changes)

    def tell(dag_id=None):
        feed(hours=48.0, dag_id=dag_id, dry_run=False)
        return capsys.readouterr().out

    put("feed_deleted", "train")
    put("feed_changed", "train", "old")
    put("feed_pausing", "train")
    tell()
    with ElasticFlowClient(embedded_service) as client:
        theirs = DueRuns(namespace="theirs", dag_id="d", task_id="t", due_at=[time.time() + 3600.0])
        client.feed_calendar(CalendarRequest(tasks=[theirs]))
        before = expected_in_two_days(client)
        ours = {f"default: feed_{name}" for name in ("deleted.train", "changed.train", "changed.old", "pausing.train")}
        assert before >= {*ours, "theirs: d.t"}
        put("feed_deleted", "train", is_stale=True)
        put("feed_changed", "train")
        put("feed_pausing", "train", is_paused=True)
        said = tell("feed_changed")
        assert "are no more" not in said
        assert expected_in_two_days(client) == before
        said = tell()
        assert "nothing is kept free any more for feed_changed.old, feed_deleted.train: they are no more" in said
        gone = {f"default: feed_{name}" for name in ("deleted.train", "changed.old", "pausing.train")}
        assert expected_in_two_days(client) == before - gone


def test_a_service_that_only_deleted_dags_name_is_told_if_it_is_there(store, monkeypatch, capsys):
    with DAG("feed_former", schedule="@daily", start_date=START) as dag:
        train(elasticflow_conn_id="former")
    store(dag, is_stale=True)
    told = []

    def post(conn_id, make):
        told.append(conn_id)
        if conn_id == "former":
            raise AirflowNotFoundException("no such connection")
        return CalendarAnswer(taken=len(make("default").tasks), unknown=[])

    monkeypatch.setattr("elasticflow_airflow.airflow_cli.feed.post_to_service", post)
    feed(hours=48.0, dag_id=None, dry_run=False)
    assert "former" in told
    said = capsys.readouterr().out
    assert "former: only DAGs that are no more name it, and it was not told: no such connection" in said


def test_the_function_for_people_with_a_dag_of_their_own(store, monkeypatch):
    with DAG("feed_function", schedule="0 5 * * *", start_date=START) as dag:
        train()
    store(dag)
    monkeypatch.setattr(calendar_feed, "post_to_service", lambda conn_id, make: CalendarAnswer(taken=1, unknown=[]))
    assert calendar_feed.feed_calendar()["elasticflow_default"].taken >= 1
