"""``elasticflow forecast`` over a service in this process: what it prints, and how it ends."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from typer.testing import CliRunner

from elasticflow_airflow.cli import forecast
from elasticflow_airflow.cli.main import app
from elasticflow_airflow.service.requests.forecasting import ForecastService

CURVE = {1: 10.0, 2: 18.0, 4: 32.0}
HOUR_S = 3600.0


@pytest.fixture
def ask(world, monkeypatch):
    """Run the command against the world's own service; the HTTP between the two is tested elsewhere."""
    reconciler = world.reconciler
    service = ForecastService(
        world.store, world.settings, reconciler.copy_scheduler, lambda: reconciler.device_type, clock=world.clock
    )

    @contextmanager
    def opened(_url, _state_dir, **_):
        yield service

    monkeypatch.setattr(forecast, "client", opened)
    monkeypatch.setenv("COLUMNS", "300")
    return lambda *options: CliRunner().invoke(app, ["forecast", *options])


def nightly(world, task: str):
    return world.submit(task=task, steps=2000, within=140.0, scaling_curve=CURVE, next_run_at=world.now_s + HOUR_S)


def test_nothing_is_due(world, ask):
    world.step()
    done = ask("--check")
    assert done.exit_code == 0
    assert "nothing with a deadline is due" in done.output


def test_it_says_what_is_kept(world, ask):
    nightly(world, "one")
    done = ask("--hours", "3", "--check")
    assert done.exit_code == 0, done.output
    assert "daily.one" in done.output
    assert "kept, due" in done.output
    assert "all 2 will be kept" in done.output


def test_with_check_a_missed_deadline_ends_it_with_status_3(world, ask):
    for task in ("one", "two"):
        job = nightly(world, task)
        world.job_service.cancel(job.job.job_id, job.claim, "seen enough")
        world.ended(job)
    assert ask().exit_code == 0
    done = ask("--check")
    assert done.exit_code == 3
    assert "missed, due" in done.output
    assert "1 more node of 4 slots would keep them all" in done.output
    assert ask("--fail-on-miss").exit_code == 1  # As under Airflow.
    assert ask("--fail-on-miss", "--check").exit_code == 1


def test_a_question_that_cannot_be_asked_is_no_miss(ask, monkeypatch):
    monkeypatch.undo()
    done = ask("--fail-on-miss", "--url", "http://127.0.0.1:1")
    assert done.exit_code == 2
    assert "does not answer" in done.output
    assert ask("--fail-on-miss", "--hours", "nan").exit_code == 2
