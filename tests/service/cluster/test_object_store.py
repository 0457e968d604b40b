"""Checkpoints of a cluster's jobs in an object store: no folder is shared by the machines."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from support.node_agents import TOKEN, start_agent
from support.object_store import bucket, s3_server
from support.training_scripts import STEPS_PER_EPOCH
from support.trial import Trial, trial_parts

from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder
from elasticflow_airflow.runtime import load_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass
class StoreTrial(Trial):
    """Two agents with a slot each, which share nothing but the store."""

    agents: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def base(self) -> Path:
        return self.state_dir.parent

    def kill_workers(self) -> None:
        """Kill all that train, on both nodes at once: nobody keeps the state in memory."""
        for path in self.base.glob("node*/jobs/*/i*/supervisors/*/status.json"):
            status = SupervisorFolder(path.parent).read_status()
            for worker in status.workers.values() if status is not None else ():
                for process in (worker.agent, worker.trainer):
                    if process is not None:
                        process.kill()


@pytest.fixture
def trial(daemons, open_client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreTrial]:
    with s3_server() as server:
        url = bucket(server, monkeypatch, "checkpoints")
        identity = tmp_path / "credentials"
        identity.write_text("[default]\naws_access_key_id = test\naws_secret_access_key = test\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(identity))  # as machines have it
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(key)
        trial = StoreTrial(*trial_parts(daemons, open_client, tmp_path, monkeypatch))
        urls = []
        try:
            for index in range(2):
                agent, at = start_agent(trial.base, f"node{index}", f"127.0.0.{index + 1}:0", 1, shared=url)
                trial.agents.append(agent)
                urls.append(at)
            trial.settings = {
                "engine": "cluster",
                "nodes": ",".join(urls),
                "shared_dir": url,
                "node_token": TOKEN,
                "checkpoint_interval_s": 1,
            }
            trial.start()
            yield trial
            trial.end()
        finally:
            for agent in trial.agents:
                agent.kill()
                agent.wait()


def test_a_job_goes_on_from_the_store_and_the_next_starts_from_there(trial: StoreTrial) -> None:
    job = trial.submit("first", 12, scaling_curve={1: 6.0, 2: 9.0}, min_workers=2, max_workers=2)
    trial.wait(lambda: trial.events(job, "checkpoint"), "a checkpoint counts")
    (first, *_) = trial.events(job, "checkpoint")
    url = first.data["checkpoint_path"]
    assert url.startswith("s3://checkpoints/training/jobs/")
    trial.kill_workers()
    trial.wait(lambda: trial.client.renew(job, trial.claims[job]).state.terminal, "it ends", 300)
    status = trial.client.status(job)
    assert status.state == "succeeded", trial.story()
    assert status.result is not None
    assert status.result.steps == 12 * STEPS_PER_EPOCH
    assert status.result.metrics == {"least": 12, "most": 12}, "it did not go on from the checkpoint"
    assert trial.events(job, "restarting"), trial.story()
    assert not list(trial.base.glob("**/*.tensors")), "a machine has a checkpoint of its own"

    end = status.result.checkpoint_path
    assert end is not None
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="fit"):
        load_weights(model, end)  # It is there, and of another model.
    trial.client.acknowledge(job, trial.claims[job])
    again = trial.submit("second", 1, scaling_curve={1: 6.0}, max_workers=1, init_from=end)
    trial.wait(lambda: trial.client.renew(again, trial.claims[again]).state.terminal, "the second ends", 120)
    assert trial.client.status(again).state == "succeeded", trial.story()
    assert trial.events(again, "initialised")[0].reason == f"starts from the weights of {end}"
    kept = lambda: list_steps(url)  # noqa: E731
    trial.wait(lambda: len(kept()) <= 3, f"old ones are deleted: {kept()}")


def list_steps(url: str) -> list[str]:
    import s3fs

    store = s3fs.S3FileSystem()
    store.invalidate_cache()
    return [str(path) for path in store.glob(f"{url.rsplit('/', 2)[0]}/g*/step-*/manifest.json")]
