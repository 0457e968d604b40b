"""Changes of workers in place with real torchrun under the real service: grow, lose a worker, shrink, each sample once.

The script counts how often each sample is used: equal weights would not prove that each was used exactly once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.trial import Trial, trial_parts

pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")


@pytest.fixture
def trial(daemons, open_client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    trial = Trial(*trial_parts(daemons, open_client, tmp_path, monkeypatch))
    trial.start()
    yield trial
    trial.end()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_training_grows_loses_a_worker_grows_again_and_makes_room(trial):
    short = trial.submit("short", 2, max_workers=1, scaling_curve={1: 8.0})
    job = trial.submit("long", 35, scaling_curve={1: 6.0, 2: 9.0}, logical_workers=4)
    trial.wait(lambda: trial.client.status(job).step > 3, "it trains beside the other")
    trial.ends(short, 2)
    (grown,) = trial.wait(lambda: trial.events(job, "rescaled"), "it grows in place")
    assert grown.reason.startswith("rescaled in place from 1 to 2 workers at step "), trial.story()
    assert 0 < grown.data["pause_s"] < 10

    step = trial.client.status(job).step
    trial.wait(lambda: trial.client.status(job).step > step + 5, "both train")
    trial.worker(job, "g000002-r001").trainer.kill()
    (lost,) = trial.wait(lambda: trial.events(job, "worker_lost"), "the death is seen")
    assert lost.reason.endswith("died (signal 9): 1 worker goes on from memory")
    trial.wait(lambda: len(trial.events(job, "rescaled")) >= 2, "the other goes on")
    trial.wait(lambda: len(trial.events(job, "rescaled")) >= 3, "it grows again")

    other = trial.submit("other", 2, max_workers=1, scaling_curve={1: 8.0}, deadline_at=time.time() + 200)
    trial.wait(lambda: len(trial.events(job, "rescaled")) >= 4, "it makes room")
    trial.ends(other, 2)
    trial.ends(job, 35)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_whoever_is_killed_or_hangs_the_others_go_on(trial):
    job = trial.submit("only", 30, scaling_curve={1: 6.0, 2: 9.0}, max_workers=2)
    trial.wait(lambda: trial.client.status(job).step > 20, "it trains with both")
    changes = 0
    for rank, part in ((1, "agent"), (1, "hangs"), (0, "service too")):
        worker = trial.worker(job, trial.members(job)[rank])
        if part == "hangs":
            os.kill(worker.trainer.pid, signal.SIGSTOP)
        elif part == "agent":
            worker.agent.kill()
        else:
            worker.trainer.kill()
        if part == "service too":
            trial.service.kill()
            trial.service.wait()
            trial.start()
        trial.changed(job, 1, changes + 1)
        trial.changed(job, 2, changes + 2)
        changes += 2
    trial.ends(job, 30)
    assert len(trial.events(job, "worker_lost")) == 3, trial.story()
    assert "held the others up for" in trial.story()
