"""One script, the same weights: alone, and from the real service, whatever slots it has and may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import digests
from support.served import train

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.client import Endpoint, snapshot_folder

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")

SCRIPT = """
import torch
from digests import digest_of
from elasticflow_airflow import runtime

session = runtime.init()
data = torch.utils.data.TensorDataset(torch.randn(96, 64), torch.randn(96, 1))
loader = session.dataloader(data, global_batch_size=16)
model = torch.nn.Sequential(
    torch.nn.Unflatten(1, (1, 64)), torch.nn.Conv1d(1, 32, 9), torch.nn.Dropout(0.2), torch.nn.Conv1d(32, 64, 9),
    torch.nn.Flatten(), torch.nn.Linear(64 * 48, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
session.register(model, optimizer)
for _ in session.epochs(3):
    for batch in loader:
        with session.step() as step:
            for inputs, wanted in step.split(batch):
                step.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
            optimizer.step()
            optimizer.zero_grad()
session.finish(metrics={"weights": digest_of(model)})
print("WEIGHTS", digest_of(model))
"""


@pytest.mark.slow
@pytest.mark.parametrize("slots", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_alone_and_served_give_the_same_weights(daemons, open_client, tmp_path: Path, monkeypatch, slots: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = tmp_path / "code"
    code.mkdir()
    (code / "train.py").write_text(SCRIPT)
    (code / "seeded.py").write_text(SCRIPT.replace("init()", "init(seed=5)"))
    (code / "few.py").write_text(SCRIPT.replace("init()", "init(logical_workers=4)"))
    (code / "digests.py").write_text(Path(digests.__file__).read_text())

    def alone(script: str) -> str:
        # As from a shell of one's own: torch would take all cores, and a slot has as many as its share of them.
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
        environment |= {"ELASTICFLOW_CHECKPOINT_DIR": str(tmp_path / script)}
        command = [sys.executable, script]
        done = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("WEIGHTS ")[1].split()[0]

    usual, seeded = alone("train.py"), alone("seeded.py")
    assert usual != seeded
    state_dir = daemons.state_dir("state")
    daemons.popen("state", engine="local", slots=slots, profile_s=1)
    client = open_client(Endpoint(socket_path=state_dir / "service.sock"))
    client.retry_for_s = 60.0
    snapshot = snapshot_folder(code)
    client.upload_snapshot(snapshot)

    def served(run: str, script: str = "train.py", **given: object) -> tuple[object, int | None, int | None]:
        submission = JobSubmission(
            identity=JobIdentity(dag_id="daily", run_id=run, task_id="train"),
            command=Command(snapshot=snapshot.sha256, script=script),
            length=Length(epochs=3, samples=96),
            global_batch_size=16,
            best_effort=True,
            **given,
        )
        status = train(client, submission)
        assert status.result is not None
        return status.result.metrics["weights"], status.logical_workers, status.seed

    assert served("usual") == (usual, 8, 0)
    if slots == 1:
        return  # It has all cores.
    assert served("few", max_workers=1) == (usual, 8, 0)
    assert served("its-own", "seeded.py") == (seeded, 8, 5)
    few = alone("few.py")
    assert served("its-own-shares", "few.py") == (few, 4, 0)
    assert served("submitted", seed=5) == (seeded, 8, 5)
    assert served("other", logical_workers=2)[0] != usual, "another training, and the user said so"
