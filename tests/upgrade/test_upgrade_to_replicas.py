"""A service that owns its PostgreSQL alone is followed by replicas: jobs train on, and all that was stored is there.

The release before has only the engine of one machine; over node agents, the last version without replicas is what the
replicas follow. A newer service waits until the older one has ended, and brings the tables up to date then.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from support.postgres import service_database
from support.replica_trial import ReplicaTrial
from support.served import Served
from support.trial import nobody_is_left
from support.upgrading import BATCH, Story, begin_alone, lay_out

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import snapshot_folder

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")
pytestmark = [pytest.mark.slow, pytest.mark.postgres, pytest.mark.timeout(900)]
KILLED = pytest.param(signal.SIGKILL, marks=pytest.mark.soak)

EPOCHS, SAMPLES = 30, 640
STEPS = EPOCHS * SAMPLES // BATCH
CURVE = {1: 1.25, 2: 2.4}
"""Of a script whose steps take 0.8 s with one worker."""
LAST_WITHOUT_REPLICAS = "0011"
WAITS = r"a service of an earlier release uses this database \(.*pid {pid}.*: stop it; this one goes on then"


@pytest.fixture
def database(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    with service_database("postgresql") as url:
        assert url is not None
        yield url


def revision(url: str) -> str:
    """Return the schema's revision."""
    with psycopg.connect(url) as connection:
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    assert row is not None
    return str(row[0])


def ends(stopped_by: signal.Signals, served: Served) -> None:
    """End a service."""
    if stopped_by is signal.SIGKILL:
        served.kill()
    else:
        assert served.stop() == 0


def said_by(served: Served, process: subprocess.Popen[bytes], limit_s: float = 60.0) -> str:
    """Return what a service that ends by itself has said."""
    assert process.wait(limit_s) == 1, served.log_file.read_text()
    return served.log_file.read_text().splitlines()[-1]


def waits(served: Served, pid: int, wait: Callable[[Callable[[], Any], str], Any]) -> subprocess.Popen[bytes]:
    """Start a service that waits for the one with a process id to end."""
    process = served.launch()
    wait(lambda: re.search(WAITS.format(pid=pid), served.log_file.read_text()), "it says for whom it waits")
    assert process.poll() is None
    return process


