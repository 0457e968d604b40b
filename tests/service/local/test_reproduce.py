"""``elasticflow reproduce``: the printed command repeats alone what the real service trained, bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.served import train
from typer.testing import CliRunner

from elasticflow_airflow.api import Command, JobIdentity, JobSubmission, Length
from elasticflow_airflow.cli.main import app
from elasticflow_airflow.client import Endpoint, snapshot_folder

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")

from elasticflow_airflow.runtime.checkpoints.checkpoint import read_weights
from elasticflow_airflow.runtime.stores.manifest import list_candidates

EXAMPLES = Path(__file__).resolve().parents[3] / "docs/examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "needs", "batch"),
    [
        ("train_digits.py", "torch", 16),
        ("train_trainer.py", "transformers", 32),
        pytest.param("train_lightning.py", "lightning", 16, marks=pytest.mark.soak),
    ],
)
def test_command_repeats_run(script, needs, batch, daemons, open_client, tmp_path, monkeypatch) -> None:
    pytest.importorskip(needs)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = tmp_path / "code"
    code.mkdir()
    shutil.copy(EXAMPLES / script, code)
    state_dir = daemons.state_dir("state")
    daemons.popen("state", engine="local", slots=2, profile_s=1)
    client = open_client(Endpoint(socket_path=state_dir / "service.sock"))
    client.retry_for_s = 60.0
    snapshot = snapshot_folder(code)
    client.upload_snapshot(snapshot)
    # Another seed, another batch and another length than the script's own, or than are usual.
    submission = JobSubmission(
        identity=JobIdentity(dag_id="daily", run_id="day one", task_id="train"),
        command=Command(snapshot=snapshot.sha256, script=script),
        length=Length(epochs=2),
        global_batch_size=batch,
        logical_workers=4,
        seed=11,
        best_effort=True,
    )
    job_id, status = submission.identity.job_id, train(client, submission)
    assert status.result is not None
    assert status.result.checkpoint_path is not None

    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(app, ["reproduce", job_id, "--state-dir", str(state_dir)])
    assert printed.exit_code == 0, printed.output
    assert "note:" not in printed.stderr
    # As from a shell of one's own: nothing of the service's is in its environment.
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "CUDA_VISIBLE_DEVICES") if name in os.environ}
    done = subprocess.run(
        ["sh", "-c", printed.stdout], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("reproduced-*")
    repeated = list_candidates(folder)[-1]
    served, alone = read_weights(Path(status.result.checkpoint_path)), read_weights(repeated)
    assert served.keys() == alone.keys()
    assert [name for name in served if not served[name].equal(alone[name])] == []
