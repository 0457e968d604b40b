"""The warm pool: jobs start from a process that has imported before; whatever is killed, nobody is left behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elasticflow_airflow.engines.local import LocalEngine
from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.engines.local.workers.warm_pool import KEEP, WarmPool
from elasticflow_airflow.engines.port import GangOutcome, GangState
from elasticflow_airflow.scheduler_core.model.values import Slot

if TYPE_CHECKING:
    from conftest import LocalBench

pytestmark = pytest.mark.timeout(300)

FORKS_A_STRANGER = """
import os, subprocess, sys
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("token", os.environ["TOKEN"], "colour", os.environ["COLOUR"], "imported", "wave" in sys.modules, flush=True)
"""


@pytest.fixture
def pooled(local_bench: LocalBench, code_dir: Path) -> LocalBench:
    """A bench whose engine has a warm pool; its scripts leave a process behind that left their group."""
    text = (code_dir / "train.py").read_text()
    (code_dir / "train.py").write_text(FORKS_A_STRANGER + text)
    local_bench.engine.close()
    local_bench.engine = local_bench.make(pool=pool_of(local_bench, "wave", "no_such_module"))
    wait_for_pool(local_bench)
    return local_bench


def pool_of(bench: LocalBench, *modules: str) -> WarmPool:
    """Return a pool of the bench's own."""
    return WarmPool(modules, bench.base / "state" / "pool")


def pool_log(bench: LocalBench) -> str:
    path = bench.base / "state" / "pool" / "pool.log"
    return path.read_text() if path.exists() else ""


def wait_for_pool(bench: LocalBench, times: int = 1) -> None:
    bench.wait(lambda _: pool_log(bench).count(" warm: ") >= times, "the pool is warm")


def zygotes(bench: LocalBench) -> list[ProcessId]:
    """Processes of the pool itself: not what was forked from them, which looks alike."""
    found = []
    for line in bench.processes():
        process = ProcessId.of(int(line.partition(":")[0]))
        if process is not None and "runtime.process.zygote" in line and process.is_alive():
            parent = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
            found += [process] if parent == os.getpid() else []
    return found


def job(bench: LocalBench, generation: int = 1, **changes: object):
    env = {"COLOUR": "blue", **changes.pop("env", {})}  # type: ignore[dict-item]  # a test's own
    return bench.spec(generation, env=env, secret_env={"TOKEN": "hunter2"}, **changes)


def came_from_pool(bench: LocalBench, job_id: str = "job") -> bool:
    pid = bench.worker_process(0, job_id=job_id).pid
    return b"runtime.process.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()


def log_of(bench: LocalBench, worker_id: str = "g000001-r000") -> str:
    return bench.engine.read_log("job", 1, worker_id, 0, 1 << 20).data.decode()


def test_a_job_starts_from_the_pool_and_outlives_it(pooled: LocalBench) -> None:
    bench = pooled
    assert "no_such_module cannot be imported ahead: ModuleNotFoundError" in pool_log(bench)
    placement = (Slot("local0", 0), Slot("local1", 0))
    bench.engine.apply(job(bench, placement=placement))
    bench.wait_state(1, GangState.RUNNING)
    assert came_from_pool(bench)
    (zygote,) = zygotes(bench)
    assert "token hunter2 colour blue imported True" in log_of(bench)
    for name in ("environ", "cmdline"):
        assert b"hunter2" not in Path(f"/proc/{zygote.pid}/{name}").read_bytes()

    zygote.kill()
    bench.restart()  # an engine without a pool
    assert bench.look()[1].state is GangState.RUNNING
    bench.engine.stop("job", 10.0, "enough")
    assert bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.STOPPED
    assert [worker.exit_code for worker in bench.look()[1].workers] == [0, 0]
    assert bench.left_behind() == []


def test_a_supervisor_that_is_killed_takes_its_workers_along(pooled: LocalBench) -> None:
    bench = pooled
    bench.engine.apply(job(bench))
    bench.wait_state(1, GangState.RUNNING)
    assert came_from_pool(bench)
    bench.lose()
    assert bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.LOST
    bench.wait(lambda _: len(bench.processes()) == len(zygotes(bench)), "the workers, and what they left, are gone")
    bench.engine.apply(job(bench, 2, cleared_generation=1))
    bench.wait_state(2, GangState.RUNNING)
    bench.restart()
    bench.engine.stop("job", 10.0)
    bench.wait_state(2, GangState.ENDED)
    assert bench.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize("what", ["killed", "killed while it imports", pytest.param("hanging", marks=pytest.mark.soak)])
