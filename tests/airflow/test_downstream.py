"""What earlier runs show of the time from the end of training to its target's end, and what is kept free for it."""

from __future__ import annotations

from datetime import datetime, timedelta
from types import SimpleNamespace

import pendulum
import pytest
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time.comms import ErrorResponse, GetDagRun, GetPreviousDagRun, GetPreviousTI

from elasticflow_airflow.api import JobIdentity
from elasticflow_airflow.deadlines.downstream import EndedJob, observed, quantile, reserve_for

NOW = pendulum.datetime(2026, 11, 20)
MINE = JobIdentity(dag_id="daily", run_id="run0", task_id="train")
RESERVE = timedelta(minutes=5)


class Airflow:
    """Answers like the Execution API, of runs a day apart, newest first; minutes from the end of training."""

    def __init__(self) -> None:
        self.runs: list[SimpleNamespace] = []
        self.ends: dict[tuple[str, str, int], datetime] = {}
        self.asked: list[object] = []

    def run(self, *, publish=10.0, run=12.0, kind="scheduled", cleared=0, mapped=(), training=True) -> None:
        day = len(self.runs) + 1
        logical, ended = NOW.subtract(days=day), NOW.subtract(days=day - 1, hours=10)
        run_id = f"run{day}"
        self.runs.append(
            SimpleNamespace(
                run_id=run_id,
                logical_date=logical,
                run_type=kind,
                state="success",
                clear_number=cleared,
                end_date=ended.add(minutes=run),
            )
        )
        if training:
            self.ends[(run_id, "train", -1)] = ended
        if publish is not None and not mapped:
            self.ends[(run_id, "publish", -1)] = ended.add(minutes=publish)
        for index, minutes in enumerate(mapped):
            self.ends[(run_id, "publish", index)] = ended.add(minutes=minutes)

    def __call__(self, message):
        self.asked.append(message)
        if isinstance(message, GetPreviousDagRun):
            assert message.state == "success"
            return SimpleNamespace(
                dag_run=next((run for run in self.runs if run.logical_date < message.logical_date), None)
            )
        if isinstance(message, GetDagRun):
            found = [run for run in self.runs if run.run_id == message.run_id]
            if not found:
                raise AirflowRuntimeError(ErrorResponse(error=ErrorType.GENERIC_ERROR))
            return found[0]
        if isinstance(message, GetPreviousTI):
            for run in self.runs:
                end = self.ends.get((run.run_id, message.task_id, message.map_index))
                if end is not None and run.logical_date < message.logical_date:
                    return SimpleNamespace(task_instance=SimpleNamespace(run_id=run.run_id, end_date=end))
            return SimpleNamespace(task_instance=None)
        crumbs = [
            {"task_id": task, "map_index": index} for (run_id, task, index) in self.ends if run_id == message.run_id
        ]
        return SimpleNamespace(breadcrumbs=crumbs)


@pytest.fixture
def airflow() -> Airflow:
    return Airflow()


def test_of_a_task_and_of_the_run(airflow):
    for minutes in (10, 11, 30):
        airflow.run(publish=minutes, run=minutes + 5)
    assert observed(MINE, NOW, "publish", airflow) == [600.0, 660.0, 1800.0]
    assert observed(MINE, NOW, "dag_run", airflow) == [900.0, 960.0, 2100.0]


def test_the_reserve_is_a_high_quantile_and_a_margin_and_says_so(airflow):
    for minutes in (10, 11, 30):
        airflow.run(publish=minutes)
    reserve, warning = reserve_for(MINE, NOW, "publish", RESERVE, ask=airflow)
    assert warning is None
    assert (reserve.after_s, reserve.margin_s, reserve.total_s) == (1800.0, 180.0, 1980.0)
    assert reserve.said == (
        "p95 of the last 3 runs (10 min to 30 min), from the end of training to the end of task 'publish', queueing"
        " included"
    )
    assert reserve.margin_said == "10% of what comes after"


