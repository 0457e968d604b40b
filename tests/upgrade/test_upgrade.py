"""The service is exchanged for a newer one while jobs run: nothing restarts, and what was hidden stays hidden.

The release before is a wheel in this folder. Its service, supervisors, agents and workers start the jobs; the service
of the checkout takes them over and changes them in place, so that workers of both releases train together.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.served import Served
from support.upgrading import BATCH, SECRET_ARGUMENT, SECRET_VALUE, Airflow, Story, begin_alone

import elasticflow_airflow
from elasticflow_airflow.api import Length

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")

EPOCHS, SAMPLES = 30, 640
STEPS = EPOCHS * SAMPLES // BATCH
PLAIN_STEPS = 2000
RELEASE = next((Path(__file__).parent / "release_before").glob("*.whl")).name.split("-")[1]
CURVE = {1: 1.25, 2: 2.4}
"""Of a script whose steps take 0.8 s with one worker."""


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Story]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    settings = {"engine": "local", "slots": 3, "slot_lock_dir": tmp_path / "locks", "straggler_removal": False}
    made = Story(tmp_path, Served(tmp_path / "state", dict(settings)))
    yield made
    made.end()


@dataclass
class Jobs:
    """Those that the release before has started, by what is told of them."""

    resized: str
    plain: str
    payroll: str
    cancelled: str


def start_jobs(story: Story) -> Jobs:
    """Two that are under way when the upgrade comes, and two that have ended: one grows where another one ends."""
    plain = story.submit(
        "plain",
        "plain.py",
        PLAIN_STEPS,
        story.folder / "paced",
        length=Length(steps=PLAIN_STEPS),
        progress_regex=r"^step (?P<step>\d+)",
        scaling_curve={1: 5.0},
        deadline_at=time.time() + 1000,
    )
    payroll = story.submit(
        "train",
        "secretive.py",
        400,
        SECRET_ARGUMENT,
        story.folder / "payroll",
        dag_id="payroll",
        length=Length(steps=400),
        secret_env={"TOKEN": SECRET_VALUE},
    )
    story.wait(lambda: story.client.status(payroll).step > 0, "the hidden one trains")
    resized = story.submit(
        "resized",
        "train.py",
        EPOCHS,
        story.folder / "paced",
        length=Length(epochs=EPOCHS, samples=SAMPLES),
        scaling_curve=CURVE,
        max_workers=2,
        logical_workers=4,
        secret_env={"TOKEN": "the right one"},
    )
    cancelled = story.submit("cancelled", "plain.py", 10, story.folder / "paced", length=Length(steps=10))
    story.client.cancel(cancelled, story.claims[cancelled], f"makes room for {payroll}: payroll.train is more urgent")
    story.trains(resized)
    (story.folder / "payroll" / "hurry").touch()
    story.succeeds(payroll)
    story.changed(resized, 1, 2)
    story.wait(lambda: "step 5\n" in story.log(plain), "the plain script is under way")
    return Jobs(resized, plain, payroll, cancelled)


def goes_on(story: Story, jobs: Jobs, undisturbed: str, old: str, new: str) -> None:
    """Under the new service it shrinks for another one, grows again, and ends with the weights that it would have had.

    ``old`` and ``new``: the two releases as their workers call them, ``version of folder``.
    """
    story.trains(jobs.resized)
    other = story.submit(
        "other",
        "train.py",
        EPOCHS,
        story.folder / "hurried",
        length=Length(epochs=EPOCHS, samples=SAMPLES),
        scaling_curve={1: 20.0},
        logical_workers=4,
        deadline_at=time.time() + 300,
    )
    story.changed(jobs.resized, 2, 1)
    result = story.succeeds(other).result
    assert result is not None
    assert result.metrics == {"weights": undisturbed}, "one that the new service has started"
    story.changed(jobs.resized, 3, 2)
    begun = re.findall(r"^process (\d+) trains with (.*)$", story.log(jobs.resized), re.MULTILINE)
    assert [package for _, package in begun] == [old, old, new], "the workers of both releases train together"
    assert sum(psutil.pid_exists(int(pid)) for pid, _ in begun[:2]) == 1, "one of those who began still trains"
    (story.folder / "paced" / "hurry").touch()
    result = story.succeeds(jobs.resized).result
    assert result is not None
    assert (result.steps, result.metrics) == (STEPS, {"weights": undisturbed})
    assert story.succeeds(jobs.plain).step == PLAIN_STEPS
    printed = story.log(jobs.plain)
    assert [int(step) for step in re.findall(r"^step (\d+)$", printed, re.MULTILINE)] == [*range(1, PLAIN_STEPS + 1)]
    assert len(set(re.findall(r"^(?:begins|ends) in process (\d+)$", printed, re.MULTILINE))) == 1


def deferred(story: Story, jobs: Jobs) -> dict[str, Any]:
    """Arguments of the triggers of two trainings and of a sensor, whose tasks are deferred."""
    waiting = [{"job_id": job_id, "claim": story.claims[job_id]} for job_id in (jobs.resized, jobs.plain)]
    quickly = {"poll_interval_s": 0.5, "min_deferral_s": 0.0}
    sensor = {"until": "succeeded", "dag_id": "daily", "task_id": "resized"}
    return {"trainings": [one | quickly for one in waiting], "sensors": [sensor | quickly]}


def addresses(jobs: Jobs) -> list[str]:
    """What the page asks about the old jobs, and in general."""
    of_dags = {jobs.resized: "daily", jobs.plain: "daily", jobs.cancelled: "daily", jobs.payroll: "payroll"}
    of_jobs = [f"api/dags/{dag_id}/jobs/{job_id}" for job_id, dag_id in of_dags.items()]
    general = ["api/cluster", "api/jobs", "api/forecast"]
    return [*general, *(f"{job}/{what}" for job in of_jobs for what in ("events", "story", "runs", "trace.json"))]


def nothing_more_is_seen(jobs: Jobs, before: dict[str, Any], now: dict[str, Any]) -> None:
    """What the page of the release before hid from a viewer, that of the new one hides, in the same events."""
    cancelled = f"api/dags/daily/jobs/{jobs.cancelled}/events"
    for seen in (before, now):
        hidden = {path for path, (status, _) in seen["viewer"].items() if status == 403}
        assert hidden == {path for path in addresses(jobs) if "/payroll/" in path}
        assert {status for path, (status, _) in seen["viewer"].items() if path not in hidden} == {200}
        assert {status for status, _ in seen["admin"].values()} == {200}
        for name in ("payroll", SECRET_VALUE, SECRET_ARGUMENT):
            shown = {path for path, (status, told) in seen["viewer"].items() if name in json.dumps(told)}
            assert shown <= hidden, name
        assert "makes room for another job: another job is more urgent" in json.dumps(seen["viewer"][cancelled])
        assert "makes room for payroll.train: payroll.train is more urgent" in json.dumps(seen["admin"][cancelled])
        assert "used ***" in json.dumps(seen["admin"])
        assert SECRET_VALUE not in json.dumps(seen["admin"])
        assert SECRET_ARGUMENT not in json.dumps(seen["admin"])
    for role, answers in before.items():
        for path, (status, events) in answers.items():
            if path.endswith("/events") and status == 200:
                assert now[role][path][1][: len(events)] == events, (role, path)


def under_old_code(story: Story, environment: Any) -> set[psutil.Process]:
    """The processes of the jobs, which all are of the release before."""
    assert (story.service.state_dir / "runtime-path" / "elasticflow_airflow").resolve() == environment.package
    found = story.processes()
    names = [" ".join(process.cmdline()) for process in found]
    assert [name for name in names if not name.startswith(str(environment.python))] == []
    assert sum("supervisor" in name for name in names) >= 2, names
    return found


def gone(processes: set[psutil.Process]) -> list[psutil.Process]:
    """Those that have ended: the pid of another one would not do."""
    return [process for process in processes if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_and_followed_by_another_installation(story: Story, before: Any) -> None:
    """The new service comes from another folder, and the old one could put nothing away."""
    story.start(before.python)
    assert story.client.health().version == before.version() == RELEASE
    alone = begin_alone(story.folder, story.helpers, before.python, EPOCHS)
    jobs, undisturbed = start_jobs(story), alone()
    living = under_old_code(story, before)
    story.service.kill()
    story.start(Path(sys.executable))
    story.trains(jobs.resized)
    assert gone(living) == []
    package = Path(elasticflow_airflow.__file__).resolve().parent
    old, new = f"{RELEASE} of {before.package}", f"{elasticflow_airflow.__version__} of {package}"
    goes_on(story, jobs, undisturbed, old, new)


@pytest.mark.slow
@pytest.mark.airflow
@pytest.mark.timeout(900)
def test_stopped_and_upgraded_where_it_was_installed(story: Story, before: Any, upgraded_wheel: Path) -> None:
    """``pip install --upgrade`` takes the files away from under workers that run, and tasks are deferred meanwhile."""
    story.start(before.python)
    airflow, alone = Airflow(story), begin_alone(story.folder, story.helpers, before.python, EPOCHS)
    jobs, undisturbed = start_jobs(story), alone()
    airflow.begin(before.python, "defer", deferred(story, jobs))()
    seen_before = airflow.begin(before.python, "look", addresses(jobs))()
    living = under_old_code(story, before)
    assert before.version() == story.client.health().version == RELEASE
    assert story.service.stop() == 0
    old, _ = f"{RELEASE} of {before.package}", before.install(upgraded_wheel)
    story.start(before.python)
    assert before.version() == story.client.health().version != RELEASE
    story.trains(jobs.resized)
    assert gone(living) == []

    fired = airflow.begin(before.python, "fire", None)
    nothing_more_is_seen(jobs, seen_before, airflow.begin(before.python, "look", addresses(jobs))())
    goes_on(story, jobs, undisturbed, old, f"{before.version()} of {before.package}")
    told = fired()
    of_resized, of_plain, of_sensor = [one["event"] for one in told["events"]]
    assert of_resized.items() >= {"job_id": jobs.resized, "claim": 1, "outcome": "ended"}.items()
    assert of_plain.items() >= {"job_id": jobs.plain, "claim": 1, "outcome": "ended"}.items()
    assert of_sensor["outcome"] == "there"
    assert of_sensor["status"]["state"] == "succeeded"
    assert told["result"]["metrics"] == {"weights": undisturbed}
    assert told["remembered"]["returned"] is True
    assert told["remembered"]["deadlines"] == {"deadline": {"given": "07:30", "at": 1.0}}
