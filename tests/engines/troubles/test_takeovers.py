"""Another service takes over while a gang trains: training notices nothing, and the former service changes nothing."""

from __future__ import annotations

import re
import signal
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.gang import install
from support.leaders import Leader, Lease

from elasticflow_airflow.engines.local.files.generation_folder import StopOrder, SupervisorFolder
from elasticflow_airflow.engines.port import GangOutcome, GangSpec, GangState, SupersededError
from elasticflow_airflow.runtime.protocol import Membership, ReportKind, RescaleMode
from elasticflow_airflow.scheduler_core.model.values import Slot

if TYPE_CHECKING:
    from conftest import RayBench, TakeoverBench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SCRIPT = Path(__file__).parents[2] / "support" / "train_small.py"
A, B, C, D = Slot("local0", 0), Slot("local0", 1), Slot("local1", 0), Slot("local1", 1)
EPOCHS, STEP_S = 50, "0.3"
"""As long as what happens takes on a slow machine, of 6 steps each, with few steps."""
WEIGHTS = re.compile(rb"WEIGHTS (\w+) (\d+)")


def job(bench: TakeoverBench, generation: int, *slots: Slot, epochs: int = 10_000, **changes: Any) -> GangSpec:
    install(SCRIPT, bench.base / "code")
    session = {"epochs": epochs, "steps": None, "global_batch_size": 16, "logical_workers": 4, "seed": 7}
    mode = RescaleMode.RESTART if generation == 1 else RescaleMode.IN_PLACE
    values: dict[str, Any] = {"env": {"TEST_STEP_S": STEP_S}, "mode": mode, **changes}
    return bench.spec(generation, placement=slots, session=session, **values)


def trains_on(bench: TakeoverBench, generation: int, job_id: str = "job") -> None:
    def steps() -> int:
        said = bench.reports.get((job_id, generation), [])
        return max((r.step for r in said if r.kind is ReportKind.PROGRESS), default=0)

    bench.look(job_id)
    before = steps()
    bench.wait(lambda _: steps() > before, "it trains on", job_id)


def weights(bench: TakeoverBench, job_id: str = "job") -> tuple[bytes, ...]:
    """The digest of the weights at the end, and the number of steps."""
    found = {
        match.groups()
        for path in (bench.base / "local0" / "jobs" / job_id).rglob("*.log.0*")
        for match in WEIGHTS.finditer(path.read_bytes())
    }
    assert len(found) == 1, found
    return found.pop()


def hurry(bench: TakeoverBench) -> None:
    """Let the workers train on without waiting in each step."""
    for node_id in bench.nodes:
        (bench.base / node_id / "jobs" / "job" / "i000001" / "hurry").touch()


def finished(bench: TakeoverBench, generation: int, job_id: str = "job") -> None:
    gangs = bench.wait(lambda gangs: gangs[generation].state is GangState.ENDED, "the end", job_id)
    assert gangs[generation].outcome is GangOutcome.FINISHED, gangs[generation]


def undisturbed(bench: TakeoverBench, epochs: int) -> tuple[bytes, ...]:
    """What the same training comes to when nothing happens."""
    bench.engine.apply(job(bench, 1, A, C, epochs=epochs, job_id="calm", env={"TEST_STEP_S": "0"}))
    finished(bench, 1, "calm")
    return weights(bench, "calm")


def over(bench: TakeoverBench) -> None:
    bench.engine.stop("job", 10.0, "the test has seen enough")
    bench.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "all leave")
    assert bench.left_behind() == []


def test_training_notices_nothing_and_the_former_leader_changes_nothing(takeover_bench: TakeoverBench) -> None:
    bench = takeover_bench
    epochs = EPOCHS
    bench.engine.apply(job(bench, 1, A, C, epochs=epochs))
    bench.wait_state(1, GangState.RUNNING)
    pids = bench.pids(1)
    trains_on(bench, 1)
    assert bench.leader is not None
    stray = job(bench, 3, A)  # what the former leader wants when it wakes up
    stale = bench.leader.root / "jobs" / "job" / "i000001"

    began_s = time.monotonic()
    old = bench.take_over()
    gang = bench.look()[1]
    print(f"from opening the engine to the first look: {time.monotonic() - began_s:.3f} s")
    assert gang.state is GangState.RUNNING
    assert [worker.pid for worker in gang.workers] == pids
    bench.engine.apply(job(bench, 2, A, C, B, D, epochs=epochs))
    bench.wait_state(2, GangState.RUNNING)
    assert bench.pids(2)[:2] == pids

    # The former leader wakes up, in the middle of what it was doing.
    Membership(generation=9, mode=RescaleMode.RESTART, members=(), reason="the sleeper").write(stale)
    SupervisorFolder.of(stale, 1, "local0").write_order(StopOrder(0.0, "the sleeper", kill=True))
    old.renew("job")
    for call in (lambda: old.stop("job", 0.1), lambda: old.apply(stray)):
        with pytest.raises(SupersededError):
            call()
    with suppress(SupersededError):
        old.observe()
    trains_on(bench, 2)

    bench.take_over()  # and once more: whoever leads again has another folder than before
    assert bench.pids(2)[:2] == pids
    bench.engine.apply(job(bench, 3, A, C, epochs=epochs))
    bench.wait_state(3, GangState.RUNNING)
    hurry(bench)
    finished(bench, 3)
    assert bench.left_behind() == []
    assert not [kind for kind in bench.kinds(3) if kind == "failed"]
    assert weights(bench) == undisturbed(bench, epochs)


