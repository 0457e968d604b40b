"""A loss to train to with real torchrun under the real service: the session ends there, and foresees it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import snapshot_script

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")

# The loss falls as 1 / (k / 50 + 1/4): it is 0.25 after 187 steps, and its mean over the last 32 some steps later.
SCRIPT = """
import time
import torch
from elasticflow_airflow import runtime

class Falling(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = torch.nn.Parameter(torch.zeros(()))
    def forward(self, ids):
        value = self.steps.detach() / 50 + 0.25
        return 1 / value + (self.steps.detach() - self.steps) * len(ids) / 8

session = runtime.init()
loader = session.dataloader(range(64), global_batch_size=8)
model = Falling()
session.register(model=model, optimizer=(optimizer := torch.optim.SGD(model.parameters(), lr=1.0)))
for epoch in session.epochs():
    for batch in loader:
        with session.step() as step:
            for ids in step.split(batch):
                step.backward(model(ids))
            model.steps.grad.fill_(-1.0)
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.03)
session.finish()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_training_ends_at_its_target(daemons, open_client, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    snapshot = snapshot_script(script)
    client = open_client(daemons.embedded(engine="local", slots=1, grace_s=5))
    client.upload_snapshot(snapshot)
    attachment = client.submit(
        JobSubmission(
            identity=JobIdentity(dag_id="daily", run_id="run1", task_id="train"),
            command=Command(snapshot=snapshot.sha256, script="train.py"),
            length=Length(epochs=250, samples=64),
            global_batch_size=8,
            best_effort=True,
            target_loss=0.25,
            scaling_curve={1: 20.0},
        )
    )
    job_id, end, expected = attachment.job.job_id, time.monotonic() + 120, set()
    while not (status := client.renew(job_id, attachment.claim)).state.terminal:
        expected.add(status.expected_steps)
        assert time.monotonic() < end, client.events(job_id)
        time.sleep(0.2)
    story = "\n".join(f"{event.kind}: {event.reason}" for event in client.events(job_id))
    assert (status.state, status.target_reached) == ("succeeded", True), story
    assert 187 < status.step < 260, story
    assert f"target loss 0.25 reached at step {status.step} of at most 2000" in story
    assert "target loss 0.25 is expected at step " in story
    assert expected - {None}, story
