"""The runs that a DAG file will have: read without a database, rendered as far as a run is not needed for it."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pendulum
import pytest

from elasticflow_airflow.recurring.runs_of_dag_files import BadDagFileError, PlannedRuns, plan, read_dags, trimmed

NOW = pendulum.datetime(2026, 11, 20, 6)
HEAD = """
from datetime import timedelta
import pendulum
from airflow.sdk import DAG, DeadlineAlert, DeadlineReference, AsyncCallback, task
from airflow.providers.standard.operators.empty import EmptyOperator
from elasticflow_airflow.operators import ElasticTrainOperator

def train(task_id="train", **changes):
    return ElasticTrainOperator(task_id=task_id, **{"script": "train.py", "steps": 100, "global_batch_size": 8,
        "deadline": "07:30", "scaling_curve": {1: 2.0}, **changes})

def daily(dag_id, **options):
    return DAG(dag_id, **{"schedule": "0 5 * * *", "start_date": pendulum.datetime(2026, 1, 1, tz="UTC"), **options})
"""


@pytest.fixture
def made(tmp_path):
    """Write a DAG file and plan its runs of two days."""
    (tmp_path / "train.py").write_text("print('trained')")

    def make(text: str, hours: float = 48.0) -> PlannedRuns:
        (tmp_path / "dag.py").write_text(HEAD + text)
        dags = read_dags([str(tmp_path / "dag.py")])
        return plan(dags, namespaces={"": "ours"}, now=NOW, window=timedelta(hours=hours))

    return make


def the_runs(found: PlannedRuns):
    (runs,) = found.runs.values()
    return runs


def utc(at: float) -> str:
    return pendulum.from_timestamp(at).format("DD HH:mm")


def test_every_due_run_with_its_deadline(made):
    found = made("with daily('nightly'):\n    train()\n")
    runs = the_runs(found)
    assert list(found.runs) == ["elasticflow_default"]
    assert [(utc(run.due_at), utc(run.submission.deadline_at)) for run in runs] == [
        ("21 05:00", "21 07:30"),
        ("22 05:00", "22 07:30"),
    ]
    assert runs[0].submission.identity.namespace == "ours"
    assert runs[0].submission.identity.recurring_key == '["ours", "nightly", "train", -1]'
    assert runs[0].submission.command.script == "train.py"
    assert runs[0].submission.next_run_at is None


def test_the_declared_reserve_counts_as_there_is_no_history(made):
    found = made(
        "with daily('nightly'):\n"
        "    one = train(deadline_of='publish', downstream_reserve=timedelta(minutes=30))\n"
        "    one >> EmptyOperator(task_id='publish')\n"
    )
    assert utc(the_runs(found)[0].submission.deadline_at) == "21 07:00"


def test_a_deadline_from_the_dag(made):
    next_run = made("with daily('nightly'):\n    train(deadline=None, deadline_of='train')\n")
    assert [utc(run.submission.deadline_at) for run in the_runs(next_run)] == ["22 05:00", "23 05:00"]
    alerted = made(
        "async def tell(): ...\n"
        "alert = DeadlineAlert(reference=DeadlineReference.DAGRUN_QUEUED_AT, interval=timedelta(hours=3),\n"
        "    callback=AsyncCallback(tell))\n"
        "with daily('nightly', deadline=alert):\n    train(deadline=None, deadline_of='train')\n"
    )
    assert utc(the_runs(alerted)[0].submission.deadline_at) == "21 08:00"


def test_templates_are_rendered_as_in_a_run(made):
    found = made(
        "with daily('nightly', params={'n': 7}):\n"
        "    train(steps='{{ params.n }}', deadline='{{ data_interval_end.add(hours=4) }}',\n"
        "        script_args=['{{ ti.xcom_pull(\"a\") }}'], env={'A': '{{ var.value.a }}'})\n"
    )
    first = the_runs(found)[0].submission
    assert (first.length.steps, utc(first.deadline_at)) == (7, "21 09:00")


def test_a_length_that_only_a_run_knows_is_left_to_the_service(made):
    found = made(
        "with daily('nightly'):\n"
        "    @task\n    def extract(): return 5\n"
        "    train(steps=None, epochs=2, samples=extract())\n"
        "    train('other', steps='{{ ti.xcom_pull(\"a\") }}')\n"
    )
    lengths = {run.submission.identity.task_id: run.submission.length for run in the_runs(found)}
    assert (lengths["train"].epochs, lengths["train"].samples) == (2, None)
    assert lengths["other"].steps is None


def test_a_deadline_that_only_a_run_knows_is_unknown(made):
    found = made("with daily('nightly'):\n    train(deadline='{{ ti.xcom_pull(\"by\") }}')\n", hours=24)
    assert found.runs == {}
    (unknown,) = found.unknown
    assert (unknown.task, unknown.due) == ("nightly.train", pendulum.datetime(2026, 11, 21, 5))
    assert "needs a run: it asks for ti.xcom_pull" in unknown.reason


def test_what_an_author_chose_for_a_rejection_is_asked_about(made):
    found = made(
        "with daily('nightly', params={'until': '09:00'}):\n"
        "    train('a', on_reject='best_effort')\n"
        "    train('b', on_reject='renegotiate', latest_deadline='{{ params.until }}')\n"
        "    train('c', on_reject='late', latest_deadline=timedelta(hours=3))\n"
        "    train('d', on_reject='late', latest_deadline='{{ ti.xcom_pull(\"x\") }}')\n",
        hours=24.0,
    )
    asked = {run.submission.identity.task_id: run.submission for run in the_runs(found)}
    latest = {name: one.latest_deadline_at and utc(one.latest_deadline_at) for name, one in asked.items()}
    assert {name: one.on_reject for name, one in asked.items()} == {
        "a": "best_effort",
        "b": "renegotiate",
        "c": "late",
        "d": "fail",
    }
    assert latest == {"a": None, "b": "21 09:00", "c": "21 08:00", "d": None}


def test_mapped_tasks(made):
    found = made(
        "with daily('nightly'):\n"
        "    @task\n    def extract(): return [1, 2]\n"
        "    some = {'script': 'train.py', 'global_batch_size': 8, 'deadline': '07:30', 'scaling_curve': {1: 2.0}}\n"
        "    ElasticTrainOperator.partial(task_id='known', **some).expand(steps=[10, 20])\n"
        "    ElasticTrainOperator.partial(task_id='unknown', **some).expand(steps=extract())\n",
        hours=24,
    )
    runs = the_runs(found)
    assert [(run.submission.identity.map_index, run.submission.length.steps) for run in runs] == [(0, 10), (1, 20)]
    (unknown,) = found.unknown
    assert (unknown.task, unknown.reason) == ("nightly.unknown", "it is mapped over what only a run knows")


def test_what_a_function_decides_is_unknown(made):
    found = made(
        "with daily('nightly'):\n"
        "    @task.elastic_train(script='train.py', steps=5, global_batch_size=8, deadline='07:30')\n"
        "    def decided(): return ['--n', '3']\n"
        "    decided()\n"
        "    @task.elastic_train(script='train.py', steps=5, global_batch_size=8, deadline_of='dag_run')\n"
        "    def by_hand(): return {'deadline': '08:00'}\n"
        "    with DAG('alone', schedule=None):\n        by_hand()\n"
    )
    assert [(one.task, one.reason) for one in found.unknown] == [
        ("alone.by_hand", "its function decides in a run what is trained"),
        ("nightly.decided", "its function decides in a run what is trained"),
    ]


def test_what_has_no_deadline_or_no_timetable(made):
    found = made(
        "with daily('free'):\n    train(deadline=None, best_effort=True)\n"
        "with daily('by_hand', schedule=None):\n    train()\n"
        "with daily('other'):\n    EmptyOperator(task_id='nothing')\n"
    )
    assert (found.runs, found.unknown, found.best_effort, found.tasks) == ({}, [], ["free.train"], 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere\n", "No module named 'nowhere'"),
        ("x = 1\n", "has no DAG"),
        ("with daily('d'):\n    train(deadline='soon')\n", "deadline='soon' is not a time of day"),
        ("with daily('d'):\n    train(script='gone.py')\n", "task d.train, due 2026-11-21 05:00 UTC: script='gone.py'"),
        ("with daily('d'):\n    train(deadline_of='publsih')\n", "deadline_of='publsih' is no task downstream"),
        (
            "with daily('d', schedule=None):\n    train(deadline=None, deadline_of='dag_run')\n",
            "no deadline alert and no schedule",
        ),
        ("with daily('d', params={'n': 0}):\n    train(steps='{{ params.n }}')\n", "must be a whole number"),
    ],
)
def test_bad_input_is_named(made, text, words):
    with pytest.raises(BadDagFileError, match=words):
        made(text)


def test_a_file_that_is_not_there():
    with pytest.raises(BadDagFileError, match=r"nowhere\.py is not there"):
        read_dags([str(Path("nowhere.py"))])


def test_too_many_runs_keep_the_soonest(made):
    found = made("for n in range(3):\n    with daily(f'd{n}', schedule='* * * * *'):\n        train()\n")
    kept, left_out = trimmed(found)
    assert (len(the_runs(kept)), left_out) == (500, 100)
    assert {run.submission.identity.dag_id for run in the_runs(kept)} == {"d0", "d1", "d2"}
