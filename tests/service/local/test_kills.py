"""``kill -9`` of the service, and of whoever trains, with real torchrun: every sample still counts exactly once."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.training_scripts import COUNTING, STEPS_PER_EPOCH, hurry
from support.trial import Trial, nobody_is_left, trial_parts

from elasticflow_airflow.engines.local.files.generation_folder import Status, SupervisorFolder
from elasticflow_airflow.engines.local.machine.processes import ProcessId, children_of
from elasticflow_airflow.runtime.protocol import read_reports, report_path

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")


@dataclass
class KilledTrial(Trial):
    """A service that is killed and started again, and its jobs."""

    settings: dict[str, object] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    kills: int = 0

    def start(self, crash_at: int = 0) -> None:
        settings = {"checkpoint_interval_s": 5, "profile_s": 1, **self.settings}
        self.service = self.daemons.popen("state", engine="local", slots=2, crash_at=crash_at, **settings)

    def kill(self) -> None:
        assert self.service is not None
        self.service.kill()
        assert self.service.wait() == -signal.SIGKILL
        self.kills += 1

    def submit(self, task: str, epochs: int, **given: Any) -> str:
        job_id = super().submit(task, epochs, **given)
        self.epochs[job_id] = epochs
        return job_id

    def story(self) -> str:
        """What has happened, for a test that failed."""
        lines = [super().story()]
        for path in sorted(self.state_dir.glob("jobs/*/i*/supervisors/*/*")):
            lines.append(f"{path.stat().st_mtime:.1f} {path.relative_to(self.state_dir)}")
            if path.name == "supervisor.log":
                lines += path.read_text().splitlines()[-5:]
        return "\n".join(lines)

    # What the files say, with or without a service.

    def incarnation_dir(self, job_id: str) -> Path:
        return self.state_dir / "jobs" / job_id / "i000001"

    def folder(self, job_id: str, generation: int) -> SupervisorFolder:
        return SupervisorFolder.of(self.incarnation_dir(job_id), generation, "local")

    def status(self, job_id: str, generation: int) -> Status | None:
        return self.folder(job_id, generation).read_status()

    def trainers(self, job_id: str, generation: int) -> list[ProcessId]:
        status = self.status(job_id, generation)
        workers = status.workers.values() if status is not None else ()
        return [worker.trainer for worker in workers if worker.trainer is not None]

    def step(self, job_id: str, generation: int) -> int:
        path = report_path(self.incarnation_dir(job_id), generation, f"g{generation:06d}-r000")
        return max((report.step for report, _ in read_reports(path)), default=0)

    # The end.

    def finish(self, restarts: int = 0) -> float:
        """Have all jobs end quickly now; each came to it once, with every sample used once an epoch. Returns when."""
        for job_id in self.claims:
            hurry(self.state_dir.parent / "hurry", job_id)
        last_end = 0.0
        for job_id, claim in self.claims.items():
            self.wait(lambda j=job_id, c=claim: self.client.renew(j, c).state.terminal, f"{job_id} ends", 300)
            status = self.client.acknowledge(job_id, claim)
            events = self.client.events(job_id)
            story = "\n".join(f"{event.kind}: {event.reason}" for event in events)
            epochs = self.epochs[job_id]
            assert (status.state, status.incarnation) == ("succeeded", 1), story
            assert status.result.steps == epochs * STEPS_PER_EPOCH, story
            assert status.result.metrics == {"least": epochs, "most": epochs}, story
            kinds = [event.kind for event in events]
            assert kinds.count("succeeded") == kinds.count("acknowledged") == 1, story
            assert kinds.count("restarting") == restarts, story
            ordered = [e.data["generation"] for e in events if "slots" in e.data and "generation" in e.data]
            assert ordered == list(range(1, status.generation + 1)), story
            last_end = max(last_end, status.result.finished_at)
        assert self.service is not None
        self.service.terminate()
        assert self.service.wait(30.0) == 0
        nobody_is_left(self.state_dir)
        return last_end


@pytest.fixture
def trial(daemons, open_client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KilledTrial]:
    trial = KilledTrial(*trial_parts(daemons, open_client, tmp_path, monkeypatch, COUNTING))
    yield trial
    # A test that failed leaves no trainer behind either.
    if trial.service is not None:
        trial.service.kill()
    trial.kill_supervisors()


@pytest.mark.slow
def test_training_survives_a_service_that_is_killed_again_and_again(trial):
    chance = random.Random(7)
    trial.start()
    trial.submit("first", 18, deadline_at=time.time() + 500)
    trial.submit("second", 18)
    kills, crashed, killed_at = 8, 0, []
    for kill in range(kills):
        if kill % 2:
            # Right before or after a commit or a call of the engine ...
            try:
                trial.service.wait(10.0)
                crashed += 1
            except subprocess.TimeoutExpired:
                trial.service.kill()
        else:
            # ... and whenever.
            time.sleep(chance.uniform(0.2, 3.0))
            trial.service.kill()
        assert trial.service.wait() == -signal.SIGKILL
        killed_at.append(time.time())
        trial.start(crash_at=0 if kill % 2 else chance.randint(1, 40))
    assert crashed >= kills // 3
    last_end = trial.finish()
    assert sum(at < last_end for at in killed_at) >= 6, "the training was too short for these kills"


@pytest.mark.soak
def test_training_goes_on_in_the_same_processes_while_there_is_no_service(trial):
    chance = random.Random(11)
    trial.start()
    job = trial.submit("only", 15, min_workers=2, scaling_curve={2: 9.0})
    trial.wait(lambda: trial.step(job, 1) > 3, "it trains")
    trainers = trial.trainers(job, 1)
    assert len(trainers) == 2
    for _ in range(3):
        trial.kill()
        step = trial.step(job, 1)
        trial.wait(lambda s=step: trial.step(job, 1) > s + 5, "it makes progress without a service", 30)
        assert trial.trainers(job, 1) == trainers
        assert all(trainer.is_alive() for trainer in trainers)
        trial.start()
        time.sleep(chance.uniform(0.0, 2.0))  # While it imports, takes its jobs up again, or does its work.
    assert trial.client.status(job).generation == 1
    trial.finish()


@pytest.mark.slow
def test_a_resize_by_restart_survives_a_kill_at_each_of_its_stages(trial):
    trial.settings = {"in_place_attempts": 0}
    trial.start()
    first = trial.submit("first", 25, max_workers=2, scaling_curve={1: 6.0, 2: 9.0})
    trial.wait(lambda: trial.step(first, 1) > 3, "it trains on both slots")
    assert len(trial.trainers(first, 1)) == 2
    second = trial.submit("second", 3, max_workers=1, scaling_curve={1: 8.0}, deadline_at=time.time() + 120)
    stages = {
        "the new generation is ordered": trial.folder(first, 2).path,
        "it has warmed up": trial.folder(first, 2).warm,
        "the old one is told to leave": trial.folder(first, 1).path / "order.json",
        "the new one may start": trial.folder(first, 2).go,
        "the other job's supervisor is started": trial.folder(second, 1).path,
        "the other job may start": trial.folder(second, 1).go,
    }
    for stage, path in stages.items():
        trial.wait(path.exists, stage, 60)
        trial.kill()
        trial.start()
    trial.wait(lambda: (found := trial.status(second, 1)) is not None and found.ended, "the other job's workers leave")
    trial.kill()
    trial.start()
    assert trial.client.status(first).generation >= 2
    trial.finish()


@pytest.mark.slow
def test_whoever_is_killed_in_the_middle_the_result_is_right(trial):
    trial.settings = {"checkpoint_interval_s": 2, "max_restarts": 10, "max_recoveries": 0}
    trial.start()
    job = trial.submit("only", 15, min_workers=2, scaling_curve={2: 9.0})
    victims = ("trainer", "fork server", "supervisor", "service and supervisor")
    for number, victim in enumerate(victims):
        generation = number + 1

        def saved(g: int = generation) -> bool:
            events = trial.client.events(job)
            return any(event.kind == "checkpoint" and event.data["generation"] == g for event in events)

        trial.wait(saved, f"generation {generation} has saved")
        status = trial.status(job, generation)
        if "service" in victim:
            trial.kill()
        worker = status.workers[f"g{generation:06d}-r001"]
        (server,) = children_of(status.supervisor.pid)
        targets = {"trainer": worker.trainer, "agent": worker.agent, "fork server": server}
        targets.get(victim.removeprefix("service and "), status.supervisor).kill()
        if "service" in victim:
            trial.start()
    trial.finish(restarts=len(victims))


@pytest.mark.slow
def test_what_a_lost_database_leaves_on_the_slots_makes_room_for_others(trial):
    """Its trainer is told to leave, and nobody else's start fails for it; submitted again, it trains again."""
    trial.start()
    trial.submit("left", 2000, min_workers=2, scaling_curve={2: 9.0})
    job = next(iter(trial.claims))
    trial.wait(lambda: trial.step(job, 1) > 3, "it trains")
    trainers = trial.trainers(job, 1)
    trial.kill()
    for file in trial.state_dir.glob("elasticflow.db*"):
        file.unlink()
    trial.claims.clear()
    trial.start()
    other = trial.submit("other", 3, min_workers=2, scaling_curve={2: 9.0}, deadline_at=time.time() + 300)
    trial.wait(lambda: trial.client.status(other).state == "running", "the other trains")
    assert not any(trainer.is_alive() for trainer in trainers)
    kinds = [event.kind for event in trial.client.events(other)]
    assert "failed" not in kinds
    trial.wait(lambda: not trial.client.health().problems, "nothing is left of it")
    trial.finish()
