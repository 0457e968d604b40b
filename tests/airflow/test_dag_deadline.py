"""The deadline that a DAG itself gives: alerts that a worker can evaluate, else the next run, else a clear error."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pendulum
import pytest
from airflow.sdk import DAG, Asset, AsyncCallback, DeadlineAlert, DeadlineReference
from airflow.sdk.definitions.deadline import VariableInterval

from elasticflow_airflow.deadlines.dag_deadline import alerts_of, check_time_from_dag, time_from_dag
from elasticflow_airflow.deadlines.parse import DeadlineError
from elasticflow_airflow.operators import ElasticTrainOperator

DUE = pendulum.datetime(2026, 11, 20, 5)
LOGICAL_DATE = pendulum.datetime(2026, 11, 19)
NEXT = pendulum.datetime(2026, 11, 21, 5)


async def tell() -> None:
    """A callback that Airflow can import."""


def alert(reference, interval=timedelta(hours=1), name=None) -> DeadlineAlert:
    return DeadlineAlert(reference=reference, interval=interval, callback=AsyncCallback(tell), name=name)


def found(*alerts, logical_date=LOGICAL_DATE, next_run=lambda: NEXT, variables=None):
    variable = (variables or {}).__getitem__
    return time_from_dag(
        alerts, due=DUE, logical_date=logical_date, next_run=next_run, variable=variable, deadline_of="publish"
    )


@pytest.mark.parametrize(
    ("given", "expected", "words"),
    [
        (alert(DeadlineReference.DAGRUN_LOGICAL_DATE, timedelta(hours=30)), (20, 6), "logical date + 1 d 6 h"),
        (alert(DeadlineReference.DAGRUN_QUEUED_AT, timedelta(hours=2)), (20, 7), "when the run was due, as queued"),
        (alert(DeadlineReference.FIXED_DATETIME(datetime(2026, 11, 22, tzinfo=UTC))), (22, 1), "fixed time + 1 h"),
        (
            alert(DeadlineReference.FIXED_DATETIME(datetime(2026, 11, 22, tzinfo=UTC)), timedelta(hours=-3), "gate"),
            (21, 21),
            "'gate': fixed time - 3 h",
        ),
    ],
)
def test_alerts_that_a_worker_can_evaluate(given, expected, words):
    time = found(given)
    assert (time.at.day, time.at.hour) == expected
    assert words in time.said


def test_the_earliest_alert_counts():
    time = found(
        alert(DeadlineReference.DAGRUN_QUEUED_AT, timedelta(hours=4), "hard"),
        alert(DeadlineReference.DAGRUN_QUEUED_AT, timedelta(hours=3), "soft"),
    )
    assert time.at == DUE.add(hours=3)
    assert time.said.startswith("earliest deadline alert of the DAG, 'soft'")


def test_an_alert_counts_before_the_next_run_and_what_cannot_be_evaluated_is_said():
    average = alert(DeadlineReference.AVERAGE_RUNTIME(5), name="usual")
    time = found(average, alert(DeadlineReference.DAGRUN_QUEUED_AT, timedelta(hours=40)))
    assert time.at == DUE.add(hours=40)
    assert "cannot be evaluated in a worker: 'usual': the average runtime is known" in time.said


def test_without_an_alert_the_next_run_is_the_deadline():
    assert found().at == NEXT
    time = found(alert(DeadlineReference.AVERAGE_RUNTIME(5), name="usual"))
    assert time.at == NEXT
    assert "the next run of the DAG is due then" in time.said
    assert "'usual'" in time.said


def test_a_run_without_a_logical_date():
    time = found(alert(DeadlineReference.DAGRUN_LOGICAL_DATE), logical_date=None)
    assert time.at == NEXT
    assert "this run has none" in time.said


def test_an_interval_from_a_variable_is_read_in_seconds():
    given = alert(DeadlineReference.DAGRUN_QUEUED_AT, VariableInterval("slo_s"), "slo")
    assert found(given, variables={"slo_s": "7200"}).at == DUE.add(hours=2)
    with pytest.raises(DeadlineError, match="alert 'slo' takes its interval from the Variable 'slo_s', which is not"):
        found(given)
    with pytest.raises(DeadlineError, match="'slo_s' = 'soon': it must be a whole number of seconds"):
        found(given, variables={"slo_s": "soon"})


def test_neither_alert_nor_next_run_is_an_error_that_names_the_remedy():
    with pytest.raises(DeadlineError, match=r"deadline_of='publish' without deadline=: .*say deadline= too"):
        found(next_run=lambda: None)
    with pytest.raises(DeadlineError, match="'usual': the average runtime"):
        found(alert(DeadlineReference.AVERAGE_RUNTIME(5), name="usual"), next_run=lambda: None)


def test_airflow_takes_one_alert_or_a_list():
    one = alert(DeadlineReference.DAGRUN_QUEUED_AT)
    assert alerts_of(DAG("one", deadline=one)) == (one,)
    assert alerts_of(DAG("many", deadline=[one, one])) == (one, one)
    assert alerts_of(DAG("none")) == alerts_of(None) == ()


def train(**changes) -> ElasticTrainOperator:
    arguments = {"script": "train.py", "steps": 10, "global_batch_size": 8, "deadline_of": "dag_run", **changes}
    return ElasticTrainOperator(task_id="train", **arguments)


@pytest.mark.parametrize("schedule", [None, "@once", "@continuous", [Asset("rows")]])
def test_a_dag_that_gives_no_time_is_refused_at_parse(schedule):
    with (
        DAG("silent", schedule=schedule, max_active_runs=1),
        pytest.raises(DeadlineError, match="DAG 'silent' has no deadline alert and no schedule by the clock"),
    ):
        train()


def test_a_dag_with_an_average_only_is_refused_at_parse_with_its_name():
    usual = alert(DeadlineReference.AVERAGE_RUNTIME(5), name="usual")
    with (
        DAG("average", schedule=None, deadline=usual),
        pytest.raises(DeadlineError, match=r"no deadline alert that a worker can evaluate \('usual'"),
    ):
        train()


def test_a_dag_that_gives_a_time_is_accepted():
    with DAG("daily", schedule="@daily"):
        train()
    with DAG("alerted", schedule=None, deadline=alert(DeadlineReference.DAGRUN_QUEUED_AT)):
        train()
    with DAG("own", schedule=None):
        train(deadline="07:30")


def test_a_task_that_joins_its_dag_later_is_checked_when_the_file_has_been_read():
    dag = DAG("later", schedule=None)
    dag.add_task(train())
    with pytest.raises(DeadlineError, match="DAG 'later' has no deadline alert"):
        dag.resolve_template_files()


def test_a_target_that_is_not_downstream_is_refused_when_the_file_has_been_read():
    with DAG("typo", schedule=None) as dag:
        train(deadline="07:30", deadline_of="publsih")
    with pytest.raises(ValueError, match="deadline_of='publsih' is no task downstream of 'train'"):
        dag.resolve_template_files()
    with DAG("mine", schedule="@daily") as dag:
        train(deadline_of="train")  # this training itself
    dag.resolve_template_files()


def test_a_broken_timetable_is_left_to_the_run():
    class Broken:
        dag_id, timetable = "broken", object()

    check_time_from_dag(Broken, (), "dag_run")
