"""A worker that is slow for good, with real torchrun under the real service: its gang moves off the slot in place."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.training_scripts import thinking

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import snapshot_script

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")

SCRIPT = thinking("""
import os
from pathlib import Path
from elasticflow_airflow.runtime.protocol import SESSION_ENV, WORKER_ENV, Membership

def slot():
    plan = Membership.read(Path(os.environ[SESSION_ENV]).parent)
    mine = [member.slot_index for member in plan.members if member.worker_id == os.environ[WORKER_ENV]]
    return mine[0] if mine else None

def think_hard():
    time.sleep(0.08 if slot() == 1 else 0.01)
""")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_gang_moves_off_a_slow_slot(daemons, open_client, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    snapshot = snapshot_script(script)
    # No two workers compute alike on a machine that others use, too.
    settings = {"slots": 4, "grace_s": 5, "straggler_windows": 2, "straggler_excess": 1.0}
    client = open_client(daemons.embedded(engine="local", **settings))
    client.upload_snapshot(snapshot)
    attachment = client.submit(
        JobSubmission(
            identity=JobIdentity(dag_id="daily", run_id="run1", task_id="train"),
            command=Command(snapshot=snapshot.sha256, script="train.py"),
            length=Length(epochs=1000, samples=64),
            global_batch_size=8,
            best_effort=True,
            min_workers=2,
            max_workers=2,
            logical_workers=2,
            scaling_curve={2: 15.0},
            lease_s=60,
            orphan_s=5,
        )
    )
    job_id, end = attachment.job.job_id, time.monotonic() + 150

    def story() -> str:
        return "\n".join(f"{event.kind}: {event.reason}" for event in client.events(job_id))

    def happened(kind: str) -> list[str]:
        return [event.reason for event in client.events(job_id) if event.kind == kind]

    while not happened("rescaled"):
        assert not client.renew(job_id, attachment.claim).state.terminal, story()
        assert time.monotonic() < end, story()
        time.sleep(0.2)
    status = client.status(job_id)
    client.cancel(job_id, attachment.claim, "seen enough")
    while not client.status(job_id).state.terminal:
        assert time.monotonic() < end, story()
        time.sleep(0.1)
    (seen,) = happened("slow_worker")
    assert seen.startswith("worker g000001-r001 on "), story()
    assert "its gang moves to other slots, and the slot is avoided until " in seen
    assert {index for _, index in status.slots} == {2, 3}
    assert happened("rescaled")[0].startswith("moved in place with 2 workers to other slots at step ")
    assert not happened("restarting"), story()
    (slow,) = (slot for slot in client.health().slots if slot.avoided_until is not None)
    assert slow.index == 1
