"""``airflow elasticflow forecast DAG_FILE``: the real command against a real service, with its exit status."""

from __future__ import annotations

import itertools
import time

import pytest

from elasticflow_airflow.airflow_cli.forecast import ForecastByConnection, forecast
from elasticflow_airflow.client import ElasticFlowClient

DAG_FILE = """
from datetime import timedelta
from airflow.sdk import DAG
from elasticflow_airflow.operators import ElasticTrainOperator

with DAG({dag_id!r}, schedule={schedule!r}):
    ElasticTrainOperator(task_id="train", script="train.py", steps={steps}, global_batch_size=8,
        deadline=timedelta(minutes={minutes}), scaling_curve={{1: 10.0, 2: 18.0, 4: 32.0}}, {more})
"""


@pytest.fixture
def ask(tmp_path, embedded_service, monkeypatch, capsys):
    """Write DAG files and run the command; its exit status and what it said."""
    monkeypatch.setenv("COLUMNS", "300")
    (tmp_path / "train.py").write_text("print('the fake engine never runs this')")
    with ElasticFlowClient(embedded_service) as client:
        limit = time.monotonic() + 30
        while not client.health().slots:
            assert time.monotonic() < limit, "the service has not looked at its nodes"
            time.sleep(0.05)

    numbers = itertools.count()

    def run(*texts: str, hours=1.0, **options) -> tuple[int, str]:
        files = []
        for text in texts:
            # Of its own: byte code of another text of the same length and second would be taken for it.
            path = tmp_path / f"dag{next(numbers)}.py"
            path.write_text(text)
            files.append(str(path))
        given = {"fail_on_miss": True, "only_new": False, "check": False, "as_json": False, "conn_id": None, **options}
        status = 0
        try:
            forecast(dag_files=files, hours=hours, **given)
        except SystemExit as ended:
            status = ended.code
        return status, capsys.readouterr().out

    return run


def dag(dag_id="quick", schedule="*/30 * * * *", steps=1000, minutes=10, more="") -> str:
    return DAG_FILE.format(dag_id=dag_id, schedule=schedule, steps=steps, minutes=minutes, more=more)


def test_runs_that_will_make_it(ask):
    status, said = ask(dag())
    assert status == 0, said
    assert said.count("kept, planned, due") == 2
    assert "all 2 will be kept" in said


def test_as_json_it_is_one_object_with_the_forecast_of_each_connection(ask):
    status, said = ask(dag(), as_json=True)
    assert status == 0, said
    told = ForecastByConnection.model_validate_json(said[said.index("{\n") :])
    assert list(told.forecasts) == ["elasticflow_default"]
    assert told.forecasts["elasticflow_default"].kept == 2
    assert (told.unknown, told.best_effort) == ([], [])


def test_a_miss_ends_with_status_1_and_says_what_would_do(ask):
    hopeless = dag("hopeless", steps=100_000)
    status, said = ask(hopeless)
    assert status == 1, said
    assert "missed, planned, due" in said
    assert "too long even with the cluster to itself" in said
    assert ask(hopeless, fail_on_miss=False)[0] == 0
    assert ask(hopeless, fail_on_miss=False, check=True)[0] == 3


def test_a_later_deadline_that_the_author_allows_is_no_miss(ask):
    def late(minutes):
        more = f"on_reject='late', latest_deadline=timedelta(minutes={minutes})"
        return dag("late", schedule="0 * * * *", steps=32 * 1200, more=more)

    status, said = ask(late(40))
    assert status == 0, said
    assert "all 1 will be kept; 1 by a later deadline, as they allow" in said
    status, said = ask(late(12))
    assert status == 1, said
    assert "nothing up to its latest_deadline can be promised either" in said


def test_files_are_judged_together(ask):
    """Each needs the whole cluster for some 200 s: two fit into ten minutes, not four."""
    files = [dag(f"same{number}", schedule="0 * * * *", steps=6400, minutes=10) for number in range(4)]
    assert ask(*files[:2])[0] == 0
    status, said = ask(*files)
    assert status == 1
    assert "does not fit beside" in said


def test_what_cannot_be_told_is_said(ask):
    unmeasured = dag("unmeasured").replace("scaling_curve={1: 10.0, 2: 18.0, 4: 32.0}, ", "")
    status, said = ask(unmeasured, dag("free").replace("deadline=timedelta(minutes=10)", "best_effort=True"))
    assert status == 0, said
    assert "its speed is not known: let it run once, or give scaling_curve=" in said
    assert "best effort, without a deadline: free.train" in said
    status, said = ask(dag("by_hand", schedule=None))
    assert "no run of these files is due by a timetable" in said


def test_without_a_file_everything_else_is_asked_about(ask):
    status, said = ask()
    assert (status, said.strip()) == (0, "nothing with a deadline is due")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere", "No module named 'nowhere'"),
        (dag(more="on_miss='shrug'"), "on_miss='shrug' is none of"),
        (dag().replace("train.py", "gone.py"), "script='gone.py' is not there"),
    ],
)
def test_bad_input_ends_with_status_2(ask, text, words):
    status, said = ask(text)
    assert status == 2
    assert words in said


def test_a_service_that_is_away_ends_with_status_2(ask, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_ELSEWHERE", "elasticflow://127.0.0.1:1")
    monkeypatch.setattr("elasticflow_airflow.airflow_cli.forecast._AWAY_S", 0.1)
    status, said = ask(dag(more="elasticflow_conn_id='elsewhere'"))
    assert status == 2
    assert "the service could not be asked:" in said


def test_a_file_without_elastic_tasks_is_fine(ask):
    status, said = ask("from airflow.sdk import DAG\nwith DAG('plain', schedule='@daily'):\n    pass\n")
    assert status == 0
    assert "no elastic task in these files" in said
