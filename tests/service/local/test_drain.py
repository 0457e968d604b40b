"""A node goes away at a date, under the real service with real torchrun: its worker is elsewhere before, at no cost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.training_scripts import BATCH, COUNTING, HURRY_ENV, SAMPLES, STEPS_PER_EPOCH, hurry

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import Endpoint, snapshot_script
from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder
from elasticflow_airflow.runtime.protocol import ReportKind, read_reports

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")

EPOCHS = 6
NOTICE_S = 30.0
PACED = COUNTING.replace("rest(0.1)", "rest(0.4)")
assert PACED != COUNTING


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_step_is_lost_with_a_node_that_gave_notice(daemons, open_client, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script, rests = tmp_path / "code" / "train.py", tmp_path / "hurry"
    script.parent.mkdir()
    script.write_text(PACED)
    snapshot = snapshot_script(script)
    state_dir = daemons.state_dir("state")
    # The node is left as soon as the notice is there; no checkpoint is written that could be gone back to.
    service = daemons.popen(
        "state", engine="local", virtual_nodes="2x1", drain_lead_s=NOTICE_S, checkpoint_interval_s=1e6
    )
    client = open_client(Endpoint(socket_path=state_dir / "service.sock"))
    client.retry_for_s = 60.0
    client.upload_snapshot(snapshot)
    submission = JobSubmission(
        identity=JobIdentity(dag_id="daily", run_id="run1", task_id="train"),
        command=Command(snapshot=snapshot.sha256, script="train.py", args=(str(EPOCHS),), env={HURRY_ENV: str(rests)}),
        length=Length(epochs=EPOCHS, samples=SAMPLES),
        global_batch_size=BATCH,
        best_effort=True,
        max_workers=1,
        scaling_curve={1: 5.0},
    )
    job_id, end_s = submission.identity.job_id, time.monotonic() + 200
    claim = client.submit(submission).claim
    gone: list[SupervisorFolder] = []

    def story() -> str:
        lines = [f"{event.at:.1f} {event.kind}: {event.reason}" for event in client.events(job_id)]
        for path in sorted(state_dir.glob("jobs/*/i*/logs/*.log")):
            lines += [f"-- {path.name}", *path.read_text(errors="replace").splitlines()[-15:]]
        return "\n".join(lines)

    def kinds() -> list[str]:
        return [event.kind for event in client.events(job_id)]

    def supervisors() -> list[SupervisorFolder]:
        return [SupervisorFolder(path.parent) for path in state_dir.glob("jobs/*/i*/supervisors/*/status.json")]

    try:
        while client.renew(job_id, claim).step < 5:
            assert time.monotonic() < end_s, story()
            time.sleep(0.05)
        ((home, _),) = client.status(job_id).slots
        client.drain(home, time.time() + NOTICE_S)
        while "rescaled" not in kinds():
            assert not client.renew(job_id, claim).state.terminal, story()
            assert time.monotonic() < end_s, story()
            time.sleep(0.05)
        ((away, _),) = client.status(job_id).slots
        assert away != home, story()
        for folder in supervisors():  # the node is gone, whoever is there still
            status = folder.read_status()
            if folder.path.name.endswith(home) and status is not None and status.supervisor is not None:
                gone.append(folder)
                status.supervisor.kill()
        assert gone, [folder.path for folder in supervisors()]
        hurry(rests, job_id)
        while not (status := client.renew(job_id, claim)).state.terminal:
            assert time.monotonic() < end_s, story()
            time.sleep(0.05)
        assert status.state == "succeeded", story()
        assert status.result is not None
        assert (status.result.steps, status.result.metrics) == (
            EPOCHS * STEPS_PER_EPOCH,
            {"least": EPOCHS, "most": EPOCHS},
        ), story()
        assert not {"restarting", "worker_lost"} & set(kinds()), story()
        (moved,) = [event for event in client.events(job_id) if event.kind == "rescaled"]
        assert moved.reason.startswith("moved in place"), story()
        # Who came took over where the one before had stopped: at no step before it.
        logs = [path for path in state_dir.glob("jobs/*/i*/reports/**/*") if path.is_file()]
        found = [report for path in logs for report, _ in read_reports(path)]
        (left,) = [report.step for report in found if report.kind is ReportKind.STOPPED]
        (came,) = [report.step for report in found if report.kind is ReportKind.STARTED and report.generation == 2]
        assert left == came, story()
    finally:
        service.terminate()
        service.wait(30.0)
        for folder in supervisors():
            status_then = folder.read_status()
            if status_then is not None and status_then.supervisor is not None:
                status_then.supervisor.kill()