def test_a_pool_that_does_not_serve_delays_a_job_at_most(local_bench: LocalBench, what: str) -> None:
    bench = local_bench
    bench.engine.close()
    bench.engine = bench.make(pool=pool_of(bench))
    if what == "killed while it imports":
        bench.engine.apply(bench.spec(1))
    else:
        wait_for_pool(bench)
    (zygote,) = zygotes(bench)
    zygote.kill(signal.SIGSTOP if what == "hanging" else signal.SIGKILL)
    if what == "killed":  # the kernel takes its time; one that is asked before it has gone does not serve, either
        bench.wait(lambda _: not zygote.is_alive(), "its death")
    bench.engine.apply(bench.spec(1))
    bench.wait_state(1, GangState.RUNNING)
    if what == "killed":
        # The next one of the pool was asked. Whether this job waited for it is a matter of how long it imports.
        wait_for_pool(bench, 2)
        bench.engine.apply(bench.spec(1, job_id="next", placement=(Slot("local0", 1),)))
        bench.wait_state(1, GangState.RUNNING, "next")
        assert came_from_pool(bench, "next")
        bench.engine.stop("next", 10.0)
    else:
        assert not came_from_pool(bench)
    zygote.kill()
    bench.engine.stop("job", 10.0)
    bench.wait_state(1, GangState.ENDED)


def test_a_pool_whose_engine_is_gone_leaves_in_the_middle_of_its_imports(local_bench: LocalBench) -> None:
    bench = local_bench
    bench.engine.close()
    pool = WarmPool((), bench.base / "pool")
    pool.warm(sys.executable, {**os.environ, "PYTHONPATH": str(bench.base / "state" / "runtime-path")})
    (zygote,) = pool._zygotes.values()
    zygote.control.close()  # what the kernel does when the engine is killed
    assert zygote.process.wait(30) == 0
    assert not (bench.base / "pool" / "pool.log").read_text()
    pool.close()


@pytest.mark.slow
def test_another_environment_is_another_pool(pooled: LocalBench) -> None:
    bench = pooled
    bench.engine.apply(job(bench, env={"OMP_NUM_THREADS": "3"}))
    bench.wait_state(1, GangState.RUNNING)
    assert came_from_pool(bench)
    assert len(zygotes(bench)) == 2
    assert pool_log(bench).count(" warm: ") == 2


@pytest.mark.slow
def test_installed_packages_make_the_pool_anew(local_bench: LocalBench) -> None:
    bench = local_bench
    packages = bench.base / "site-packages"
    packages.mkdir()
    bench.engine.close()
    bench.engine = bench.make(pool=pool_of(bench))
    for generation in (1, 2):
        bench.engine.apply(bench.spec(generation, job_id=f"job{generation}", env={"PYTHONPATH": str(packages)}))
        bench.wait_state(1 if generation == 1 else 2, GangState.RUNNING, f"job{generation}")
        bench.engine.stop(f"job{generation}", 5.0)
        bench.wait_state(generation, GangState.ENDED, f"job{generation}")
        (packages / "fresh.dist-info").mkdir(exist_ok=True)
    bench.wait(lambda _: "packages were installed or removed" in pool_log(bench), "the old one leaves")


def test_what_an_import_may_read_decides_who_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = WarmPool(("wandb.sdk",), tmp_path)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(pool, "_start", lambda _, env: started.append(dict(env)) or _Never())
    base = {"HOME": "/me", "EXPERIMENT": "1", "CUDA_VISIBLE_DEVICES": "0"}
    pool.warm("/bin/python", base)
    pool.warm("/bin/python", base | {"EXPERIMENT": "2", "CUDA_VISIBLE_DEVICES": "1", "HF_TOKEN": "secret"})
    assert len(started) == 1
    for change in ({"HOME": "/tmp"}, {"OMP_NUM_THREADS": "2"}, {"WANDB_MODE": "offline"}, {"PYTHONPATH": "/x"}):
        pool.warm("/bin/python", base | change)
    assert len(started) == 5
    assert len(pool._zygotes) == KEEP
    assert pool.take("/bin/python", base, ["HF_HOME"]) is None  # a secret that an import reads
    pool.close()


class _Never:
    """A process of the pool that is never asked."""

    class process:  # stands for an attribute
        poll = staticmethod(lambda: None)

    def end(self) -> None:
        """Nothing is there."""


def test_an_interpreter_that_is_not_there_has_no_pool(tmp_path: Path) -> None:
    pool = WarmPool((), tmp_path / "pool")
    assert pool.take("/nowhere/python", {}) is None
    pool.close()


def test_without_the_setting_there_is_no_pool(local_bench: LocalBench) -> None:
    assert isinstance(local_bench.engine, LocalEngine)
    assert not (local_bench.base / "state" / "pool").exists()
