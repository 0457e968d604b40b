"""Whether the models are there by six: on a simulated cluster, in seconds, before the DAG is merged."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from elasticflow_airflow.testing import SimulatedTraining, find_dag


def test_all_models_are_published_by_six(run_dag, dag_file, one_o_clock):
    """Four trainings share four slots; each ends ten minutes before six, as publishing takes its time."""
    result = run_dag(dag_file, run_after=one_o_clock, slots=4)
    assert result.succeeded, result
    assert len(result.jobs) == 4
    for job in result.jobs.values():
        assert job.verdict == "admitted"
        assert job.finished < one_o_clock + timedelta(hours=4, minutes=50)
    assert all(Path(path).is_dir() for path in result.tasks["publish"].returned)


def test_on_a_cluster_that_is_too_small_only_what_can_be_kept_is_promised(run_dag, dag_file, one_o_clock):
    """With four times the rows, one slot is too little for all: who cannot be in time hears so before he trains."""
    result = run_dag(dag_file, run_after=one_o_clock, slots=1, conf={"epochs": 20})
    rejected = [job for job in result.jobs.values() if job.verdict == "rejected"]
    assert rejected, result
    assert all(job.earliest_deadline > job.deadline for job in rejected)
    assert all(job.met for job in result.jobs.values() if job.verdict == "admitted")
    assert result.tasks["publish"].state == "upstream_failed"


def test_a_training_that_is_slower_than_we_believe_is_seen_to_be_late(run_dag, dag_file, one_o_clock):
    """The others keep their promises all the same."""
    slow = {"train_west": SimulatedTraining(speed=0.02)}
    result = run_dag(dag_file, run_after=one_o_clock, slots=4, simulated=slow)
    assert result.jobs["train_west"].met is False
    assert "at_risk" in result.jobs["train_west"].kinds()
    assert all(result.jobs[f"train_{region}"].met for region in ("north", "south", "east"))


def test_a_training_that_fails_publishes_nothing(run_dag, dag_file, one_o_clock):
    """What the script said is in the task's error."""
    breaks = {"train_south": SimulatedTraining(fails_at_step=500, failure="ValueError: a row without a label")}
    result = run_dag(dag_file, run_after=one_o_clock, slots=4, simulated=breaks)
    assert "a row without a label" in result.tasks["train_south"].error
    assert result.tasks["train_north"].state == "success"
    assert result.tasks["publish"].state == "upstream_failed"


@pytest.mark.training
def test_the_script_really_trains(run_dag, dag_file, monkeypatch):
    """One of them, on this machine, with few rows: the script, its arguments and the checkpoint are real."""
    pytest.importorskip("torch")
    dag = find_dag(dag_file)
    training = dag.task_dict["train_north"]
    monkeypatch.setattr(training, "samples", 1_600)
    monkeypatch.setattr(training, "epochs", 1)
    others = "train_(south|east|west)|publish"
    result = run_dag(dag, engine="local", slots=2, mark_success_pattern=others)
    assert result.succeeded, result
    assert result.jobs["train_north"].status.step == 25
    assert result.jobs["train_north"].metrics["region"] == "north"
