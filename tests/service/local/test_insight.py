"""What the pages ask, of real torchrun workers under the real service: nothing of it is modelled."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.training_scripts import thinking

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.api.insight import DeadlineChange, WhatIfRequest
from elasticflow_airflow.client import snapshot_script

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")

SCRIPT = thinking("""
def think_hard():
    time.sleep(0.02)
""")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_real_training_tells_its_story(daemons, open_client, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    snapshot = snapshot_script(script)
    client = open_client(daemons.embedded(engine="local", slots=2, grace_s=5, checkpoint_interval_s=2))
    client.upload_snapshot(snapshot)
    attachment = client.submit(
        JobSubmission(
            identity=JobIdentity(dag_id="daily", run_id="run1", task_id="train"),
            command=Command(snapshot=snapshot.sha256, script="train.py", env={"PASSWORD": "hunter2"}),
            length=Length(epochs=100_000, samples=64),
            global_batch_size=8,
            best_effort=True,
            min_workers=2,
            max_workers=2,
            logical_workers=2,
            scaling_curve={2: 20.0},
            lease_s=60,
            orphan_s=5,
        )
    )
    job_id, end = attachment.job.job_id, time.monotonic() + 150

    def until(condition: Callable[[], Any]) -> Any:
        while not (value := condition()):
            events = [f"{event.kind}: {event.reason}" for event in client.events(job_id)]
            assert not client.renew(job_id, attachment.claim).state.terminal, events
            assert time.monotonic() < end, (events, client.story(job_id))
            time.sleep(0.3)
        return value

    def told() -> Any:
        story = client.story(job_id)
        sized = [one for one in story.checkpoints if one.size_bytes and one.at]
        return story if len(story.workers) == 2 and len(story.samples) > 3 and sized else None

    story = until(told)
    assert [one.rank for one in story.workers] == [0, 1]
    assert all(one.compute_s > 0.0 and one.window_steps > 0 and one.memory_bytes for one in story.workers)
    for one in story.workers:
        assert one.samples == 4 * one.window_steps
        assert one.reduce_s + one.wait_s > 0.0
        assert one.data_s >= 0.0
    assert story.samples_per_s is not None
    assert story.samples_per_s > 0.0
    assert all(one.loss is not None and one.workers == 2 for one in story.samples)
    assert story.why.startswith("holds 2 slots")
    assert story.submission["command"]["env"] == ["PASSWORD"]
    assert "hunter2" not in story.model_dump_json()

    before = client.status(job_id).step
    stacks = client.stacks(job_id).stacks
    assert stacks.keys() == {one.worker_id for one in story.workers}
    assert all("train.py" in text and "most recent call first" in text for text in stacks.values()), stacks
    until(lambda: client.status(job_id).step > before + 20)
    assert client.status(job_id).generation == 1

    now = client.cluster()
    assert {slot.job_id for slot in now.slots} == {job_id}
    history = client.history(now.at - 600, now.at + 600, 4)
    assert [span.workers for span in history.spans] == [2]
    assert 0.0 < sum(history.computing_slot_s) <= sum(history.held_slot_s)
    change = DeadlineChange(job_id=job_id, deadline_at=now.at + 30)
    (answer,) = client.what_if(WhatIfRequest(changes=[change])).verdicts
    assert answer.verdict.decision == "rejected"
    client.cancel(job_id, attachment.claim, "seen enough")
    while not client.status(job_id).state.terminal:
        assert time.monotonic() < end
        time.sleep(0.1)
    assert client.stacks(job_id).stacks == {}
    assert [run.state for run in client.runs(job_id)] == ["cancelled"]
