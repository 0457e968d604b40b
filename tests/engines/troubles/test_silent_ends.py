"""Workers that end without a word, and children that would stay: noticed within seconds, by a gang of any size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from elasticflow_airflow.engines.port import GangObservation, GangOutcome, GangState, Slot

if TYPE_CHECKING:
    from conftest import LocalBench

SESSION = """
import os, time
import torch
from elasticflow_airflow import runtime

session = runtime.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = session.dataloader(torch.utils.data.TensorDataset(torch.ones(64, 2)), global_batch_size=8)
session.register(model, optimizer)
for _ in session.epochs():
    for batch in loader:
        with session.step() as step:
            for (inputs,) in step.split(batch):
                step.backward(model(inputs).mean())
            optimizer.step()
            optimizer.zero_grad()
"""
LEAVES = SESSION + "        if {condition}:\n            os._exit(0)\nsession.finish()\n"
FORKS = SESSION + "session.finish()\nif os.fork() == 0:\n    time.sleep(600)\n"


LOST = """
import threading
from pathlib import Path

def leave_after_it() -> None:
    while Path("/proc", Path("one.pid").read_text()).exists():
        time.sleep(0.05)
    time.sleep(1.0)  # The other is in the middle of a step, and waits for a plan without it.
    os._exit(0)
""" + SESSION.replace(
    "        with session.step()",
    """        if session.steps_done == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), 9)
        if session.steps_done == 2 and os.environ["RANK"] == "1":
            Path("one.pid").write_text(str(os.getpid()))
        if session.steps_done == 3 and os.environ["RANK"] == "0":
            threading.Thread(target=leave_after_it).start()
        with session.step()""",
)


def end(bench: LocalBench, script: str, **session: Any) -> GangObservation:
    """Run a script on one worker to its end. What nobody notices takes longer than a bench waits."""
    (bench.base / "code" / "ends.py").write_text(script)
    bench.engine.apply(bench.spec(session={"script": "ends.py", **session}))
    return bench.wait_state(1, GangState.ENDED)


@pytest.mark.slow
def test_a_plain_script_that_leaves_at_once_has_finished(local_bench: LocalBench) -> None:
    ended = end(local_bench, "import os\nos._exit(0)\n", steps=None)
    assert (ended.outcome, ended.workers[0].exit_code) == (GangOutcome.FINISHED, 0)
    assert local_bench.left_behind() == []


@pytest.mark.slow
def test_a_session_that_leaves_in_the_middle_has_failed(local_bench: LocalBench) -> None:
    ended = end(local_bench, LEAVES.format(condition="session.steps_done == 3"), steps=8)
    assert ended.outcome is GangOutcome.FAILED
    assert ended.failure is not None
    assert ended.failure.startswith("the script ended with status 0 before its session reported that it is finished")


@pytest.mark.slow
def test_one_of_two_that_leaves_is_known_to_have_left(local_bench: LocalBench) -> None:
    bench = local_bench
    condition = "session.steps_done == 3 and os.environ['RANK'] == '1'"
    (bench.base / "code" / "ends.py").write_text(LEAVES.format(condition=condition))
    session = {"script": "ends.py", "steps": 8, "global_batch_size": 8}
    bench.engine.apply(bench.spec(workers=2, session=session))
    gangs = bench.wait(lambda gangs: 1 in gangs and gangs[1].workers[1].exit_code == 0, "it has left")
    assert (gangs[1].state, gangs[1].workers[0].exit_code) == (GangState.RUNNING, None)
    bench.engine.stop("job", 0.0, "enough")
    bench.wait_state(1, GangState.ENDED)


@pytest.mark.slow
def test_a_survivor_that_leaves_after_a_loss_ends_its_gang(local_bench: LocalBench) -> None:
    """A death alone ends no gang that can be changed in place; once nobody is left, it has failed by that death."""
    bench = local_bench
    (bench.base / "code" / "ends.py").write_text(LOST)
    session = {"script": "ends.py", "steps": 8, "global_batch_size": 8, "working_dir": str(bench.base)}
    bench.engine.apply(bench.spec(workers=2, session=session))
    ended = bench.wait_state(1, GangState.ENDED)
    assert {worker.exit_code for worker in ended.workers} == {-9, 0}
    assert ended.outcome is GangOutcome.FAILED
    assert ended.failure is not None
    assert ended.failure.startswith("rank 1 (g000001-r001) was killed by SIGKILL")
    assert bench.left_behind() == []


@pytest.mark.slow
def test_a_process_that_was_forked_keeps_no_finished_training(local_bench: LocalBench) -> None:
    ended = end(local_bench, FORKS, steps=4)
    assert ended.outcome is GangOutcome.FINISHED
    assert local_bench.left_behind() == []


@pytest.mark.slow
def test_what_does_not_end_is_named_and_keeps_no_finished_training(local_bench: LocalBench) -> None:
    """All at once, as each is waited for."""
    bench = local_bench
    kept_by = {
        "its processes ": "multiprocessing.Process(target=time.sleep, args=(600,)).start()",
        "its threads uploads;": "threading.Thread(target=time.sleep, args=(600,), name='uploads').start()",
        "its functions registered with atexit;": "atexit.register(time.sleep, 600)",
    }
    slots = [Slot(node, index) for node in bench.nodes for index in range(2)]
    for number, (slot, what) in enumerate(zip(slots, kept_by.values(), strict=False)):
        script = f"import atexit, multiprocessing, threading, time\n{what}\nprint('done')\n"
        (bench.base / "code" / f"ends{number}.py").write_text(script)
        session = {"script": f"ends{number}.py", "steps": None}
        bench.engine.apply(bench.spec(job_id=f"job{number}", placement=(slot,), session=session))
    for number, said in enumerate(kept_by):
        job_id = f"job{number}"
        ended = bench.wait_state(1, GangState.ENDED, job_id)
        assert ended.outcome is GangOutcome.FINISHED
        log = bench.engine.read_log(job_id, 1, "g000001-r000", 0, 10_000).data.decode()
        assert f"elasticflow: the script has ended, and waits for {said}" in log
        assert "elasticflow: leaving all the same" in log
    assert bench.left_behind() == []
