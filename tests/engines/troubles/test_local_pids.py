"""A pid that belongs to somebody else by now: no record of the local engine mistakes it, and no stranger is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow_airflow.engines.local.files.generation_folder import Status, SupervisorFolder, WorkerStatus
from elasticflow_airflow.engines.local.machine.layout import detect_nodes
from elasticflow_airflow.engines.local.machine.processes import ProcessId, group_led_by
from elasticflow_airflow.engines.local.node_manager import NodeManager
from elasticflow_airflow.engines.port import GangOutcome, GangState

if TYPE_CHECKING:
    from conftest import LocalBench

FAMILY = (
    "import os, subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "sys.stdin.read()\n"
    "os._exit(0)\n"
)

Family = tuple[subprocess.Popen[bytes], ProcessId, ProcessId]


@pytest.fixture
def start_family() -> Iterator[Callable[..., Family]]:
    """Start a process that leads a group of its own, and a child in it; ``env`` is what both get."""
    started: list[Family] = []

    def start(**env: str) -> Family:
        leader = subprocess.Popen(
            [sys.executable, "-c", FAMILY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **env},
        )
        assert leader.stdout is not None
        child = ProcessId.of(int(leader.stdout.readline()))
        itself = ProcessId.of(leader.pid)
        assert child is not None
        assert itself is not None
        started.append((leader, itself, child))
        return leader, itself, child

    yield start
    for leader, _, child in started:
        child.kill()
        leader.kill()
        leader.communicate()


def test_a_group_belongs_to_the_process_that_led_it(start_family: Callable[..., Family]) -> None:
    leader, itself, child = start_family(ELASTICFLOW_CORES="0")
    assert set(group_led_by(itself)) == {itself, child}
    assert group_led_by(replace(itself, start=itself.start - 1)) == []
    assert group_led_by(replace(itself, boot="another boot")) == []
    leader.kill()
    os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOWAIT)
    assert group_led_by(itself) == [child], "a zombie holds its pid"
    assert group_led_by(replace(itself, start=itself.start - 1)) == []
    leader.wait(10)
    assert group_led_by(itself) == [child], "its number stays taken while a member lives"


def test_a_member_that_is_just_being_executed_is_known_by_its_environment(start_family, monkeypatch) -> None:
    """For a moment the kernel shows none of it: before its memory is set up."""
    leader, itself, child = start_family(ELASTICFLOW_CORES="0")
    leader.kill()
    leader.wait(10)
    read, shown = Path.read_bytes, [b"", b""]
    monkeypatch.setattr(
        Path, "read_bytes", lambda path: shown.pop() if shown and path.name == "environ" else read(path)
    )
    assert group_led_by(itself) == [child]
    assert shown == []


def test_a_group_without_a_leader_is_ours_only_with_our_workers_in_it(start_family: Callable[..., Family]) -> None:
    """As a shell leaves it when the first command of a pipeline has ended."""
    leader, itself, child = start_family()
    leader.kill()
    leader.wait(10)
    assert group_led_by(itself) == []
    assert child.is_alive()


def test_what_a_dead_supervisor_left_is_ended_and_nobody_else(
    tmp_path: Path, start_family: Callable[..., Family]
) -> None:
    manager = NodeManager(tmp_path, detect_nodes(environ={}), tmp_path / "locks", {})
    _, stranger, strangers_child = start_family()
    _, trainer, loader = start_family(ELASTICFLOW_CORES="0")
    before = replace(stranger, start=stranger.start - 1)
    status = Status(
        supervisor=before,
        workers={
            "g000001-r000": WorkerStatus(rank=0, agent=before, trainer=before),
            "g000001-r001": WorkerStatus(rank=1, agent=before, trainer=trainer),
        },
    )
    found = [(SupervisorFolder(tmp_path), status)]
    assert manager.end_leftovers(found)
    assert stranger.is_alive()
    assert strangers_child.is_alive()
    while trainer.is_alive() or loader.is_alive():
        manager.end_leftovers(found)
    assert not manager.end_leftovers(found)


def test_a_service_that_comes_back_takes_nobody_for_its_supervisor(
    local_bench: LocalBench, start_family: Callable[..., Family]
) -> None:
    """The supervisor died while no service was there; its pid, and those of its workers, went to others."""
    bench = local_bench
    bench.engine.apply(bench.spec(1))
    bench.wait_state(1, GangState.RUNNING)
    bench.worker_process(0)
    bench.lose()
    assert bench.left_behind() == []
    _, stranger, strangers_child = start_family()
    path = bench.folder().path / "status.json"
    raw = json.loads(path.read_text())
    assert not raw["ended"]
    raw["supervisor"]["pid"] = stranger.pid
    for worker in raw["workers"].values():
        worker["agent"]["pid"] = worker["trainer"]["pid"] = stranger.pid
    path.write_text(json.dumps(raw))
    bench.restart()
    ended = bench.wait_state(1, GangState.ENDED)
    assert ended.outcome is GangOutcome.LOST
    bench.engine.stop("job", 0.0, "the test is over")
    assert stranger.is_alive()
    assert strangers_child.is_alive()