def test_a_change_in_place_is_completed_by_the_next_leader(takeover_bench: TakeoverBench) -> None:
    bench = takeover_bench
    bench.engine.apply(job(bench, 1, A))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(job(bench, 2, A, C))
    old = bench.take_over()  # before anybody could join
    with suppress(SupersededError):
        old.observe()
    bench.engine.apply(job(bench, 2, A, C))
    gang = bench.wait_state(2, GangState.RUNNING)
    assert [worker.worker_id for worker in gang.workers] == ["g000001-r000", "g000002-r001"]
    assert bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.STOPPED
    trains_on(bench, 2)
    over(bench)


def test_what_no_node_has_heard_of_is_done_by_the_next_leader(takeover_bench: TakeoverBench) -> None:
    """The former one died after it had put it on record."""
    bench = takeover_bench
    assert bench.leader is not None
    bench.leader.is_mute = True
    with suppress(SupersededError):
        bench.engine.apply(job(bench, 1, A))
    bench.take_over()
    assert bench.engine.latest("job") == 1
    bench.engine.apply(job(bench, 1, A))
    bench.wait_state(1, GangState.RUNNING)
    bench.leader.is_mute = True
    with suppress(SupersededError):
        bench.engine.apply(job(bench, 2, A, C))
    bench.take_over()
    assert bench.look()[2].state is GangState.STARTING
    bench.engine.apply(job(bench, 2, A, C))
    bench.wait_state(2, GangState.RUNNING)
    bench.leader.is_mute = True
    with suppress(SupersededError):
        bench.engine.stop("job", 10.0, "the user wants it")
    bench.take_over()
    over(bench)


def test_a_stop_is_completed_by_the_next_leader(takeover_bench: TakeoverBench) -> None:
    bench = takeover_bench
    bench.engine.apply(job(bench, 1, A, C))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.stop("job", 10.0, "the user wants it")
    bench.take_over()
    bench.engine.stop("job", 10.0, "the user wants it")
    gangs = bench.wait(lambda gangs: gangs[1].state is GangState.ENDED, "all leave")
    assert gangs[1].outcome is GangOutcome.STOPPED
    assert "stopped" in bench.kinds(1)
    assert bench.left_behind() == []


def test_a_takeover_while_a_node_is_silent_goes_on_without_it(takeover_bench: TakeoverBench) -> None:
    bench = takeover_bench
    epochs = EPOCHS
    bench.engine.apply(job(bench, 1, A, C, epochs=epochs))
    bench.wait_state(1, GangState.RUNNING)
    trains_on(bench, 1)
    bench.agents["local1"].send_signal(signal.SIGSTOP)
    bench.suspicion_s = 2.0
    bench.take_over()
    gangs = bench.wait(lambda gangs: gangs[1].workers[1].exit_code is not None, "it is given up")
    assert gangs[1].state is not GangState.ENDED
    bench.engine.apply(job(bench, 2, A, lost=("g000001-r001",), epochs=epochs))
    bench.wait_state(2, GangState.RUNNING)
    trains_on(bench, 2)
    bench.agents["local1"].send_signal(signal.SIGCONT)
    bench.wait(lambda _: len(bench.engine.inventory()) == 2 and not bench.engine.inventory()[1].busy, "it is cleared")
    hurry(bench)
    finished(bench, 2)
    assert weights(bench) == undisturbed(bench, epochs)


@pytest.mark.ray
@pytest.mark.soak  # On replicas: service/cluster/test_ray_replicas.py.
def test_on_ray_agents_are_spoken_to_before_ray_is_there(ray_bench: RayBench) -> None:
    bench, lease = ray_bench, Lease(ray_bench.base)
    bench.engine.close()

    def lead() -> Leader:
        leader = lease.elect()
        bench.engine = bench.make(leadership=leader.leadership())
        return leader

    def spec(generation: int, workers: int) -> GangSpec:
        found = bench.spec(generation, workers)
        return replace(found, session=replace(found.session, incarnation_dir=str(bench.engine.files.folder("job", 1))))

    former = lead()
    bench.engine.apply(spec(1, 2))
    bench.wait_state(1, GangState.RUNNING)
    pids = bench.pids(1)
    old, former.knows = bench.engine, False
    bench.reports.clear()
    began_s = time.monotonic()
    lead()
    gang = bench.look()[1]
    print(f"on Ray, from opening the engine to the first look: {time.monotonic() - began_s:.3f} s")
    assert gang.state is GangState.RUNNING
    assert [worker.pid for worker in gang.workers] == pids
    with suppress(SupersededError):
        old.observe()
    old.close()
    bench.engine.stop("job", 10.0, "the test has seen enough")
    assert bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.STOPPED
