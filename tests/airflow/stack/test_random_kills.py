"""Whatever is killed, restarted and cleared, in whatever order: each training ends once, and nothing is left.

The seed is in the test's id: a failure is repeated with ``-k``, as far as a busy machine repeats anything.
"""

from __future__ import annotations

import random
import signal
import time

import psutil
import pytest
from support.airflow_paths import PATHS
from support.airflow_stack import COMPONENTS, LEASE_S, Run, Stack

from elasticflow_airflow.api import State

pytestmark = [pytest.mark.airflow, pytest.mark.soak, pytest.mark.timeout(3000), pytest.mark.xdist_group("kills")]

STEPS = 2500  # more than four minutes of training
SOAKED = PATHS.add_dag(
    "soaked",
    *(
        f'{kind}({STEPS}, task_id="{kind}{number}", retries=20)'
        for kind in ("train", "blocking")
        for number in range(3)
    ),
)
TASKS = [f"{kind}{number}" for kind in ("train", "blocking") for number in range(3)]
RESTARTED = [name for name in COMPONENTS if name != "dag-processor"]


@pytest.mark.parametrize("seed", range(3))
def test_each_training_ends_once(stack: Stack, seed: int) -> None:
    chance = random.Random(seed)
    run = stack.run(SOAKED)
    for task_id in TASKS:
        run.trains(task_id)
    done: list[str] = []
    while not all((job := run.job(task_id)) and job.state.terminal for task_id in TASKS) and len(done) < 60:
        done.append(disturb(stack, run, chance))
        quiet_until = time.monotonic() + chance.uniform(0, 12)
        stack.wait("a while", lambda until=quiet_until: time.monotonic() > until)
    story = "\n".join(done)
    assert len(done) >= 10, story
    for task_id in TASKS:
        try:
            run.reach("success", task_id)
            stack.wait("it is acknowledged, or said not to be", lambda task_id=task_id: settled(run, task_id), 60)
            job = run.job(task_id)
        except AssertionError as error:
            raise AssertionError(f"after\n{story}\n{run.log(run.task(task_id)['try_number'], task_id)}") from error
        assert (job.state, job.step) == (State.SUCCEEDED, STEPS), story
        assert len(run.events("succeeded", task_id)) == 1, story
    service = stack.services["elasticflow_default"].client
    stack.wait(
        "no live job", lambda: not [job for job in service.list_jobs(live=True) if job.identity.dag_id == SOAKED]
    )


def settled(run: Run, task_id: str) -> bool:
    """Whether the success was acknowledged; where the service was away just then, Airflow's log says so."""
    job = run.job(task_id)
    return (job is not None and job.acknowledged) or "could not be acknowledged" in run.log(
        run.task(task_id)["try_number"], task_id
    )


def disturb(stack: Stack, run: Run, chance: random.Random) -> str:
    """Do one bad thing; says which."""
    service = stack.services["elasticflow_default"]
    task_id = chance.choice(TASKS)
    what = chance.choice(["component", "service", "away", "runner", "worker", "machine", "clear", "both"])
    number = chance.choice([signal.SIGKILL, signal.SIGTERM])
    if what == "component":
        component = chance.choice(RESTARTED)
        number = signal.SIGKILL if component == "scheduler" else number  # told, it would wait for its tasks
        stack.kill(component, number)
        stack.start(component)
        return f"{component} {number.name}"
    if what in ("service", "away"):
        service.kill(number)
        away_s = chance.uniform(1, 2 * LEASE_S) if what == "away" else 0.0
        back_at = time.monotonic() + away_s
        stack.wait("it is away", lambda: time.monotonic() >= back_at)
        service.start()
        return f"service {number.name}, away for {away_s:.0f} s"
    if what == "both":
        stack.kill("triggerer")
        service.kill()
        service.start()
        stack.start("triggerer")
        return "triggerer and service together"
    if what == "clear":
        job = run.job(task_id)
        if job is None or job.state.terminal:
            return f"{task_id} was over: not cleared"
        run.clear([task_id])
        return f"{task_id} cleared"
    pid = run.task(task_id).get("pid")
    if run.task(task_id).get("state") != "running" or not pid or not psutil.pid_exists(pid):
        return f"{task_id} was in no worker"
    try:
        runner = psutil.Process(pid)
        supervisor = runner.parent()
        if what == "worker" and supervisor is not None:
            supervisor.terminate()
        else:
            runner.kill()
            if what == "machine" and supervisor is not None:
                supervisor.kill()
    except psutil.NoSuchProcess:
        return f"{task_id} left its worker"
    return f"{what} of {task_id}"
