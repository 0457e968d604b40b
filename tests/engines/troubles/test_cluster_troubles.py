"""Nodes that are cut off, lose their power or their agent: the others train on, nothing runs twice, nobody is left."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.gang import install
from support.node_agents import start_agent

from elasticflow_airflow.engines.port import GangOutcome, GangSpec, GangState, SlotsHeldError
from elasticflow_airflow.runtime.protocol import ReportKind, RescaleMode
from elasticflow_airflow.scheduler_core.model.values import Slot

if TYPE_CHECKING:
    from conftest import ClusterBench

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
SCRIPT = Path(__file__).parents[2] / "support" / "train_small.py"
A, B, C, D = Slot("local0", 0), Slot("local0", 1), Slot("local1", 0), Slot("local1", 1)


def job(bench: ClusterBench, generation: int, *slots: Slot, epochs: int = 10_000, **changes) -> GangSpec:
    install(SCRIPT, bench.base / "code")
    return bench.spec(
        generation,
        placement=slots,
        session={"epochs": epochs, "steps": None, "global_batch_size": 16, "logical_workers": 4, "seed": 7},
        mode=RescaleMode.RESTART if generation == 1 else RescaleMode.IN_PLACE,
        **{"env": {"TEST_STEP_S": "0.1"}, **changes},
    )


def steps(bench: ClusterBench, generation: int) -> int:
    said = [r.step for r in bench.reports.get(("job", generation), []) if r.kind is ReportKind.PROGRESS]
    return max(said, default=0)


def trains_on(bench: ClusterBench, generation: int) -> None:
    bench.look()
    before = steps(bench, generation)
    bench.wait(lambda _: steps(bench, generation) > before, "it trains on")


def over(bench: ClusterBench) -> None:
    bench.engine.stop("job", 10.0, "the test has seen enough")
    bench.wait(lambda gangs: all(gang.state is GangState.ENDED for gang in gangs.values()), "all leave")
    assert bench.left_behind() == []


def test_an_agent_that_is_killed_finds_its_workers_again(cluster_bench: ClusterBench) -> None:
    bench = cluster_bench
    bench.engine.apply(job(bench, 1, A, C))
    bench.wait_state(1, GangState.RUNNING)
    pids = bench.pids(1)
    for node_id in bench.nodes:
        bench.agents[node_id].kill()
        bench.agents[node_id].wait()
        bench.start_agent(node_id)
        trains_on(bench, 1)
    assert [worker.pid for worker in bench.look()[1].workers] == pids
    bench.restart()  # and the service
    bench.engine.apply(job(bench, 2, A, C, B, D))
    bench.wait_state(2, GangState.RUNNING)
    assert bench.pids(2)[:2] == pids
    over(bench)


def test_who_survives_the_power_cut_of_a_node_trains_on(machines_bench: ClusterBench) -> None:
    bench = machines_bench
    assert bench.machines is not None
    bench.engine.apply(job(bench, 1, A, C))
    bench.wait_state(1, GangState.RUNNING)
    trains_on(bench, 1)

    def log_of_the_other() -> bytes:
        return bench.engine.read_log("job", 1, "g000001-r001", 0, 100_000).data

    bench.wait(lambda _: b"STEP" in log_of_the_other(), "some of its output has come")
    before = steps(bench, 1)
    bench.machines.cut_power(1)
    gangs = bench.wait(lambda gangs: gangs[1].workers[1].exit_code == -signal.SIGKILL, "it is given up")
    assert gangs[1].state is GangState.RUNNING
    assert [node.node_id for node in bench.engine.inventory()] == ["local0"]
    with pytest.raises(SlotsHeldError, match="does not answer"):
        bench.engine.apply(job(bench, 2, A, D, lost=("g000001-r001",)))
    bench.engine.apply(job(bench, 3, A, B, lost=("g000001-r001",)))
    bench.wait_state(3, GangState.RUNNING)
    trains_on(bench, 3)
    assert steps(bench, 3) > before
    begun = min(r.step for r in bench.reports["job", 3] if r.kind is ReportKind.STARTED)
    assert begun >= before, "no step is lost"
    assert b"STEP" in log_of_the_other(), "what was copied is readable"

    bench.machines.heal(1)
    bench.start_agent("local1")  # The machine is there again, and knows nothing of what ran on it.
    bench.wait(lambda _: len(bench.engine.inventory()) == 2, "the node is taken back")
    assert not bench.engine.inventory()[1].busy
    bench.engine.apply(job(bench, 4, A, D))
    bench.wait_state(4, GangState.RUNNING)
    over(bench)


def test_a_node_that_was_cut_off_publishes_nothing_and_is_cleared_when_it_is_back(machines_bench: ClusterBench) -> None:
    bench = machines_bench
    assert bench.machines is not None
    bench.engine.apply(job(bench, 1, A, C))
    bench.wait_state(1, GangState.RUNNING)
    trains_on(bench, 1)
    bench.machines.cut(1)
    bench.wait(lambda gangs: gangs[1].workers[1].exit_code is not None, "it is given up")
    bench.engine.apply(job(bench, 2, A, lost=("g000001-r001",)))
    bench.wait_state(2, GangState.RUNNING)
    trains_on(bench, 2)
    said = len(bench.kinds(1))
    bench.machines.heal(1)
    bench.wait(lambda _: len(bench.engine.inventory()) == 2, "it is back")
    said_of_slots = bench.engine.inventory()[1].busy
    assert not said_of_slots or "given up" in said_of_slots[0]  # unless its workers were faster
    bench.wait(lambda _: not bench.engine.inventory()[1].busy, "its slots are free")
    bench.look()
    assert len(bench.kinds(1)) == said
    bench.engine.apply(job(bench, 3, A, D))
    bench.wait_state(3, GangState.RUNNING)
    over(bench)


def test_a_short_cut_costs_nothing(machines_bench: ClusterBench) -> None:
    bench = machines_bench
    assert bench.machines is not None
    bench.engine.apply(job(bench, 1, A, C))
    bench.wait_state(1, GangState.RUNNING)
    pids = bench.pids(1)
    trains_on(bench, 1)
    bench.machines.cut(1)
    subprocess.run(["sleep", "1.5"], check=True)
    bench.machines.heal(1)
    trains_on(bench, 1)
    assert [worker.pid for worker in bench.look()[1].workers] == pids
    over(bench)


def test_a_gang_whose_nodes_are_all_lost_is_lost_and_goes_on_elsewhere(machines_bench: ClusterBench) -> None:
    bench = machines_bench
    assert bench.machines is not None
    bench.engine.apply(bench.spec(1, placement=(C, D)))
    bench.wait_state(1, GangState.RUNNING)
    bench.machines.cut(1)
    gangs = bench.wait(lambda gangs: gangs[1].state is GangState.ENDED, "it is lost")
    assert gangs[1].outcome is GangOutcome.LOST
    bench.restart()  # The service finds it lost, too.
    assert bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.LOST
    bench.engine.apply(replace(bench.spec(2, placement=(A, B)), cleared_generation=1))
    bench.wait_state(2, GangState.RUNNING)
    bench.machines.heal(1)
    bench.wait(lambda _: len(bench.engine.inventory()) == 2 and not bench.engine.inventory()[1].busy, "cleared")
    over(bench)


def test_a_stopped_agent_is_given_up_and_taken_back(cluster_bench: ClusterBench) -> None:
    bench = cluster_bench
    bench.engine.apply(job(bench, 1, A, C))
    bench.wait_state(1, GangState.RUNNING)
    os.kill(bench.agents["local1"].pid, signal.SIGSTOP)
    bench.wait(lambda gangs: gangs[1].workers[1].exit_code is not None, "it is given up")
    bench.engine.apply(job(bench, 2, A, lost=("g000001-r001",)))
    bench.wait_state(2, GangState.RUNNING)
    os.kill(bench.agents["local1"].pid, signal.SIGCONT)
    bench.wait(lambda _: len(bench.engine.inventory()) == 2 and not bench.engine.inventory()[1].busy, "taken back")
    over(bench)


def test_a_gang_on_a_node_that_is_no_longer_named_is_lost(cluster_bench: ClusterBench) -> None:
    bench = cluster_bench
    bench.engine.apply(bench.spec(1, placement=(C,)))
    bench.wait_state(1, GangState.RUNNING)
    url = bench.urls.pop("local1")
    bench.restart()
    assert bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.LOST
    bench.urls["local1"] = url  # named again, it is told
    bench.restart()
    bench.wait(lambda _: len(bench.engine.inventory()) == 2 and not bench.engine.inventory()[1].busy, "it is cleared")
    assert bench.left_behind() == []


def test_a_second_node_of_the_same_name_is_not_taken(
    cluster_bench: ClusterBench, caplog: pytest.LogCaptureFixture
) -> None:
    bench = cluster_bench
    double, url = start_agent(bench.base / "double", "local1", "127.0.0.1:0", 2)
    try:
        bench.urls["double"] = url
        bench.restart()
        assert [node.node_id for node in bench.engine.inventory()] == ["local0", "local1"]
        assert "a node named local1 is at http://127.0.0." in caplog.text
    finally:
        double.kill()
        double.wait()
        assert double.stdout is not None
        double.stdout.close()
