"""A day of recurring trainings whose speeds are not as told: what was promised, kept and late, beside the confidence.

What is random comes from ``DAY_SEED``; ``DAY_HOURS`` changes how many hours the day has.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.recurring_day import Tally, Task, all_due, make_tasks
from support.served import Served

from elasticflow_airflow.api import Command, JobIdentity, JobStatus, JobSubmission, Length
from elasticflow_airflow.client import ElasticFlowClient, snapshot_folder
from elasticflow_airflow.service.decisions.task_history import past_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(7200)]

SEED = int(os.environ.get("DAY_SEED", "1"))
HOURS = int(os.environ.get("DAY_HOURS", "24"))
HOUR_S = 3600.0


@pytest.mark.parametrize("confidence", [0.9, 0.5])
def test_a_modelled_day_of_wrong_curves_keeps_what_was_promised(make_world, confidence):
    """The service is the real one, its time and its workers are modelled."""
    chaos = random.Random(SEED)
    world = make_world(nodes=1, slots=4, confidence=confidence)
    tasks = make_tasks(chaos, 10, {1: 10.0, 2: 18.0, 4: 32.0}, range(6_000, 16_000))
    begin_s, pending = world.elapsed_s, all_due(tasks, HOURS)
    runs: dict[str, list] = {task.name: [] for task in tasks}
    while pending or any(not world.status(run).state.terminal for some in runs.values() for run in some[-2:]):
        while pending and world.elapsed_s - begin_s >= pending[0][0] * HOUR_S:
            _, task = pending.pop(0)
            told = {"scaling_curve": task.told, "max_workers": 4, "within": task.within_s(chaos, 32.0), "lease_s": 1e6}
            which = {"task": task.name, "run": f"hour{len(runs[task.name]):02}", "steps": task.steps}
            fake = {"steps_per_s": task.speeds_of_a_run(chaos)}
            runs[task.name].append(world.submit(**which, **told, fake=fake))
        world.step(5.0)
    tally = Tally()
    for run in (run for some in runs.values() for run in some):
        tally.add(world.status(run), announced=bool(world.events(run, "at_risk")))
    print(f"seed {SEED}, confidence {confidence}: {dict(tally.counts)}, late {tally.late:.2%} of the promised")
    assert tally.counts["promised"] > HOURS * len(tasks) / 2
    assert tally.late <= 1.0 - confidence
    assert not tally.unannounced
    with world.store.read() as reader:
        last = [some[-1] for some in runs.values()]
        keys = [(reader.job(run.job.job_id).recurring_key, world.row(run).signature) for run in last]
        found = [past_of(reader.history(*key)).errors for key in keys]
        errors = [error for by_size in found for seen in by_size.values() for error in seen]
    assert errors
    assert all(math.isfinite(error) for error in errors)


# -- real workers ------------------------------------------------------------------------------------------------

SHORT_HOUR_S = float(os.environ.get("DAY_HOUR_S", "80"))
"""With real workers an hour is so short, and so are the trainings."""
SCRIPT = """
import json
import sys
import time
import torch
from elasticflow_airflow import runtime

speeds = {int(size): speed for size, speed in json.loads(sys.argv[1]).items()}
session = runtime.init()
loader = session.dataloader(range(4096), global_batch_size=8)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
session.register(model, optimizer)
for _ in session.epochs():
    for batch in loader:
        began_s, size = time.monotonic(), session.world_size
        with session.step() as step:
            for ids in step.split(batch):
                step.backward(model(ids.float().unsqueeze(1) / 4096).mean())
            optimizer.step()
            optimizer.zero_grad()
        time.sleep(max(0.0, 1.0 / speeds[size] - (time.monotonic() - began_s)))
        session.log(loss=step.loss)
session.finish()
"""
"""A step takes what the true speed says, and more where the machine is busy."""


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Four slots of this machine, with the settings that everybody gets."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    service = Served(tmp_path / "state", {"engine": "local", "slots": 4, "slot_lock_dir": tmp_path / "locks"})
    service.start()
    yield service
    service.end()


class LocalDay:
    """Submits what is due to a service with real workers, and renews the leases of all that live."""

    def __init__(self, client: ElasticFlowClient, code: Path, chaos: random.Random) -> None:
        (code / "train.py").write_text(SCRIPT)
        self._client, self._chaos = client, chaos
        self._snapshot = snapshot_folder(code)
        self._claims: dict[str, int] = {}
        self.ended: dict[str, JobStatus] = {}
        client.upload_snapshot(self._snapshot)

    def submit(self, task: Task, run: str) -> None:
        submission = JobSubmission(
            identity=JobIdentity(dag_id="day", run_id=run, task_id=task.name),
            command=Command(
                snapshot=self._snapshot.sha256,
                script="train.py",
                args=(json.dumps(task.speeds_of_a_run(self._chaos)),),
            ),
            length=Length(steps=task.steps),
            global_batch_size=8,
            max_workers=4,
            scaling_curve=task.told,
            deadline_at=time.time() + task.within_s(self._chaos, 40.0),
        )
        attached = self._client.submit(submission)
        self._claims[attached.job.job_id] = attached.claim

    def follow(self) -> bool:
        """Look at all that live; whether there are any."""
        for job_id, claim in list(self._claims.items()):
            status = self._client.renew(job_id, claim)
            if status.state.terminal:
                self.ended[job_id] = status
                del self._claims[job_id]
        return bool(self._claims)


def test_a_day_on_this_machine_keeps_what_was_promised(served: Served, tmp_path: Path) -> None:
    """The real service, its default settings, real workers under torchrun; hours are short, speeds are slept."""
    pytest.importorskip("torch", reason="needs torch: pip install elasticflow-airflow[torch]")
    chaos = random.Random(SEED)
    tasks = make_tasks(chaos, 8, {1: 2.0, 2: 3.6, 4: 6.4}, range(40, 120))
    pending, numbers = all_due(tasks, HOURS), {task.name: 0 for task in tasks}
    code = tmp_path / "code"
    code.mkdir()
    with ElasticFlowClient(served.endpoint, retry_for_s=60.0) as client:
        day, begin_s = LocalDay(client, code, chaos), time.monotonic()
        while day.follow() or pending:
            while pending and time.monotonic() - begin_s >= pending[0][0] * SHORT_HOUR_S:
                _, task = pending.pop(0)
                day.submit(task, f"hour{numbers[task.name]:02}")
                numbers[task.name] += 1
            time.sleep(1.0)
        tally = Tally()
        for job_id, status in day.ended.items():
            events = client.events(job_id)
            tally.add(status, announced=any(event.kind == "at_risk" for event in events))
            if status.result is None or not status.result.met:
                print(job_id, *(f"{event.at:.1f} {event.kind}: {event.reason}" for event in events), sep="\n  ")
    print(f"seed {SEED}, confidence 0.9: {dict(tally.counts)}, late {tally.late:.2%} of the promised")
    assert len(day.ended) == HOURS * len(tasks)
    assert tally.counts["promised"] > HOURS * len(tasks) / 2
    assert tally.late <= 0.1
    assert not tally.unannounced
    assert served.stop() == 0
