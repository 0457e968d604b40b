"""The contract of changes in place, on every engine: who goes on, who joins, who leaves, and what is said of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.gang import install

from elasticflow_airflow.engines.fake.engine import BEHAVIOUR_ENV
from elasticflow_airflow.engines.local import observing
from elasticflow_airflow.engines.local.observing import Observer
from elasticflow_airflow.engines.port import EngineError, GangObservation, GangOutcome, GangSpec, GangState
from elasticflow_airflow.runtime.protocol import Membership, ReportKind, RescaleMode
from elasticflow_airflow.scheduler_core.model.values import Slot

if TYPE_CHECKING:
    from conftest import Bench

    Make = Callable[..., GangSpec]

pytestmark = pytest.mark.timeout(400)
slow = pytest.mark.slow
both = pytest.mark.parametrize(
    "bench",
    [
        "fake",
        pytest.param("local", marks=slow),
        pytest.param("cluster", marks=slow),
        pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.soak]),
    ],
    indirect=True,
)
SCRIPT = Path(__file__).parents[1] / "support" / "train_small.py"
PLACES = {"A": (0, 0), "B": (0, 1), "C": (1, 0), "D": (1, 1)}


@pytest.fixture
def plan(bench: Bench, code_dir: Path) -> Make:
    """Make a generation on some of the slots A and B (of the first node), C and D. The first one comes by a restart."""
    install(SCRIPT, code_dir)
    env = {BEHAVIOUR_ENV: json.dumps({"in_place": True}), "TEST_STEP_S": "0.1"}
    session = {"epochs": 10_000, "samples": 90, "steps": None, "global_batch_size": 16, "logical_workers": 4, "seed": 7}

    def make(generation: int, places: str, **changes: Any) -> GangSpec:
        slots = tuple(Slot(bench.nodes[PLACES[place][0]], PLACES[place][1]) for place in places)
        mode = RescaleMode.RESTART if generation == 1 else RescaleMode.IN_PLACE
        return bench.spec(generation, placement=slots, session=session, env=env, **{"mode": mode, **changes})

    return make


def ids(gang: GangObservation) -> list[str]:
    return [worker.worker_id for worker in gang.workers]


def states(gangs: dict[int, GangObservation]) -> dict[int, GangState]:
    return {generation: gang.state for generation, gang in gangs.items()}


def over(bench: Bench) -> dict[int, GangObservation]:
    """Stop the job and wait until nobody is left."""
    bench.engine.stop("job", 10.0, "the test has seen enough")
    gangs = bench.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "all leave")
    assert bench.left_behind() == []
    return gangs


@both
def test_who_stays_keeps_its_id_and_who_is_in_no_plan_leaves(bench: Bench, plan: Make) -> None:
    bench.engine.apply(plan(1, "A"))
    bench.wait_state(1, GangState.RUNNING)
    grown = plan(2, "AC")
    bench.engine.apply(grown)
    bench.engine.apply(grown)
    gangs = bench.look()
    assert states(gangs) == {1: GangState.RUNNING, 2: GangState.STARTING}
    assert ids(gangs[2]) == ["g000001-r000", "g000002-r001"]
    bench.restart()  # the service is killed while a worker is about to join
    bench.engine.apply(grown)
    gang = bench.wait_state(2, GangState.RUNNING)
    assert [worker.exit_code for worker in gang.workers] == [None, None]
    assert bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.STOPPED
    said = {r.worker_id: r.data for r in bench.reports["job", 2] if r.kind is ReportKind.STARTED}
    assert {name: data["from_generation"] for name, data in said.items()} == {"g000001-r000": 1, "g000002-r001": 0}
    assert all(data["in_place"] and not data["recovered"] for data in said.values())

    moved = plan(3, "C")
    bench.engine.apply(moved)
    bench.wait_state(3, GangState.RUNNING)
    bench.restart()
    bench.engine.apply(moved)
    gang = bench.wait_state(3, GangState.RUNNING)
    assert ids(gang) == ["g000002-r001"]
    assert [worker.slot for worker in gang.workers] == list(moved.placement)
    gangs = bench.wait(lambda gangs: gangs[2].state is GangState.ENDED, "the one that is not needed has left")
    assert gangs[2].workers[0].exit_code == 0
    assert bench.engine.read_log("job", 1, "g000002-r001", 0, 1000).data != b""
    bench.engine.apply(grown)  # Stale: changes nothing.
    assert bench.look()[3].state is GangState.RUNNING
    bench.engine.apply(plan(4, "CA"))  # where the first one was
    bench.wait_state(4, GangState.RUNNING)
    assert over(bench)[4].outcome is GangOutcome.STOPPED


@both
def test_a_change_is_overtaken_before_anybody_could_join(bench: Bench, plan: Make) -> None:
    bench.engine.apply(plan(1, "A"))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(plan(2, "AB"))
    bench.engine.apply(plan(3, "AD"))
    bench.restart()
    bench.engine.apply(plan(3, "AD"))
    bench.wait_state(3, GangState.RUNNING)
    gangs = bench.wait(lambda gangs: gangs[1].state is gangs[2].state is GangState.ENDED, "the others are over")
    assert [gangs[g].outcome for g in (1, 2)] == [GangOutcome.STOPPED, GangOutcome.STOPPED]
    assert "started" not in bench.kinds(2)
    over(bench)


@both
def test_back_to_where_it_was_before_anybody_could_join(bench: Bench, plan: Make) -> None:
    bench.engine.apply(plan(1, "AB"))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(plan(2, "CD"))  # everybody moves
    bench.engine.apply(plan(3, "AB"))
    gang = bench.wait_state(3, GangState.RUNNING)
    assert ids(gang) == ["g000001-r000", "g000001-r001"]
    bench.wait(lambda gangs: gangs[2].state is GangState.ENDED, "those that came for nothing have left")
    over(bench)


@pytest.mark.parametrize("bench", [pytest.param("local", marks=slow)], indirect=True)
@pytest.mark.parametrize("mover", ["is heard of later", "is lost before"])
def test_a_move_is_judged_by_who_has_moved(
    bench: Bench, plan: Make, monkeypatch: pytest.MonkeyPatch, mover: str
) -> None:
    """The machine that a job moves to is cut off at that moment: the one it leaves has not failed for that."""
    hidden, read = {2}, Observer._new_reports
    monkeypatch.setattr(Observer, "_new_reports", lambda *a: ((), True) if a[2].generation in hidden else read(*a))
    bench.engine.apply(plan(1, "A"))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(plan(2, "C"))
    left = bench.wait(lambda gangs: gangs[1].state is not GangState.RUNNING, "it has left")
    assert left[1].workers[0].exit_code == 0
    for _ in range(5):
        assert bench.look()[1].state is GangState.LEAVING
    if mover == "is lost before":
        status = bench.folder(2, node=1).read_status()
        assert status is not None
        assert status.supervisor is not None
        status.supervisor.kill()
        assert bench.wait_state(2, GangState.ENDED).outcome is GangOutcome.LOST
    else:
        hidden.clear()
        bench.wait_state(2, GangState.RUNNING)
    assert bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.STOPPED
    if mover != "is lost before":
        over(bench)


@both
def test_the_others_go_on_without_a_dead_worker(bench: Bench, plan: Make) -> None:
    bench.engine.apply(plan(1, "AB"))
    bench.wait_state(1, GangState.RUNNING)
    bench.kill_worker(1)
    gangs = bench.wait(lambda gangs: gangs[1].workers[1].exit_code == -9, "the death is seen")
    assert gangs[1].state is GangState.RUNNING
    assert gangs[1].workers[0].exit_code is None
    bench.restart()
    bench.engine.apply(plan(2, "A", lost=("g000001-r001",)))
    bench.wait_state(2, GangState.RUNNING)
    (said,) = [r for r in bench.reports["job", 2] if r.kind is ReportKind.STARTED]
    assert said.data["recovered"]
    bench.wait(lambda gangs: gangs[1].state is GangState.ENDED, "the one before is over")
    over(bench)


def test_the_only_worker_dies(bench: Bench, plan: Make) -> None:
    bench.engine.apply(plan(1, "A"))
    bench.wait_state(1, GangState.RUNNING)
    bench.kill_worker(0)
    ended = bench.wait_state(1, GangState.ENDED)
    assert ended.outcome is GangOutcome.FAILED
    assert ended.failed_rank == 0
    assert "rank 0" in (ended.failure or "")
    assert "killed" in (ended.failure or "")
    assert ended.workers[0].exit_code == -9
    with pytest.raises(EngineError, match="in place"):
        bench.engine.apply(plan(2, "A"))
    assert bench.left_behind() == []


@both
def test_everybody_dies_one_after_the_other(bench: Bench, plan: Make) -> None:
    bench.engine.apply(plan(1, "AB"))
    bench.wait_state(1, GangState.RUNNING)
    bench.kill_worker(0)
    bench.wait(lambda gangs: gangs[1].workers[0].exit_code == -9, "one death is seen")
    bench.kill_worker(1)
    ended = bench.wait_state(1, GangState.ENDED)
    assert ended.outcome is GangOutcome.FAILED
    assert [worker.exit_code for worker in ended.workers] == [-9, -9]
    assert bench.left_behind() == []


@both
def test_a_stop_and_a_restart_in_the_middle_of_a_change(bench: Bench, plan: Make) -> None:
    bench.engine.apply(plan(1, "A"))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(plan(2, "AC"))
    restart = plan(3, "BD", mode=RescaleMode.RESTART)
    bench.engine.apply(restart)
    gangs = bench.wait(lambda gangs: gangs[1].state is gangs[2].state is GangState.ENDED, "all save and leave")
    assert [gangs[g].outcome for g in (1, 2)] == [GangOutcome.STOPPED, GangOutcome.STOPPED]
    assert "checkpoint" in bench.kinds(1) + bench.kinds(2)  # whether the change came first or not
    assert gangs[3].state is GangState.PENDING
    bench.engine.apply(replace(restart, cleared_generation=2))
    bench.wait_state(3, GangState.RUNNING)
    bench.engine.apply(plan(4, "B"))
    over(bench)
    assert bench.look()[4].state is GangState.ENDED


@pytest.mark.parametrize(
    "bench", [pytest.param("local", marks=slow), pytest.param("cluster", marks=slow)], indirect=True
)
@pytest.mark.parametrize("goes_on", [True, False], ids=["trains on", "is over"])
def test_who_was_to_join_and_never_came_keeps_nothing_open(
    bench: Bench, plan: Make, monkeypatch: pytest.MonkeyPatch, goes_on: bool
) -> None:
    """A leader died when it had written down whom it starts, and had started nobody; its successor plans anew."""
    monkeypatch.setattr(observing, "START_LIMIT_S", 2.0)
    begun = plan(1, "A")
    begun = begun if goes_on else replace(begun, session=replace(begun.session, epochs=20))
    bench.engine.apply(begun)
    bench.wait_state(1, GangState.RUNNING)
    with monkeypatch.context() as dies:
        dies.setattr(bench.engine._machines, "spawn", lambda *_: None)  # type: ignore[attr-defined]
        bench.engine.apply(replace(plan(2, "AC"), session=begun.session))
    bench.restart()
    if goes_on:
        bench.engine.apply(plan(3, "A"))
        bench.wait_state(3, GangState.RUNNING)
        assert bench.wait_state(2, GangState.ENDED).outcome is GangOutcome.STOPPED
        over(bench)
    else:
        ended = bench.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "all is over")
        assert GangOutcome.FINISHED in [gang.outcome for gang in ended.values()]
        assert bench.left_behind() == []


def test_nothing_is_there_that_could_go_on(bench: Bench, plan: Make) -> None:
    with pytest.raises(EngineError, match="in place"):
        bench.engine.apply(plan(2, "A"))
    assert bench.look() == {}


@pytest.mark.slow
def test_the_plan_of_a_change_names_members_and_lost(warm_bench: Bench, code_dir: Path) -> None:
    bench = warm_bench
    install(SCRIPT, code_dir)
    session = {"epochs": 10_000, "steps": None, "global_batch_size": 16, "logical_workers": 4}
    bench.engine.apply(bench.spec(1, workers=2, session=session))
    bench.wait_state(1, GangState.RUNNING)
    changed = bench.spec(2, session=session, mode=RescaleMode.IN_PLACE, lost=("g000001-r000",))
    changed = replace(changed, placement=(Slot(bench.nodes[0], 1), Slot(bench.nodes[1], 0)))
    bench.engine.apply(changed)
    found = Membership.read(changed.incarnation_dir)
    assert found is not None
    assert [member.worker_id for member in found.members] == ["g000001-r001", "g000002-r001"]
    assert (found.generation, found.mode, found.lost) == (2, RescaleMode.IN_PLACE, ("g000001-r000",))
    gangs = bench.wait(lambda gangs: gangs[1].workers[0].exit_code is not None, "who is given up is gone")
    assert gangs[1].workers[0].exit_code in (-9, 0), "it is killed, unless it has left by the plan before"
    assert gangs[1].outcome in (None, GangOutcome.STOPPED)
    bench.wait_state(2, GangState.RUNNING)
    over(bench)
