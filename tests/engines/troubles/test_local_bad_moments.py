"""``kill -9`` at the worst moments, with real torchrun: over handing the state on, and of whoever hosts a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.gang import Gang, install

from elasticflow_airflow.engines.port import GangOutcome, GangState
from elasticflow_airflow.runtime.protocol import ReportKind, RescaleMode
from elasticflow_airflow.scheduler_core.model.values import Slot

if TYPE_CHECKING:
    from conftest import LocalBench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SCRIPT = Path(__file__).parents[2] / "support" / "train_small.py"
A, B, C, D = Slot("local0", 0), Slot("local0", 1), Slot("local1", 0), Slot("local1", 1)
SESSION = {"epochs": 45, "steps": None, "global_batch_size": 16, "logical_workers": 4, "seed": 7}
STEPS = 45 * 6

DIES = """
import os, runpy, signal
from elasticflow_airflow.runtime.gang import transfer

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["ELASTICFLOW_WORKER"] == os.environ["TEST_SENDER"]:
    transfer.StateServer._let_read = die  # the header, with what is small, is out: the other is about to read the rest
if os.environ["ELASTICFLOW_WORKER"] == os.environ["TEST_RECEIVER"]:
    read_into, read = transfer._read_into, []

    def read_some(*arguments):
        read_into(*arguments)
        read.append(1)
        if len(read) == 3:
            die()

    transfer._read_into = read_some
runpy.run_path("small.py", run_name="__main__")
"""


@pytest.fixture
def job(warm_bench: LocalBench):
    """Make the specification of a generation on some slots; ``env`` of the first says who dies."""
    code = warm_bench.base / "code"
    install(SCRIPT, code).rename(code / "small.py")
    (code / "train.py").write_text(DIES)

    def make(generation: int, *slots: Slot, sender: str = "", receiver: str = "", **changes):
        return warm_bench.spec(
            generation,
            placement=slots,
            session=SESSION,
            mode=RescaleMode.RESTART if generation == 1 else RescaleMode.IN_PLACE,
            env={"TEST_STEP_S": "0.4", "TEST_SENDER": sender, "TEST_RECEIVER": receiver},
            **changes,
        )

    return make


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The weights of one worker that nobody disturbs."""
    with Gang(tmp_path_factory.mktemp("alone"), SCRIPT, {"TEST_STEP_S": "0"}, **SESSION) as alone:
        alone.plan("alone")
        assert alone.finish() == {"alone": 0}, alone.story()
        (line,) = [line for line in alone.output() if line.startswith("WEIGHTS")]
        yield line


def ends_well(bench: LocalBench, generation: int, worker: str, expected: str) -> None:
    """All of the training was done once by who was there from the beginning, and nothing is left behind."""
    Path(bench.spec().session.incarnation_dir, "hurry").touch()
    gangs = bench.wait(lambda gangs: gangs[generation].state is GangState.ENDED, "the end")
    assert gangs[generation].outcome is GangOutcome.FINISHED, gangs[generation]
    lines = bench.engine.read_log("job", 1, worker, 0, 1 << 20).data.decode().splitlines()
    assert [int(line.split()[1]) for line in lines if line.startswith("STEP")] == list(range(1, STEPS + 1))
    assert expected in lines
    assert bench.left_behind() == []


def test_who_sends_the_state_is_killed_over_it(warm_bench, job, expected):
    bench, victim = warm_bench, "g000001-r000"
    bench.engine.apply(job(1, A, B, sender=victim))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(job(2, A, B, C, D, sender=victim))
    bench.wait(lambda gangs: gangs[2].workers[0].exit_code == -9, "its death")
    bench.engine.apply(job(3, B, lost=(victim,)))
    bench.wait_state(3, GangState.RUNNING)
    ends_well(bench, 3, "g000001-r001", expected)
    (started,) = [report for report in bench.reports["job", 3] if report.kind is ReportKind.STARTED]
    assert started.data["recovered"]


@pytest.mark.parametrize(
    "before", [pytest.param((A,), id="grows"), pytest.param((A, B), id="is exchanged", marks=pytest.mark.soak)]
)
def test_who_takes_the_state_over_is_killed_over_it(warm_bench, job, expected, before):
    """Where it was to take another's place, that other one is there still."""
    bench, victim = warm_bench, "g000002-r001"
    bench.engine.apply(job(1, *before))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(job(2, A, C, receiver=victim))
    gangs = bench.wait(lambda gangs: gangs[2].workers[1].exit_code == -9, "its death")
    assert [worker.exit_code for worker in gangs[1].workers] == [None] * len(before)
    bench.engine.apply(job(3, *before, lost=(victim,)))
    bench.wait_state(3, GangState.RUNNING)
    ends_well(bench, 3, "g000001-r000", expected)


def test_the_stores_are_lost_with_who_hosts_them(warm_bench, job, expected):
    """That of the rendezvous in the first agent, that of the group in its trainer, that of the next one in a joiner."""
    bench = warm_bench
    bench.engine.apply(job(1, A, B))
    bench.wait_state(1, GangState.RUNNING)
    bench.worker_process(0, "agent").kill()
    bench.wait(lambda gangs: gangs[1].workers[0].exit_code is not None, "its death")
    bench.engine.apply(job(2, C, B, lost=("g000001-r000",)))
    meeting = Path(bench.spec().session.incarnation_dir) / "rendezvous" / "g000002-session.json"
    bench.wait(lambda _: meeting.exists(), "the store of the next group")

    def host(_):
        """Its supervisor may not have written down yet whom it has started."""
        status = bench.folder(2, node=1).read_status()
        found = None if status is None else status.workers.get("g000002-r000")
        return found if found is not None and found.agent is not None else None

    bench.wait(host, "who hosts it")
    host(None).agent.kill()
    bench.wait(lambda gangs: gangs[2].workers[0].exit_code is not None, "the death of who was to be first")
    bench.engine.apply(job(3, B, lost=("g000002-r000",)))
    bench.wait_state(3, GangState.RUNNING)
    ends_well(bench, 3, "g000001-r001", expected)


def test_workers_without_a_session_end_with_who_hosts_their_store_and_begin_anew(warm_bench):
    bench = warm_bench
    bench.engine.apply(bench.spec(placement=(A, C)))
    bench.wait_state(1, GangState.RUNNING)
    bench.worker_process(0, "agent").kill()
    gangs = bench.wait(lambda gangs: gangs[1].state is GangState.ENDED, "the end of the other")
    assert gangs[1].outcome in (GangOutcome.FAILED, GangOutcome.LOST), gangs[1]
    bench.engine.apply(bench.spec(2, placement=(A, C), cleared_generation=1))
    bench.wait_state(2, GangState.RUNNING)
    bench.engine.stop("job", 10.0, "enough")
    bench.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "all leave")
    assert bench.left_behind() == []
