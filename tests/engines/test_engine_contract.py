"""The contract of engines/port.py, tried on every engine. Each test reads as: apply this, expect to observe that."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.wheels import make_wheel, requirement

from elasticflow_airflow.engines.port import EngineError, GangOutcome, GangState
from elasticflow_airflow.scheduler_core.model.values import Slot

if TYPE_CHECKING:
    from conftest import Bench


def test_a_gang_runs_to_its_end_and_is_forgotten(bench: Bench) -> None:
    spec = bench.spec(session={"steps": 20})
    bench.engine.apply(spec)
    bench.engine.apply(spec)
    gang = bench.wait_state(1, GangState.RUNNING)
    assert [worker.rank for worker in gang.workers] == [0]
    bench.engine.apply(spec)
    ended = bench.wait_state(1, GangState.ENDED)
    assert ended.outcome is GangOutcome.FINISHED
    assert [worker.exit_code for worker in ended.workers] == [0]
    assert ended.failure is None
    kinds = [kind for kind in bench.kinds(1) if kind != "uses_session"]  # said before it is there
    assert kinds[0] == "started"
    assert "progress" in kinds
    assert kinds[-1] == "finished"
    assert kinds.count("started") == 1

    log_name = ended.workers[0].log_name
    whole = bench.engine.read_log("job", 1, log_name, 0, 100_000)
    assert b"step" in whole.data
    assert whole.end_of_file
    first = bench.engine.read_log("job", 1, log_name, 0, 10)
    rest = bench.engine.read_log("job", 1, log_name, first.next_offset, 100_000)
    assert first.data + rest.data == whole.data
    assert not first.end_of_file
    with pytest.raises(KeyError):
        bench.engine.read_log("job", 1, "g000009-r000", 0, 10)
    with pytest.raises(KeyError):
        bench.engine.read_log("nobody", 1, log_name, 0, 10)

    bench.engine.apply(spec)  # It ended: applying it again starts nothing.
    assert bench.look()[1].state is GangState.ENDED
    bench.engine.forget("job")
    bench.engine.forget("job")
    assert bench.look() == {}


def test_a_new_generation_waits_until_the_old_is_cleared(bench: Bench) -> None:
    first = bench.spec(1, workers=1)
    second = bench.spec(2, workers=2)
    bench.engine.apply(first)
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(second)
    bench.engine.apply(second)
    gangs = bench.wait(lambda gangs: gangs[1].state is GangState.ENDED, "the old generation leaves")
    assert gangs[1].outcome is GangOutcome.STOPPED
    assert bench.kinds(1)[-1] == "stopped"
    assert gangs[2].state is GangState.PENDING
    bench.engine.apply(second)
    assert bench.look()[2].state is GangState.PENDING

    bench.restart()  # The service is killed here, and finds everything again.
    bench.engine.apply(replace(second, cleared_generation=1))
    bench.wait_state(2, GangState.RUNNING)
    assert "started" in bench.kinds(1)[:2]
    assert bench.kinds(1)[-1] == "stopped"

    bench.engine.apply(first)  # Stale: changes nothing.
    bench.restart()
    gang = bench.wait_state(2, GangState.RUNNING)
    assert [worker.rank for worker in gang.workers] == [0, 1]

    bench.engine.stop("job", 10.0, "enough")
    bench.engine.stop("job", 10.0, "enough")
    assert bench.wait_state(2, GangState.ENDED).outcome is GangOutcome.STOPPED
    assert bench.kinds(2).count("stopped") == 2
    assert bench.left_behind() == []


def test_stop_while_starting_and_while_pending(bench: Bench) -> None:
    bench.engine.apply(bench.spec(1))
    bench.engine.apply(bench.spec(2))
    bench.engine.stop("job", 10.0, "not wanted any more")
    gangs = bench.wait(lambda gangs: all(g.state is GangState.ENDED for g in gangs.values()), "all ended")
    assert {g: gangs[g].outcome for g in gangs} == {1: GangOutcome.STOPPED, 2: GangOutcome.STOPPED}
    assert gangs[2].workers == ()
    bench.engine.apply(bench.spec(2, cleared_generation=1))  # Stopped for good; only a higher one starts again.
    assert bench.look()[2].state is GangState.ENDED
    assert bench.left_behind() == []


def test_workers_say_what_they_are_doing_and_train_on(bench: Bench) -> None:
    assert bench.engine.stacks("job") == {}
    bench.engine.apply(bench.spec(workers=2))
    gang = bench.wait_state(1, GangState.RUNNING)
    # A worker may have said that it trains before its supervisor has told which process it is.
    bench.wait(lambda _: "no process to ask" not in str(bench.engine.stacks("job")), "their processes are known")
    for _ in range(3):
        stacks = bench.engine.stacks("job")
        assert stacks.keys() == {worker.worker_id for worker in gang.workers}
        assert all("(most recent call first)" in text and "train.py" in text for text in stacks.values()), stacks
        assert all(text.count("Current thread") <= 1 for text in stacks.values())
    bench.look()
    told = len(bench.kinds(1))
    bench.wait(lambda _: len(bench.kinds(1)) > told, "it trains on")
    bench.engine.stop("job", 10.0, "seen enough")
    assert bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.STOPPED
    assert bench.engine.stacks("job") == {}


def test_without_renewal_the_gang_saves_and_stops(bench: Bench) -> None:
    spec = bench.spec(1, lease_s=3.0)
    bench.engine.apply(spec)

    def running(gangs: dict[int, object]) -> bool:
        bench.engine.renew("job")
        return bench.look()[1].state is GangState.RUNNING

    bench.wait(running, "running, with its lease renewed")
    ended = bench.wait_state(1, GangState.ENDED)
    assert ended.outcome is GangOutcome.STOPPED
    assert bench.kinds(1)[-1] == "stopped"


def test_what_cannot_be_tried_is_an_error(bench: Bench) -> None:
    with pytest.raises(EngineError, match="slot nowhere:0"):
        bench.engine.apply(bench.spec(1, placement=(Slot("nowhere", 0),)))
    with pytest.raises(EngineError, match="no slots"):
        bench.engine.apply(bench.spec(1, placement=()))
    assert bench.look() == {}
    bench.engine.stop("nobody", 1.0)
    bench.engine.renew("nobody")
    bench.engine.forget("nobody")


@pytest.mark.slow
def test_a_killed_worker_fails_its_gang(bench: Bench) -> None:
    bench.engine.apply(bench.spec(1, workers=2))
    bench.wait_state(1, GangState.RUNNING)
    bench.kill_worker(1)
    ended = bench.wait_state(1, GangState.ENDED)
    assert ended.outcome is GangOutcome.FAILED
    assert ended.failed_rank == 1
    assert "rank 1" in (ended.failure or "")
    assert ended.workers[1].exit_code == -9
    assert bench.left_behind() == []


def test_a_lost_gang_leaves_nobody_behind(bench: Bench) -> None:
    bench.engine.apply(bench.spec(1))
    bench.wait_state(1, GangState.RUNNING)
    bench.lose()
    ended = bench.wait_state(1, GangState.ENDED)
    assert ended.outcome is GangOutcome.LOST
    assert "supervisor" in (ended.failure or "")
    assert bench.left_behind() == []
    bench.engine.apply(bench.spec(2, cleared_generation=1))
    bench.wait_state(2, GangState.RUNNING)


@pytest.mark.slow
def test_slots_that_another_service_holds_are_busy(bench: Bench) -> None:
    bench.hold_slot(1)
    busy = bench.engine.inventory()[0].busy
    assert list(busy) == [1]
    assert "job other of the service in" in busy[1]
    with pytest.raises(EngineError, match="held by job other"):
        bench.engine.apply(bench.spec(1, workers=2))


@pytest.mark.slow
def test_nobody_is_told_to_leave_for_slots_that_another_service_holds(bench: Bench) -> None:
    """A plain script that was stopped for them would have saved and ended for nothing."""
    bench.engine.apply(bench.spec(1, workers=1))
    bench.wait_state(1, GangState.RUNNING)
    bench.hold_slot(1)
    for _ in range(3):
        with pytest.raises(EngineError, match="held by job other"):
            bench.engine.apply(bench.spec(2, workers=2))
        assert [(gang.generation, gang.state) for gang in bench.engine.observe()] == [(1, GangState.RUNNING)]
    bench.engine.apply(bench.spec(1, workers=1))
    assert [(gang.generation, gang.state) for gang in bench.engine.observe()] == [(1, GangState.RUNNING)]


def test_the_latest_generation_is_known_in_every_life(bench: Bench) -> None:
    assert bench.engine.latest("job") == 0
    bench.engine.apply(bench.spec(7))
    bench.restart()
    assert bench.engine.latest("job") == 7


def test_what_a_script_makes_of_its_files_is_the_trouble_of_its_job_alone(bench: Bench) -> None:
    other = bench.spec(job_id="other", placement=(Slot(bench.nodes[1], 0),))
    bench.engine.apply(bench.spec())
    bench.engine.apply(other)
    bench.wait_state(1, GangState.RUNNING)
    bench.wait_state(1, GangState.RUNNING, "other")
    bench.spoil("job")
    for begin in (lambda: None, bench.restart):
        begin()
        gang = bench.wait(lambda gangs: gangs[1].trouble is not None, "the trouble is told")[1]
        assert "status.json" in str(gang.trouble)
        assert gang.state is not GangState.ENDED
        assert [worker.slot for worker in gang.workers] == [Slot(bench.nodes[0], 0)]
        assert bench.wait_state(1, GangState.RUNNING, "other").trouble is None
        bench.engine.renew("job")
    bench.engine.stop("job", 1.0, "cancelled")
    ended = bench.wait(lambda gangs: gangs[1].state is GangState.ENDED, "it can be stopped all the same")[1]
    assert ended.trouble is not None
    assert bench.look("other")[1].state is GangState.RUNNING
    bench.engine.forget("job")
    assert bench.look() == {}


def test_an_environment_is_built_before_workers_use_it(bench: Bench) -> None:
    lines = (requirement(make_wheel(bench.base, "extra_package")),)
    bench.prepare_environment(lines)
    bench.restart()
    bench.prepare_environment(lines)
    bench.engine.apply(bench.spec(requirements=lines, session={"steps": 5}))
    assert bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.FINISHED
    log = bench.engine.read_log("job", 1, bench.look()[1].workers[0].log_name, 0, 100_000).data
    assert bench.is_modelled or b"extra_package 1.0" in log


def test_an_environment_that_cannot_be_built_says_why_and_is_tried_again(bench: Bench) -> None:
    wheel = bench.base / "late_package-1.0-py3-none-any.whl"
    with pytest.raises(EngineError, match=r"the environment for requirements= could not be built: [\s\S]*late_package"):
        bench.prepare_environment((requirement(wheel),))
    make_wheel(bench.base, "late_package")
    bench.prepare_environment((requirement(wheel),))
