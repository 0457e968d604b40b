"""A real service with real workers, and what a test asks of it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elasticflow_airflow.api import Command, Event, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import ElasticFlowClient, Endpoint, snapshot_script
from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder, WorkerStatus
from elasticflow_airflow.runtime.protocol import Membership
from support.training_scripts import BATCH, COUNTING, HURRY_ENV, SAMPLES, STEPS_PER_EPOCH, hurry

SCALING = COUNTING.replace("        rest(0.1)\n", "").replace(
    "step.backward(model(ids))", "step.backward(model(ids)); rest(0.2 * len(ids) / BATCH)"
)
assert SCALING.count("rest(") == 2
"""Two workers are as much quicker than one as the tests' curves promise: else none would be added a second time."""


@dataclass
class Trial:
    """A service, by default with two CPU slots, and its jobs."""

    daemons: Any
    client: ElasticFlowClient
    state_dir: Path
    snapshot: Any
    settings: dict[str, object] = field(default_factory=lambda: {"engine": "local", "slots": 2})
    service: subprocess.Popen[bytes] | None = None
    claims: dict[str, int] = field(default_factory=dict)

    def start(self) -> None:
        quick = {"checkpoint_interval_s": 5, "profile_s": 1, "heartbeat_limit_s": 6, "max_recoveries": 10}
        self.service = self.daemons.popen("state", **{**quick, **self.settings})

    def end(self) -> None:
        """End the service, and what runs on this machine: nobody may be left."""
        if self.service is not None:
            self.service.terminate()
            self.service.wait(30.0)
        self.kill_supervisors()
        nobody_is_left(self.state_dir)

    def kill_supervisors(self) -> None:
        for status_file in self.state_dir.glob("jobs/*/i*/supervisors/*/status.json"):
            status = SupervisorFolder(status_file.parent).read_status()
            if status is not None and status.supervisor is not None:
                status.supervisor.kill()

    def submit(self, task: str, epochs: int, **given: Any) -> str:
        submission = JobSubmission(
            identity=JobIdentity(dag_id="daily", run_id="run1", task_id=task),
            command=Command(
                snapshot=self.snapshot.sha256,
                script="train.py",
                args=(str(epochs),),
                env={HURRY_ENV: str(self.state_dir.parent / "hurry")},
            ),
            length=Length(epochs=epochs, samples=SAMPLES),
            global_batch_size=BATCH,
            best_effort="deadline_at" not in given,
            **given,
        )
        self.client.upload_snapshot(self.snapshot)
        job_id = submission.identity.job_id
        self.claims[job_id] = self.client.submit(submission).claim
        return job_id

    def events(self, job_id: str, kind: str) -> list[Event]:
        return [event for event in self.client.events(job_id) if event.kind == kind]

    def wait(self, condition: Callable[[], Any], what: str, limit_s: float = 120.0) -> Any:
        end = time.monotonic() + limit_s
        while not (value := condition()):
            assert time.monotonic() < end, f"waited {limit_s} s in vain: {what}\n{self.story()}"
            time.sleep(0.05)
        return value

    def story(self) -> str:
        events = sorted((e for job_id in self.claims for e in self.client.events(job_id)), key=lambda e: e.at)
        lines = [f"{event.at:.1f} {event.job_id} {event.kind}: {event.reason}" for event in events]
        for path in sorted(self.state_dir.glob("jobs/*/i*/logs/*.log")):
            lines += [f"-- {path.name}", *path.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(lines)

    def worker(self, job_id: str, worker_id: str) -> WorkerStatus:
        for path in (self.state_dir / "jobs" / job_id).glob("i*/supervisors/*/status.json"):
            status = SupervisorFolder(path.parent).read_status()
            worker = status.workers.get(worker_id) if status is not None else None
            if worker is not None and worker.trainer is not None and worker.agent is not None:
                return worker
        raise AssertionError(f"no trainer of {worker_id} is known\n{self.story()}")

    def members(self, job_id: str) -> list[str]:
        """Who trains, in rank order, by the plan."""
        plan = Membership.read(self.state_dir / "jobs" / job_id / "i000001")
        assert plan is not None
        return [member.worker_id for member in plan.members]

    def changed(self, job_id: str, workers: int, times: int) -> None:
        """Wait until its workers have changed so often, and so many of them train."""
        self.wait(lambda: len(self.events(job_id, "rescaled")) >= times, f"{times} changes in place")
        found = self.events(job_id, "rescaled")[times - 1]
        assert found.data["workers"] == workers, self.story()
        step = self.client.status(job_id).step
        self.wait(lambda: self.client.status(job_id).step > step + 5, "it makes steps")

    def ends(self, job_id: str, epochs: int, *, hurried: bool = True) -> None:
        """It comes to its end, without a restart, and has used every sample once an epoch.

        ``hurried``: quickly, from now on; not where its speed matters for its deadline.
        """
        if hurried:
            hurry(self.state_dir.parent / "hurry", job_id)
        self.wait(lambda: self.client.renew(job_id, self.claims[job_id]).state.terminal, f"{job_id} ends", 300)
        status = self.client.status(job_id)
        assert status.state == "succeeded", self.story()
        assert status.result is not None
        assert status.result.steps == epochs * STEPS_PER_EPOCH, self.story()
        assert status.result.metrics == {"least": epochs, "most": epochs}, self.story()
        assert not self.events(job_id, "restarting"), self.story()


def trial_parts(
    daemons: Any, open_client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str = SCALING
) -> tuple[Any, ElasticFlowClient, Path, Any]:
    """Return what a trial of the script ``text`` is made of, in order; without GPUs, with a client that is patient."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(text)
    state_dir = daemons.state_dir("state")
    client = open_client(Endpoint(socket_path=state_dir / "service.sock"))
    client.retry_for_s = 60.0
    return daemons, client, state_dir, snapshot_script(script)


def nobody_is_left(state_dir: Path) -> None:
    """Wait until no process belongs to a state directory any more."""
    end = time.monotonic() + 30
    while left := processes_of(state_dir):
        assert time.monotonic() < end, left
        time.sleep(0.1)


def processes_of(folder: Path) -> list[str]:
    """Command lines of processes that belong to a state directory, by their arguments or environment."""
    needle, found = os.fsencode(folder), []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes()
            about = words + Path(f"/proc/{name}/environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if int(name) != os.getpid() and needle in about:
            found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found
