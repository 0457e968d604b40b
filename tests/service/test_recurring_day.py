"""A day of recurring trainings whose speeds are not as told: what was promised, kept and late, beside the confidence.

The service is the real one, its time and its workers are modelled: each task is off by an error of its own at each
size, and each run by a little more. What is random comes from ``DAY_SEED``.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from elasticflow_airflow.service.history import past_of

HOUR_S = 3600.0
TOLD = {1: 10.0, 2: 18.0, 4: 32.0}
OWN_SIGMA, RUN_SIGMA = 0.1, 0.03
"""How wrong the curve of a task is at each size, and how much its runs differ besides: sigmas of log-normal factors."""


@dataclass
class Task:
    """One that is due every hour, so many minutes after it."""

    name: str
    minute: int
    steps: int
    least_s: float
    """What it takes with four workers as told, start-up and tail included, as long as nobody has measured them."""
    speeds: dict[int, float]
    runs: list = field(default_factory=list)


def tasks(chaos: random.Random, count: int) -> list[Task]:
    """Some that would fill the cluster."""
    made = []
    for number in range(count):
        steps = chaos.randrange(6_000, 16_000)
        speeds = {size: speed * chaos.lognormvariate(0.0, OWN_SIGMA) for size, speed in TOLD.items()}
        made.append(Task(f"task{number}", chaos.randrange(60), steps, steps / TOLD[4] + 32.0, speeds))
    return made


def play(world, every: list[Task], chaos: random.Random, hours: int) -> None:
    """Submit each task once an hour, with deadlines from tight to easy, and let time pass until all have ended."""
    begin_s, pending = world.elapsed_s, []
    for hour in range(hours):
        pending += [(hour * HOUR_S + task.minute * 60.0, hour, task) for task in every]
    pending.sort(key=lambda due: due[:2])
    while pending or any(not world.status(run).state.terminal for task in every for run in task.runs[-2:]):
        while pending and world.elapsed_s - begin_s >= pending[0][0]:
            _, hour, task = pending.pop(0)
            within_s = task.least_s * chaos.uniform(1.0, 3.0)
            off = chaos.lognormvariate(0.0, RUN_SIGMA)
            fake = {"steps_per_s": {size: speed * off for size, speed in task.speeds.items()}}
            given = {"task": task.name, "run": f"hour{hour:02}", "steps": task.steps, "within": within_s}
            task.runs.append(world.submit(**given, scaling_curve=TOLD, max_workers=4, lease_s=1e6, fake=fake))
        world.step(5.0)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("confidence", [0.9, 0.5])
def test_a_day_of_trainings_with_wrong_curves_keeps_what_was_promised(make_world, confidence):
    seed = int(os.environ.get("DAY_SEED", "1"))
    chaos = random.Random(seed)
    world = make_world(nodes=1, slots=4, confidence=confidence)
    every = tasks(chaos, 10)
    play(world, every, chaos, 24)
    counts: Counter[str] = Counter()
    unannounced = []
    for task in every:
        for run in task.runs:
            done = world.status(run)
            if done.verdict.decision != "admitted":
                counts["refused"] += 1
                continue
            counts["promised"] += 1
            counts["kept" if done.result.met else "late"] += 1
            if not done.result.met and not world.events(run, "at_risk"):
                unannounced.append(run.job.job_id)
    late = counts["late"] / max(1, counts["promised"])
    print(f"seed {seed}, confidence {confidence}: {dict(counts)}, late {late:.2%} of the promised")
    assert counts["promised"] > 100
    assert late <= 1.0 - confidence
    assert not unannounced
    with world.store.read() as reader:
        runs = [task.runs[-1] for task in every]
        keys = [(reader.job(run.job.job_id).recurring_key, world.row(run).signature) for run in runs]
        found = [past_of(reader.history(*key)).errors for key in keys]
        errors = [error for by_size in found for seen in by_size.values() for error in seen]
    assert errors
    assert all(math.isfinite(error) for error in errors)