def test_without_history_the_declared_reserve_counts_with_a_warning(airflow):
    reserve, warning = reserve_for(MINE, NOW, "publish", RESERVE, ask=airflow)
    assert (reserve.after_s, reserve.margin_s) == (300.0, 0.0)
    assert "no earlier run shows how long it takes from the end of training to the end of task 'publish'" in warning
    assert "using downstream_reserve (5 min) as declared" in warning


def test_one_run_is_little_to_go_by(airflow):
    airflow.run(publish=1)
    reserve, warning = reserve_for(MINE, NOW, "publish", RESERVE, ask=airflow)
    assert (reserve.after_s, warning) == (300.0, None)
    assert reserve.said.endswith("more than the 1 run so far have shown")
    airflow.runs.clear()
    airflow.run(publish=9)
    reserve, _ = reserve_for(MINE, NOW, "publish", RESERVE, ask=airflow)
    assert (reserve.after_s, reserve.margin_s) == (540.0, 54.0)
    assert reserve.said.startswith("p95 of the last 1 run (9 min), from")


def test_cleared_runs_backfills_and_runs_without_one_of_the_two_tell_nothing(airflow):
    airflow.run(publish=10_000, cleared=1)
    airflow.run(publish=9_000, kind="backfill")
    airflow.run(publish=None)
    airflow.run(publish=8_000, training=False)
    airflow.run(publish=-5)  # somebody marked the training anew, long after
    airflow.run(publish=7)
    assert observed(MINE, NOW, "publish", airflow) == [420.0]


def test_a_mapped_target_ends_with_its_last_instance(airflow):
    airflow.run(mapped=(3, 9, 4))
    assert observed(MINE, NOW, "publish", airflow) == [540.0]
    airflow.run(mapped=range(40), run=60)  # too many to ask for: the end of the run stands for them
    assert observed(MINE, NOW, "publish", airflow) == [540.0, 3600.0]


def test_the_last_twenty_runs_are_enough(airflow):
    for day in range(30):
        airflow.run(publish=1 + day)
    found = observed(MINE, NOW, "publish", airflow)
    assert found == [60.0 * (1 + day) for day in range(20)]
    assert len(airflow.asked) == 60
    assert quantile(found, 0.95) == 60.0 * 19


def test_an_api_that_does_not_answer_is_no_reason_to_fail():
    def refuse(message):
        raise AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR))

    reserve, warning = reserve_for(MINE, NOW, "publish", RESERVE, ask=refuse)
    assert reserve.after_s == 300.0
    assert "the history of earlier runs could not be read" in warning
    assert "using downstream_reserve" in warning


def test_runs_without_a_logical_date_are_known_by_the_services_jobs(airflow):
    """Asset-triggered runs have no order by date; the service knows which runs trained, and when they were done."""
    for _ in range(3):
        airflow.run(run=20)
    jobs = [EndedJob(run_id=run.run_id, ended_at=run.end_date.timestamp() - 1000) for run in airflow.runs]
    gone = EndedJob(run_id="deleted", ended_at=0.0)
    unordered = NOW.subtract(years=1)
    reserve, warning = reserve_for(MINE, unordered, "publish", RESERVE, ask=airflow, ended_jobs=lambda _: [gone, *jobs])
    assert (reserve.after_s, warning) == (1000.0, None)
    assert "(to the end of the run: these runs have no logical date)" in reserve.said
    reserve, _ = reserve_for(MINE, unordered, "dag_run", RESERVE, ask=airflow, ended_jobs=lambda _: jobs)
    assert reserve.after_s == 1000.0
    assert "logical date" not in reserve.said


def test_quantiles_are_values_that_were_seen():
    assert quantile([3.0], 0.95) == 3.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.0
    assert quantile([float(n) for n in range(1, 101)], 0.95) == 95.0
