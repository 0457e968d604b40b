"""A torchrun script that imports nothing of ours gets a deadline from the real service, and meets it with restarts."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import Endpoint, snapshot_script
from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder
from elasticflow_airflow.runtime.protocol import Membership

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")

DOCS = Path(__file__).resolve().parents[3] / "docs"
STEPS = 114
PACED = """
import os, runpy, sys, time
from torch.optim.optimizer import register_optimizer_step_post_hook

def pace(*_):
    if not os.path.exists(sys.argv[2] + "/hurry"):
        time.sleep(0.2)

register_optimizer_step_post_hook(pace)
runpy.run_path("train_plain.py", run_name="__main__")
"""
"""The example, slow until the test is in a hurry."""


@pytest.mark.slow
def test_it_is_measured_admitted_and_done_in_time(daemons, open_client, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, saved = tmp_path / "code", tmp_path / "saved"
    code.mkdir()
    (code / "paced.py").write_text(PACED)
    shutil.copy(DOCS / "examples/train_plain.py", code)
    state_dir = daemons.state_dir("state")
    service = daemons.popen("state", engine="local", slots=2, profile_s=1)
    client = open_client(Endpoint(socket_path=state_dir / "service.sock"))
    client.retry_for_s = 60.0
    regex = re.search(r'progress_regex=r"(.*)"', (DOCS / "how-to/plain-torchrun-script.md").read_text())
    assert regex is not None
    snapshot = snapshot_script(code / "paced.py")
    client.upload_snapshot(snapshot)
    submission = JobSubmission(
        identity=JobIdentity(dag_id="daily", run_id="run1", task_id="plain"),
        command=Command(snapshot=snapshot.sha256, script="paced.py", args=("--folder", str(saved))),
        length=Length(steps=STEPS),
        global_batch_size=32,
        progress_regex=regex[1],
        deadline_at=time.time() + 240,
    )
    job_id = submission.identity.job_id
    claim = client.submit(submission).claim

    def story() -> str:
        lines = [f"{event.at:.1f} {event.kind}: {event.reason}" for event in client.events(job_id)]
        for path in sorted(state_dir.glob("jobs/*/i*/logs/*.log")):
            lines += [f"-- {path.name}", *path.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(lines)

    def trains_with_two() -> bool:
        plan = Membership.read(state_dir / f"jobs/{job_id}/i000001")
        if plan is None or len(plan.members) != 2:
            return False
        log = state_dir / f"jobs/{job_id}/i000001/logs/{plan.members[0].worker_id}.log"
        return log.exists() and "step " in log.read_text()

    try:
        end_s = time.monotonic() + 200.0
        while not (status := client.renew(job_id, claim)).state.terminal:
            assert time.monotonic() < end_s, story()
            if status.verdict.decision == "admitted" and trains_with_two():
                (saved / "hurry").touch()
            time.sleep(0.05)
        assert status.state == "succeeded", story()
        assert status.result is not None
        assert status.verdict.decision == "admitted", story()
        assert (status.result.steps, status.result.met) == (STEPS, True), story()
        assert status.result.checkpoint_path is None
        logs = [path.read_text() for path in state_dir.glob("jobs/*/i*/logs/*.log")]
        steps = sorted(int(n) for log in logs for n in re.findall(r"^step (\d+) ", log, re.MULTILINE))
        assert steps == list(range(1, STEPS + 1)), "restarts lost none, and repeated none"
        # Who gets SIGTERM between its last step and its end is started once more, and says again that it has finished.
        (accuracy,) = {float(n) for log in logs for n in re.findall(r"^finished with accuracy ([\d.]+)$", log, re.M)}
        assert accuracy > 0.9
        assert [event.kind for event in client.events(job_id)].count("succeeded") == 1
        sizes = {event.data["workers"] for event in client.events(job_id) if event.kind == "started"}
        assert sizes == {1, 2}, story()
    finally:
        service.terminate()
        service.wait(30.0)
        for status_file in state_dir.glob("jobs/*/i*/supervisors/*/status.json"):
            supervisor = SupervisorFolder(status_file.parent).read_status()
            if supervisor is not None and supervisor.supervisor is not None:
                supervisor.supervisor.kill()