def gone(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return those that have ended."""
    return [one for one in processes if not one.is_running() or one.status() == psutil.STATUS_ZOMBIE]


def refuses_newer_tables(old: Path, folder: Path, settings: dict[str, object]) -> None:
    """The older version does not start on what a newer one has changed."""
    served = Served(folder, settings, python=old)
    assert "install the version that wrote it" in said_by(served, served.launch())


# -- over node agents --------------------------------------------------------------------------------------------


class Upgrade(ReplicaTrial):
    """Three nodes with one slot each, and jobs that are paced."""

    def begin(self) -> None:
        """Start the nodes and the service that is alone; its successor has its folder, and the others their own."""
        self.base.mkdir()
        lay_out(self.base)
        self.snapshot = snapshot_folder(self.base / "code")
        for index in range(self.nodes):
            self.start_agent(f"node{index}")
        first = self.replica("first")
        assert self.python is not None
        first.python = self.python
        first.settings["inventory_interval_s"] = 600  # It takes a node for lost whose new agent it has not heard yet.
        first.start()
        del first.settings["inventory_interval_s"]
        self.client = self.client_of("first")

    def train(self, task: str, epochs: int, pace: str, **given: Any) -> str:
        """Submit a job of ``train.py``."""
        submission = JobSubmission(
            identity=JobIdentity(dag_id="daily", run_id="run1", task_id=task),
            command=Command(
                snapshot=self.snapshot.sha256, script="train.py", args=(str(epochs), str(self.base / pace))
            ),
            length=Length(epochs=epochs, samples=SAMPLES),
            global_batch_size=BATCH,
            logical_workers=4,
            best_effort="deadline_at" not in given,
            **{"max_workers": 1, "scaling_curve": {1: 1.25}, **given},
        )
        self.client.upload_snapshot(self.snapshot)
        job_id = submission.identity.job_id
        self.claims[job_id] = self.client.submit(submission).claim
        return job_id

    def changed(self, job_id: str, times: int, workers: int) -> None:
        """Wait until its workers have changed in place so often, and so many of them train."""
        self.wait(lambda: len(self.events(job_id, "rescaled")) >= times, f"change {times} of {job_id}")
        assert self.events(job_id, "rescaled")[times - 1].data["workers"] == workers, self.story()
        self.trains(job_id, 3)

    def trainers(self, job_id: str) -> dict[int, str]:
        """Return the processes that have begun to train a job, and with which version, as their logs say."""
        files = sorted(self.base.glob(f"node*/jobs/{job_id}/i*/logs/*.log"))
        text = "\n".join(file.read_text(errors="replace") for file in files)
        return {int(pid): where for pid, where in re.findall(r"^process (\d+) trains with (.*)$", text, re.MULTILINE)}

    def renew_agents(self) -> None:
        """Exchange the agents for ours, one after the other."""
        self.python = None
        for node_id, (agent, _) in list(self.agents.items()):
            agent.terminate()
            agent.wait(30.0)
            assert agent.stdout is not None
            agent.stdout.close()
            self.start_agent(node_id)

    def forgets(self, job_id: str) -> None:
        """Let the end of a job be so long ago that nodes tell no service of it."""
        files = list(self.base.glob(f"node*/jobs/{job_id}/i*/supervisors/*/status.json"))
        assert files
        for file in files:
            os.utime(file, (time.time() - 7200,) * 2)


@pytest.fixture
def upgrade(tmp_path: Path, database: str, without_replicas: Any) -> Iterator[Upgrade]:
    settings = {"straggler_removal": False, "suspicion_s": 60}  # Nobody notices that an agent is exchanged.
    made = Upgrade(tmp_path / "base", database, "", nodes=3, settings=settings, python=without_replicas.python)
    try:
        made.begin()
        yield made
    finally:
        made.end()
    nobody_is_left(made.base)


@pytest.mark.parametrize("stopped_by", [signal.SIGTERM, KILLED], ids=lambda one: one.name)
def test_jobs_on_nodes_train_on_under_replicas(upgrade: Upgrade, without_replicas: Any, stopped_by: signal.Signals):
    """Agents are exchanged first, then the service, and then there are two."""
    first, url, helpers = upgrade.replica("first"), upgrade.database_url, list[subprocess.Popen[Any]]()
    alone = begin_alone(upgrade.base, helpers, without_replicas.python, EPOCHS)
    over = upgrade.train("over", 1, "hurried", secret_env={"TOKEN": "the right one"})
    upgrade.ends(over)
    wide = upgrade.train(
        "wide", EPOCHS, "paced", max_workers=2, scaling_curve=CURVE, secret_env={"TOKEN": "the right one"}
    )
    narrow = upgrade.train("narrow", EPOCHS, "payroll")
    for job_id in (wide, narrow):
        upgrade.trains(job_id)
    upgrade.wait(lambda: len(upgrade.trainers(wide)) == 2, "it has two workers")
    undisturbed, before = alone(), upgrade.client.read_log(over, "g000001-r000").text
    assert "WEIGHTS" in before
    trainers = {job_id: upgrade.trainers(job_id) for job_id in (wide, narrow)}
    processes = [psutil.Process(pid) for of_job in trainers.values() for pid in of_job]
    known_events = {job_id: [e.event_id for e in upgrade.client.events(job_id)] for job_id in (wide, narrow)}

    upgrade.renew_agents()
    for job_id in (wide, narrow):
        upgrade.trains(job_id)
    upgrade.forgets(over)

    elsewhere = upgrade.replica("second")
    waiting = waits(elsewhere, first.pid, upgrade.wait)
    beside = Served(first.state_dir, first.settings)
    assert beside.launch().wait(60.0) == 1
    assert "another service holds this state directory" in beside.log_file.read_text()
    assert revision(url) == LAST_WITHOUT_REPLICAS
    assert upgrade.client.health().pid == first.pid

    ends(stopped_by, first)
    assert f"and not in {elsewhere.state_dir}. Start one service" in said_by(elsewhere, waiting)
    assert revision(url) == LAST_WITHOUT_REPLICAS
    upgrade.key = (first.state_dir / "secret.key").read_text().strip()
    first.settings["secret_key"] = elsewhere.settings["secret_key"] = upgrade.key
    first.python = Path(sys.executable)
    begun_s = time.monotonic()
    first.start()
    assert upgrade.leader() == "first"
    print(f"the first decides after {time.monotonic() - begun_s:.1f} s")
    assert revision(url) > LAST_WITHOUT_REPLICAS
    for job_id in (wide, narrow):
        upgrade.trains(job_id)
    assert gone(processes) == []
    for job_id, known in known_events.items():
        assert [e.event_id for e in upgrade.client.events(job_id)][: len(known)] == known
        assert upgrade.trainers(job_id) == trainers[job_id], "the same processes train"
    upgrade.wait(lambda: upgrade.client.read_log(over, "g000001-r000").text == before, "what was printed is there")
    old_settings = {**first.settings, "database_url": url}
    refuses_newer_tables(without_replicas.python, upgrade.base / "old", old_settings)

    elsewhere.start()
    upgrade.client = upgrade.client_of("first", "second")
    first.kill()
    assert upgrade.leader() == "second"
    other = upgrade.train("other", 1, "hurried", deadline_at=time.time() + 600, scaling_curve={1: 20.0})
    upgrade.changed(wide, 1, 1)
    upgrade.ends(other)
    # It has moved to make room, between the slots of the wide one: those are together again when it has left.
    as_undisturbed(upgrade, narrow, "payroll", undisturbed)
    upgrade.changed(wide, 2, 2)
    assert len(upgrade.trainers(wide)) == 3, "a third one has begun, and was given the secret"
    as_undisturbed(upgrade, wide, "paced", undisturbed)
    assert upgrade.client.read_log(over, "g000001-r000").text == before


def as_undisturbed(upgrade: Upgrade, job_id: str, pace: str, weights: str) -> None:
    """Let a job hurry to its end, which is that of one that was alone, and was started and succeeded once."""
    (upgrade.base / pace / "hurry").touch()
    result = upgrade.ends(job_id)
    assert (result.steps, result.metrics) == (STEPS, {"weights": weights})
    for kind in ("started", "succeeded"):
        assert len(upgrade.events(job_id, kind)) == 1, upgrade.story()


# -- on one machine ----------------------------------------------------------------------------------------------


@pytest.fixture
def story(tmp_path: Path, database: str) -> Iterator[Story]:
    settings = {
        "engine": "local",
        "slots": 2,
        "slot_lock_dir": tmp_path / "locks",
        "straggler_removal": False,
        "database_url": database,
    }
    made = Story(tmp_path, Served(tmp_path / "state", dict(settings)))
    yield made
    made.end()


def workers_of(story: Story, job_id: str) -> int:
    """Return how many workers its last change in place has left; 0: there was none."""
    changes = story.events(job_id, "rescaled")
    return int(changes[-1].data["workers"]) if changes else 0


@pytest.mark.parametrize("stopped_by", [signal.SIGTERM, KILLED], ids=lambda one: one.name)
def test_the_release_before_is_followed_on_its_machine(story: Story, before: Any, stopped_by: signal.Signals):
    """One service on PostgreSQL stays one; nobody changes its tables while it runs."""
    url = str(story.service.settings["database_url"])
    story.start(before.python)
    alone = begin_alone(story.folder, story.helpers, before.python, EPOCHS)
    length = Length(epochs=EPOCHS, samples=SAMPLES)
    plain = {"length": Length(steps=5), "progress_regex": r"^step (?P<step>\d+)"}
    over = story.submit("over", "plain.py", 5, story.folder / "hurried", **plain)
    story.succeeds(over)
    printed = story.client.read_log(over, "g000001-r000").text
    assert "ends in process" in printed
    given = {"length": length, "scaling_curve": CURVE, "max_workers": 2, "logical_workers": 4}
    job_id = story.submit(
        "train", "train.py", EPOCHS, story.folder / "paced", secret_env={"TOKEN": "the right one"}, **given
    )
    story.trains(job_id)
    undisturbed = alone()
    processes = story.processes()

    elsewhere = Served(story.folder / "elsewhere", dict(story.service.settings))
    waiting = waits(elsewhere, story.service.pid, story.wait)
    assert revision(url) == LAST_WITHOUT_REPLICAS

    ends(stopped_by, story.service)
    assert f"and not in {elsewhere.state_dir}. Start one service" in said_by(elsewhere, waiting)
    assert revision(url) == LAST_WITHOUT_REPLICAS
    story.start(Path(sys.executable))
    story.trains(job_id)
    assert gone(processes) == []
    assert revision(url) > LAST_WITHOUT_REPLICAS
    assert story.client.read_log(over, "g000001-r000").text == printed
    refuses_newer_tables(before.python, story.folder / "old", story.service.settings)
    other = story.submit(
        "other",
        "train.py",
        1,
        story.folder / "hurried",
        length=Length(epochs=1, samples=SAMPLES),
        scaling_curve={1: 20.0},
        logical_workers=4,
        deadline_at=time.time() + 300,
    )
    story.succeeds(other)
    story.wait(lambda: workers_of(story, job_id) == 2, "it has grown again, and the new worker was given the secret")
    (story.folder / "paced" / "hurry").touch()
    result = story.succeeds(job_id).result
    assert result is not None
    assert (result.steps, result.metrics) == (STEPS, {"weights": undisturbed})
