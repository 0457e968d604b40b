"""The local engine changes gangs in place: real supervisors, torchrun agents and sessions; nobody left behind."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.gang import install

from elasticflow_airflow.engines.local import engine
from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder
from elasticflow_airflow.engines.port import EngineError, GangOutcome, GangSpec, GangState
from elasticflow_airflow.runtime.protocol import Membership, ReportKind, RescaleMode, meeting_path, read_json
from elasticflow_airflow.scheduler_core.model.values import Slot

if TYPE_CHECKING:
    from conftest import LocalBench

pytestmark = pytest.mark.timeout(400)
SCRIPT = Path(__file__).parents[1] / "support" / "train_small.py"
A, B, C, D = Slot("local0", 0), Slot("local0", 1), Slot("local1", 0), Slot("local1", 1)


@pytest.fixture
def job(warm_bench: LocalBench):
    """Make the specification of a generation on some slots."""
    install(SCRIPT, warm_bench.base / "code")

    def make(generation: int, *slots: Slot, epochs: int = 10_000, **changes) -> GangSpec:
        return warm_bench.spec(
            generation,
            placement=slots,
            session={"epochs": epochs, "steps": None, "global_batch_size": 16, "logical_workers": 4, "seed": 7},
            mode=RescaleMode.RESTART if generation == 1 else RescaleMode.IN_PLACE,
            **{"env": {"TEST_STEP_S": "0.1"}, **changes},
        )

    return make


SLOWLY = {"env": {"TEST_STEP_S": "2"}}
"""A joiner waits for the end of a step for so long that it can be met on its way."""
LONG = {"epochs": 60, "env": {"TEST_STEP_S": "0.3"}}
"""It trains for as long as a machine needs to start a joiner, until the test is in a hurry."""


def switched(bench: LocalBench, spec: GangSpec) -> None:
    """Apply a generation and wait until all its members train in it, and the one before is over."""
    bench.engine.apply(spec)
    before = spec.generation - 1
    bench.wait(
        lambda gangs: (
            gangs[spec.generation].state is GangState.RUNNING
            and (before not in gangs or gangs[before].state is GangState.ENDED)
        ),
        f"generation {spec.generation} has taken over",
    )


@pytest.mark.slow
def test_grow_move_shrink_and_finish(warm_bench, job):
    bench = warm_bench
    bench.engine.apply(job(1, A, **LONG))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(job(2, A, C, **LONG))
    gangs = bench.look()
    assert (gangs[1].state, gangs[2].state) == (GangState.RUNNING, GangState.STARTING)
    assert [worker.worker_id for worker in gangs[2].workers] == ["g000001-r000", "g000002-r001"]
    bench.restart()  # the service is killed while they wait for each other
    switched(bench, job(2, A, C, **LONG))
    assert bench.look()[1].outcome is GangOutcome.STOPPED
    switched(bench, job(3, C, **LONG))
    met = {g: read_json(meeting_path(bench.spec().incarnation_dir, g))["address"] for g in (1, 2, 3)}
    assert met == {1: "127.0.0.1", 2: "127.0.0.1", 3: "127.0.0.2"}, "at the node of the first worker"
    Path(bench.spec().session.incarnation_dir, "hurry").touch()
    (worker,) = bench.look()[3].workers
    assert (worker.worker_id, worker.slot, worker.exit_code) == ("g000002-r001", C, None)
    gangs = bench.wait(lambda gangs: gangs[3].state is GangState.ENDED, "the end")
    assert gangs[3].outcome is GangOutcome.FINISHED, gangs[3]
    assert bench.kinds(3)[-1] == "finished"
    started = [r for r in bench.reports["job", 2] if r.kind is ReportKind.STARTED]
    assert {r.data["from_generation"] for r in started} == {0, 1}
    assert bench.engine.read_log("job", 1, "g000002-r001", 0, 1 << 20).data.count(b"STEP") > 1
    bench.engine.forget("job")
    assert bench.engine.observe() == ()
    assert not bench.engine._observer._first_seen_s, "a service lives for months"
    assert bench.left_behind() == []


@pytest.mark.slow
def test_a_worker_dies_and_its_slot_is_free_for_another(warm_bench, job):
    bench = warm_bench
    bench.engine.apply(job(1, A, B))
    bench.wait_state(1, GangState.RUNNING)
    bench.kill_worker(1)
    gangs = bench.wait(lambda gangs: gangs[1].workers[1].exit_code == -9, "the death is seen")
    assert gangs[1].state is GangState.RUNNING
    bench.restart()
    switched(bench, job(2, A))
    assert Membership.read(bench.spec().incarnation_dir).lost == ("g000001-r001",)
    (report,) = [r for r in bench.reports["job", 2] if r.kind is ReportKind.STARTED]
    assert report.data["recovered"]
    switched(bench, job(3, A, B))
    assert [w.worker_id for w in bench.look()[3].workers] == ["g000001-r000", "g000003-r001"]
    bench.engine.stop("job", 10.0, "enough")
    bench.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "all leave")
    assert bench.look()[3].outcome is GangOutcome.STOPPED
    assert "checkpoint" in bench.kinds(3)
    assert bench.left_behind() == []


@pytest.mark.slow
def test_a_worker_that_hangs_is_given_up(warm_bench, job):
    bench = warm_bench
    bench.engine.apply(job(1, A, C))
    bench.wait_state(1, GangState.RUNNING)
    bench.worker_process(0).kill(signal.SIGSTOP)
    switched(bench, job(2, C, lost=("g000001-r000",)))
    bench.wait(lambda gangs: gangs[2].workers[0].exit_code is None, "the other goes on")
    bench.engine.stop("job", 10.0, "enough")
    bench.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "all leave")
    assert bench.left_behind() == []


@pytest.mark.slow
def test_a_supervisor_dies_and_the_workers_of_the_other_node_go_on(warm_bench, job):
    bench = warm_bench
    bench.engine.apply(job(1, A, C))
    bench.wait_state(1, GangState.RUNNING)
    bench.lose()
    bench.wait(lambda gangs: gangs[1].workers[0].exit_code == -9, "its worker counts as dead")
    switched(bench, job(2, C))
    switched(bench, job(3, C, A))
    bench.engine.stop("job", 10.0, "enough")
    bench.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "all leave")
    assert bench.left_behind() == []


@pytest.mark.slow
def test_a_joiner_that_dies_is_replaced_while_the_others_train(warm_bench, job):
    bench = warm_bench
    bench.engine.apply(job(1, A, **SLOWLY))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(job(2, A, B, **SLOWLY))
    bench.wait(lambda gangs: gangs[2].workers[1].pid is not None, "the joiner's process")
    status = bench.folder(2).read_status()
    status.workers["g000002-r001"].trainer.kill()
    gangs = bench.wait(lambda gangs: gangs[2].workers[1].exit_code == -9, "its death")
    assert (gangs[1].state, gangs[2].state) == (GangState.RUNNING, GangState.STARTING)
    switched(bench, job(3, A, B))
    gangs = bench.look()
    assert [gangs[g].state for g in (1, 2, 3)] == [GangState.ENDED, GangState.ENDED, GangState.RUNNING]
    # By restart again: everybody of the chain saves and leaves first.
    restart = replace(job(4, C, D), mode=RescaleMode.RESTART)
    bench.engine.apply(restart)
    bench.wait(lambda gangs: gangs[3].state is GangState.ENDED, "they save and leave")
    assert bench.look()[3].outcome is GangOutcome.STOPPED
    bench.engine.apply(replace(restart, cleared_generation=3))
    bench.wait_state(4, GangState.RUNNING)
    bench.engine.stop("job", 10.0, "enough")
    bench.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "all leave")
    assert bench.left_behind() == []


@pytest.mark.slow
def test_a_script_that_fails_in_one_worker_fails_in_all(warm_bench, job):
    bench = warm_bench
    script = install(SCRIPT, bench.base / "code")
    text = script.read_text()
    done = "            schedule.step()\n"
    # One that has been there alone before; who comes to join sees the other size while it warms up.
    text = text.replace(done, f"{done}            assert session.world_size == 1 or session.rank == 1\n")
    script.write_text(text)
    bench.engine.apply(job(1, A))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(job(2, A, C))
    gangs = bench.wait(lambda gangs: gangs[2].state is GangState.ENDED, "the end")
    assert gangs[2].outcome is GangOutcome.FAILED
    assert "AssertionError" in gangs[2].failure
    assert bench.left_behind() == []


def test_nothing_to_go_on_from(warm_bench, job):
    with pytest.raises(EngineError, match="no gang of this incarnation runs that could be changed in place"):
        warm_bench.engine.apply(job(2, A))
    assert warm_bench.engine.observe() == ()


@pytest.mark.slow
def test_the_supervisor_of_a_joiner_dies_and_nobody_else(warm_bench, job):
    bench = warm_bench
    bench.engine.apply(job(1, A))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(job(2, A, C))
    folder = SupervisorFolder.of(bench.spec().incarnation_dir, 2, "local1")
    bench.wait(lambda _: folder.read_status() is not None, "its supervisor is there")
    folder.read_status().supervisor.kill()
    gangs = bench.wait(lambda gangs: gangs[2].workers[1].exit_code == -9, "its worker counts as dead")
    assert (gangs[1].state, gangs[2].state) == (GangState.RUNNING, GangState.STARTING)
    assert gangs[2].workers[0].exit_code is None
    switched(bench, job(3, A, lost=("g000002-r001",)))
    assert bench.look()[2].state is GangState.ENDED
    bench.engine.stop("job", 10.0, "enough")
    bench.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "all leave")
    assert bench.left_behind() == []


@pytest.mark.slow
def test_a_slot_that_is_held_leaves_the_gang_as_it_is(warm_bench, job, monkeypatch):
    bench = warm_bench
    monkeypatch.setattr(engine, "WARM_LIMIT_S", 0.0)
    bench.engine.apply(job(1, A))
    bench.wait_state(1, GangState.RUNNING)
    bench.hold_slot(1)
    for _ in range(3):
        with pytest.raises(EngineError, match="held by job other"):
            bench.engine.apply(job(2, A, B))
        gangs = bench.look()
        assert (gangs[1].state, gangs[2].state) == (GangState.RUNNING, GangState.PENDING)
    bench.others[0].stop("other", 0.1, "makes room")
    bench.wait(lambda _: not bench.engine.inventory()[0].busy, "the slot is free")
    switched(bench, job(2, A, B))
    bench.engine.stop("job", 10.0, "enough")
    bench.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "all leave")


@pytest.mark.slow
def test_who_turned_round_is_not_asked_again(warm_bench, job):
    bench = warm_bench
    bench.engine.apply(job(1, A, **SLOWLY))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(job(2, A, B, **SLOWLY))
    bench.wait(lambda gangs: gangs[2].workers[1].pid is not None, "the joiner's process")
    bench.engine.apply(job(3, A))
    again = job(4, A, B)

    def free() -> bool:
        try:
            bench.engine.apply(again)
        except EngineError:
            return False  # its slot is held still
        return True

    bench.wait(lambda _: free(), "the one that turned round has gone")
    assert [w.worker_id for w in bench.look()[4].workers] == ["g000001-r000", "g000004-r001"]
    switched(bench, again)
    bench.engine.stop("job", 10.0, "enough")
    bench.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "all leave")
