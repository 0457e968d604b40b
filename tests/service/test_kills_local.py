"""``kill -9`` of the service while real torchrun workers train: they go on, and every sample counts exactly once."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from elasticflow_airflow.client import Endpoint, snapshot_script
from elasticflow_airflow.wire import Command, JobIdentity, JobSubmission, Length

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")

SAMPLES, BATCH, EPOCHS, KILLS = 640, 32, 25, 12
COUNTING = f"""
import time
import torch
from elasticflow_airflow import runtime

SAMPLES, BATCH = {SAMPLES}, {BATCH}

class Counter(torch.nn.Module):
    '''Every use of a sample adds 1/BATCH to its weight: exactly, as BATCH is a power of two.'''
    def __init__(self):
        super().__init__()
        self.uses = torch.nn.Parameter(torch.zeros(SAMPLES))
    def forward(self, ids):
        return -self.uses[ids].mean()

session = runtime.init(epochs={EPOCHS})
loader = session.dataloader(range(SAMPLES), global_batch_size=BATCH, shuffle=True)
model = Counter()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
session.register(model=model, optimizer=optimizer)
for epoch in session.epochs():
    for batch in loader:
        with session.step() as step:
            for ids in step.split(batch):
                step.backward(model(ids))
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(0.1)
        session.log(loss=step.loss)
uses = model.uses.detach() * BATCH
session.finish(metrics={{"least": float(uses.min()), "most": float(uses.max())}})
"""


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


@pytest.mark.slow
def test_training_survives_a_service_that_is_killed_again_and_again(daemons, open_client, tmp_path):
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text(COUNTING)
    snapshot = snapshot_script(script)
    chance = random.Random(7)
    settings = {"engine": "local", "slots": 2, "checkpoint_interval_s": 5, "profile_s": 1}
    state_dir = daemons.state_dir("state")

    def start(crash_at: int = 0) -> subprocess.Popen[bytes]:
        return daemons.popen("state", **settings, crash_at=crash_at)

    def submission(task: str, **given) -> JobSubmission:
        return JobSubmission(
            identity=JobIdentity(dag_id="daily", run_id="run1", task_id=task),
            command=Command(snapshot=snapshot.sha256, script="train.py"),
            length=Length(epochs=EPOCHS, samples=SAMPLES),
            global_batch_size=BATCH,
            **given,
        )

    service = start()
    client = open_client(Endpoint(socket_path=state_dir / "service.sock"))
    client.retry_for_s = 60.0
    client.upload_snapshot(snapshot)
    jobs = [submission("first", deadline_at=time.time() + 500), submission("second", best_effort=True)]
    claims = {job.identity.job_id: client.submit(job).claim for job in jobs}

    crashed, killed_at = 0, []
    for kill in range(KILLS):
        if kill % 2:
            # Right before or after a commit or a call of the engine ...
            try:
                service.wait(10.0)
                crashed += 1
            except subprocess.TimeoutExpired:
                service.kill()
        else:
            # ... and whenever.
            time.sleep(chance.uniform(0.2, 3.0))
            service.send_signal(signal.SIGKILL)
        assert service.wait() == -signal.SIGKILL
        killed_at.append(time.time())
        service = start(crash_at=0 if kill % 2 else chance.randint(1, 40))
    assert crashed >= KILLS // 3

    end = time.monotonic() + 300
    while not all(client.renew(job_id, claim).state.terminal for job_id, claim in claims.items()):
        assert time.monotonic() < end, [(client.status(j).state, client.events(j)) for j in claims]
        time.sleep(0.5)
    last_end = max(client.status(job_id).result.finished_at for job_id in claims)
    assert sum(at < last_end for at in killed_at) >= 10, "the training was too short for these kills"
    for job_id, claim in claims.items():
        status = client.acknowledge(job_id, claim)
        events = client.events(job_id)
        story = "\n".join(f"{e.kind}: {e.reason}" for e in events)
        assert status.state == "succeeded", story
        assert status.incarnation == 1
        assert status.result.steps == EPOCHS * SAMPLES // BATCH
        assert status.result.metrics == {"least": EPOCHS, "most": EPOCHS}, story
        kinds = [event.kind for event in events]
        assert kinds.count("succeeded") == kinds.count("acknowledged") == 1, story
        assert "restarting" not in kinds, story
        ordered = [e.data["generation"] for e in events if e.kind == "resized" and "slots" in e.data]
        assert ordered == list(range(1, status.generation + 1)), story

    service.terminate()
    assert service.wait(30.0) == 0
    end = time.monotonic() + 30
    while left := processes_of(state_dir):
        assert time.monotonic() < end, left
        time.sleep(0.1)
