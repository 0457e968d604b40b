"""A supervisor that stands still is killed once its lease has ended long ago, and no other one is."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow_airflow.engines.cluster.stuck_supervisors import LeaseWatchdog
from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder
from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.engines.port import GangObservation, GangState

if TYPE_CHECKING:
    from conftest import LocalBench


@pytest.fixture
def stopped() -> Iterator[ProcessId]:
    with subprocess.Popen(["sleep", "600"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        found = ProcessId.of(process.pid)
        assert found is not None
        yield found
        process.kill()


def folder_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lease_s: float) -> SupervisorFolder:
    class Spec:
        def __init__(self) -> None:
            self.lease_s = lease_s

    monkeypatch.setattr(SupervisorFolder, "read_spec", lambda _: Spec())
    folder = SupervisorFolder(tmp_path)
    folder.renew()
    return folder


def test_who_stands_still_is_killed_when_its_lease_has_ended_long_ago(tmp_path, monkeypatch, stopped) -> None:
    folder = folder_of(tmp_path, monkeypatch, 10.0)
    clock = [1000.0]
    monkeypatch.setattr("elasticflow_airflow.engines.cluster.stuck_supervisors.time.monotonic", lambda: clock[0])
    watchdog = LeaseWatchdog(lambda: [(stopped, folder)], extra_s=20.0)
    assert watchdog.look() == []
    clock[0] += 29.0
    folder.renew()
    os.utime(folder.lease, ns=(5, 5))  # Whatever the clock of the file system says: it has changed.
    assert watchdog.look() == []
    clock[0] += 29.0
    assert watchdog.look() == []
    assert stopped.is_alive()
    clock[0] += 2.0
    assert watchdog.look() == [stopped]
    end_s = time.perf_counter() + 10.0
    while stopped.is_alive():
        assert time.perf_counter() < end_s
    assert watchdog._running() == [(stopped, folder)]


def test_what_a_script_makes_of_its_lease_stops_nothing(tmp_path, stopped) -> None:
    folder = SupervisorFolder(tmp_path)
    watchdog = LeaseWatchdog(lambda: [(stopped, folder)], extra_s=0.0)
    assert watchdog.look() == [], "there is no lease"
    folder.renew()
    (tmp_path / "spec.json").write_text(json.dumps({"lease_s": "x"}))
    assert watchdog.look() == []
    folder.lease.unlink()
    folder.lease.mkdir()
    assert watchdog.look() == []
    assert stopped.is_alive()


@pytest.mark.slow
def test_the_workers_of_a_stopped_supervisor_end_with_it(local_bench: LocalBench) -> None:
    bench = local_bench
    bench.engine.apply(bench.spec(1, workers=2, lease_s=3.0, session={"steps": 10_000}))

    def running(gangs: dict[int, GangObservation]) -> bool:
        bench.engine.renew("job")
        return gangs[1].state is GangState.RUNNING

    bench.wait(running, "it runs, with its lease renewed")
    (supervisor, _), *_ = bench.engine._machines.supervisors()
    supervisor.kill(signal.SIGSTOP)
    watchdog = LeaseWatchdog(bench.engine._machines.supervisors, extra_s=1.0)
    assert watchdog.look() == []
    time.sleep(5.0)  # Nobody renews the lease, and who should end the workers stands still.
    assert len(bench.processes()) > 2
    assert watchdog.look() == [supervisor]
    assert bench.left_behind() == []
    bench.wait(lambda gangs: gangs[1].state is GangState.ENDED, "the slots are free")
    assert bench.engine.inventory()[0].busy == {}
