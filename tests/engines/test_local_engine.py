"""What the local engine alone can be asked: real scripts that end in every way, real kills, nobody left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.cases import slow

from elasticflow_airflow.engines.local import detect_nodes, engine
from elasticflow_airflow.engines.local.files.generation_folder import SupervisorFolder, SupervisorSpec
from elasticflow_airflow.engines.local.machine import slots
from elasticflow_airflow.engines.local.machine.processes import ProcessId, children_of
from elasticflow_airflow.engines.port import EngineError, GangObservation, GangOutcome, GangState, SlotsHeldError
from elasticflow_airflow.runtime.protocol import DEVICE_FAULT, Membership, ReportKind
from elasticflow_airflow.scheduler_core.model.values import Slot

if TYPE_CHECKING:
    from conftest import LocalBench

SCRIPTS = {
    "raises": "def train():\n    raise ValueError('bad data in row 7')\nprint('hello')\ntrain()\n",
    "oom": "import torch\ntorch.empty(1 << 46)\n",
    "plain": (
        "import time\n"
        "for i in range(1, 11):\n    print(f'step {i} loss {1 / i:.3f}', flush=True)\n    time.sleep(0.1)\n"
        "print('x' * 5000)\n"
    ),
    "sigterm": (
        "import signal, sys, time\n"
        "def save(*_):\n    print('saved', flush=True)\n    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "for i in range(1, 10**6):\n    print(f'step {i}', flush=True)\n    time.sleep(0.05)\n"
    ),
}
SHOWN = (
    "import atexit, os, sys, threading\n"
    "import helper\n"
    "atexit.register(lambda: print('atexit ran'))\n"
    "print('argv', sys.argv[1:], 'cwd', os.getcwd(), 'helper', helper.VALUE)\n"
    "print('cores', sorted(os.sched_getaffinity(0)), 'omp', os.environ['OMP_NUM_THREADS'])\n"
    "print('secret backwards', os.environ['SECRET'][::-1], 'mine', os.environ['MINE'])\n"
    "print('local rank', os.environ['LOCAL_RANK'], 'world', os.environ['WORLD_SIZE'])\n"
    "print('leaked', [name for name in os.environ if name.startswith('AIRFLOW')])\n"
    "sys.exit('a word of farewell')\n"
)
REGEX = r"step (?P<step>\d+)(?: loss (?P<loss>\S+))?"


@pytest.mark.slow
def test_a_broken_device_is_told_apart_from_a_broken_script(local_bench: LocalBench) -> None:
    bench = local_bench
    (bench.base / "code" / "ecc.py").write_text(
        "import torch\nraise torch.AcceleratorError('CUDA error: uncorrectable ECC error encountered')\n"
    )
    bench.engine.apply(bench.spec(session={"script": "ecc.py"}))
    ended = bench.wait_state(1, GangState.ENDED)
    assert ended.outcome is GangOutcome.FAILED
    (report,) = bench.reports["job", 1]
    assert report.data["kind"] == DEVICE_FAULT
    assert "uncorrectable ECC error" in report.data["message"]


@pytest.mark.slow
def test_scripts_end_in_every_way(local_bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four jobs side by side, each with its own end; a fifth one shows what a script sees."""
    bench = local_bench
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "not for you")
    bench.engine = bench.make(log_segment_bytes=1000, log_segments=3)
    for index, (name, text) in enumerate(SCRIPTS.items()):
        (bench.base / "code" / f"{name}.py").write_text(text)
        session: dict[str, Any] = {"script": f"{name}.py"}
        if name in ("plain", "sigterm"):
            session["progress_regex"] = REGEX
        slot = Slot(bench.nodes[index // 2], index % 2)
        bench.engine.apply(bench.spec(job_id=name, placement=(slot,), session=session))
    ended: dict[str, GangObservation] = {}
    stopped_s = 0.0

    def all_ended(_: object) -> bool:
        nonlocal stopped_s
        for gang in bench.engine.observe():
            bench.reports.setdefault((gang.job_id, 1), []).extend(gang.reports)
            if gang.state is GangState.ENDED:
                ended[gang.job_id] = gang
        if not stopped_s and bench.kinds(1, "sigterm"):
            stopped_s = time.monotonic()
            bench.engine.stop("sigterm", 30.0, "enough")
        return len(ended) == len(SCRIPTS)

    bench.wait(all_ended, "all scripts end")

    assert {name: gang.outcome for name, gang in ended.items()} == {
        "raises": GangOutcome.FAILED,
        "oom": GangOutcome.FAILED,
        "plain": GangOutcome.FINISHED,
        "sigterm": GangOutcome.STOPPED,
    }
    failure = ended["raises"].failure or ""
    assert failure.startswith("rank 0 (g000001-r000) exited with status 1: ValueError: bad data in row 7")
    assert "Last lines of the log" in failure
    assert "line 2, in train" in failure
    assert "torch/" not in failure, "torchrun's own words bury the traceback"
    assert ended["raises"].failed_rank == 0
    assert bench.kinds(1, "raises") == ["failed"]
    assert bench.kinds(1, "oom") == ["out_of_memory"]

    last = bench.reports["plain", 1][-1]
    assert (last.kind, last.step, last.data["loss"]) == (ReportKind.PROGRESS, 10, 0.1)
    assert ended["sigterm"].workers[0].exit_code == 143
    assert b"saved" in bench.engine.read_log("sigterm", 1, "g000001-r000", 0, 10_000).data
    # The long line of "plain" has rotated its beginning away; offsets go on.
    piece = bench.engine.read_log("plain", 1, "g000001-r000", 0, 100_000)
    assert piece.start_offset > 0
    assert piece.end_of_file
    assert piece.next_offset == piece.start_offset + len(piece.data) > 5000
    assert bench.left_behind() == []


@pytest.mark.parametrize("fork", [True, False])
def test_a_script_sees_what_it_should(local_bench: LocalBench, monkeypatch: pytest.MonkeyPatch, fork: bool) -> None:
    """Forked from its agent (CPU slots) or started anew (GPUs), a script finds the same world."""
    bench = local_bench
    monkeypatch.setenv("AIRFLOW__CORE__FERNET_KEY", "not for you")
    if not fork:
        write = SupervisorFolder.write_spec

        def without_fork(folder: SupervisorFolder, spec: SupervisorSpec) -> None:
            # As for a slot with a GPU, of which this machine need not have one.
            write(folder, replace(spec, workers=tuple(replace(worker, fork_trainer=False) for worker in spec.workers)))

        monkeypatch.setattr(SupervisorFolder, "write_spec", without_fork)
    folder = bench.base / "code" / "package"
    folder.mkdir()
    (folder / "shown.py").write_text(SHOWN)
    (folder / "helper.py").write_text("VALUE = 42\n")
    session = {"script": "package/shown.py", "args": ("--data", "a b"), "working_dir": str(bench.base)}
    spec = bench.spec(session=session, env={"MINE": "yes"}, secret_env={"SECRET": "hunter2"})
    bench.engine.apply(spec)
    ended = bench.wait_state(1, GangState.ENDED)
    text = bench.engine.read_log("job", 1, "g000001-r000", 0, 10_000).data.decode()
    assert f"argv ['--data', 'a b'] cwd {bench.base} helper 42" in text
    slot = detect_nodes(virtual_nodes="2x2", environ={"CUDA_VISIBLE_DEVICES": ""})[0].slots[0]
    assert f"cores {list(slot.cores)} omp {slot.threads}" in text
    assert "secret backwards 2retnuh mine yes" in text
    assert "local rank 0 world 1" in text
    assert "leaked []" in text
    assert "atexit ran" in text
    assert (ended.failure or "").startswith("rank 0 (g000001-r000) exited with status 1: a word of farewell")
    found = subprocess.run(["grep", "-rl", "hunter2", str(bench.base)], capture_output=True, text=True)
    assert found.stdout == "", "a secret is on disk in plain text"


def test_what_is_missing_is_said_before_anything_starts(local_bench: LocalBench) -> None:
    bench = local_bench
    for changes, message in (
        ({"session": {"script": "nowhere.py"}}, "script 'nowhere.py' is not in the code snapshot"),
        ({"session": {"working_dir": "/no/such/folder"}}, "working_dir '/no/such/folder' is not a folder"),
        ({"session": {"progress_regex": "step (\\d+"}}, "is no regular expression"),
        ({"session": {"progress_regex": "step"}}, "has no group"),
        ({"python": "/no/such/python"}, "python='/no/such/python' is not there"),
        ({"placement": (Slot("local0", 0), Slot("local0", 0))}, "placed twice"),
        ({"job_id": "../up"}, "cannot be a file name"),
    ):
        with pytest.raises(EngineError, match=message.replace("(", "\\(")):
            bench.engine.apply(bench.spec(**changes))
    assert bench.look() == {}


@pytest.mark.slow
def test_a_stop_in_the_middle_of_torchruns_start(local_bench: LocalBench) -> None:
    """Whatever moment it hits (import, rendezvous, first lines of the script), nobody is left and nothing failed."""
    bench = local_bench
    for generation, delay_s in enumerate((0.3, 0.8, 1.1, 1.3, 1.5, 1.7), start=1):
        bench.engine.apply(bench.spec(generation, workers=2, cleared_generation=generation - 1))
        begin_s = time.monotonic()
        bench.wait(lambda _, s=begin_s + delay_s: time.monotonic() > s, "the moment")
        bench.engine.stop("job", 20.0, "on second thoughts")
        assert bench.wait_state(generation, GangState.ENDED).outcome is GangOutcome.STOPPED
        assert bench.left_behind() == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["agent", "fork server", "supervisor"])
def test_whoever_is_killed_nobody_stays(local_bench: LocalBench, victim: str) -> None:
    """On two nodes: the workers of the other node go as well."""
    bench = local_bench
    slots = (Slot("local0", 0), Slot("local1", 1))
    bench.engine.apply(bench.spec(1, placement=slots))
    bench.wait_state(1, GangState.RUNNING)
    status = bench.folder(node=0).read_status()
    assert status is not None
    assert status.supervisor is not None
    (server,) = children_of(status.supervisor.pid)
    targets: dict[str, ProcessId] = {
        "agent": bench.worker_process(0, "agent"),
        "fork server": server,
        "supervisor": status.supervisor,
    }
    targets[victim].kill()
    ended = bench.wait_state(1, GangState.ENDED)
    assert ended.outcome is (GangOutcome.LOST if victim == "supervisor" else GangOutcome.FAILED)
    assert bench.left_behind() == []
    if victim != "supervisor":
        assert ended.failed_rank == 0
        assert "killed by SIGKILL" in (ended.failure or "")


def test_a_full_disk_changes_nothing(local_bench: LocalBench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = local_bench

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/the/disk/engine/job.json")

    with monkeypatch.context() as patch:
        patch.setattr("elasticflow_airflow.engines.local.files.records.write_json_atomic", full)
        with pytest.raises(EngineError, match=r"cannot write /the/disk/engine/job\.json: the disk is full: free some"):
            bench.engine.apply(bench.spec(1))
    assert bench.look() == {}
    bench.restart()
    assert bench.look() == {}


@pytest.mark.parametrize(("method", "state"), [("start_supervisors", "pending"), ("go", "starting")])
def test_a_crash_in_the_middle_of_apply_is_repaired(
    local_bench: LocalBench, monkeypatch: pytest.MonkeyPatch, method: str, state: str
) -> None:
    bench = local_bench
    spec = bench.spec(1, session={"steps": 5})

    class Killed(BaseException):
        pass

    def killed(*_: object) -> None:
        raise Killed

    starter = bench.engine._starter  # type: ignore[attr-defined]  # the crash is injected there
    monkeypatch.setattr(starter, method, killed)
    with pytest.raises(Killed):
        bench.engine.apply(spec)
    bench.restart()
    assert bench.look()[1].state == state
    bench.engine.apply(spec)
    bench.engine.apply(spec)
    assert bench.wait_state(1, GangState.ENDED).outcome is GangOutcome.FINISHED
    assert bench.kinds(1).count("started") == 1


@pytest.mark.slow
def test_a_new_incarnation_waits_for_the_old_one(local_bench: LocalBench) -> None:
    bench = local_bench
    old = bench.spec(1)
    bench.engine.apply(old)
    bench.wait_state(1, GangState.RUNNING)
    folder = old.incarnation_dir.parent / "i000002"
    session = replace(old.session, incarnation=2, incarnation_dir=str(folder), steps=5)
    new = bench.spec(2, incarnation=2)
    new = replace(new, session=session)
    bench.engine.apply(new)
    bench.wait_state(1, GangState.ENDED)
    plan = Membership.read(old.incarnation_dir)
    assert plan is not None
    assert plan.members == ()
    assert bench.kinds(1)[-1] == "stopped"
    bench.engine.apply(replace(new, cleared_generation=1))
    assert bench.wait_state(2, GangState.ENDED).outcome is GangOutcome.FINISHED
    assert bench.engine.read_log("job", 2, "g000002-r000", 0, 1000).data
    with pytest.raises(KeyError):
        bench.engine.read_log("job", 1, "g000002-r000", 0, 1000)


@pytest.mark.slow
@pytest.mark.parametrize("service", ["stays", "comes back"])
def test_the_old_generation_trains_on_until_the_new_one_is_warm(local_bench: LocalBench, service: str) -> None:
    bench = local_bench
    bench.engine.apply(bench.spec(1))
    bench.wait_state(1, GangState.RUNNING)
    second = bench.spec(2, workers=2)
    bench.engine.apply(second)
    supervisor = bench.folder(2)
    if service == "comes back":
        # As if it had been killed before it could start the supervisor.
        for child in children_of(os.getpid()):
            if b"g000002" in _command(child):
                child.kill()
        bench.restart()
    while not supervisor.warm.exists():
        bench.pass_time()
        bench.engine.observe()
        # Looked at before and after: it was not warm when the plan was read.
        plan = Membership.read(second.incarnation_dir)
        if not supervisor.warm.exists():
            assert plan is not None
            assert plan.generation == 1
        bench.engine.apply(second)
    assert supervisor.warming.exists(), "it said that the imports got on"
    gangs = bench.wait(lambda gangs: gangs[1].state is GangState.ENDED, "the old one leaves")
    assert gangs[1].outcome is GangOutcome.STOPPED
    assert gangs[2].state is GangState.PENDING
    bench.engine.stop("job", 1.0)
    assert bench.wait_state(2, GangState.ENDED).outcome is GangOutcome.STOPPED
    assert bench.left_behind() == []


def test_imports_that_get_on_are_waited_for_and_those_that_hang_are_not(
    local_bench: LocalBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine imports take minutes; what counts is whether they get on."""
    bench = local_bench
    monkeypatch.setattr(engine, "WARM_LIMIT_S", 0.2)
    bench.engine.apply(bench.spec(1))
    bench.wait_state(1, GangState.RUNNING)
    (bench.base / "hangs").mkdir()
    (bench.base / "hangs" / "sitecustomize.py").write_text("import time\ntime.sleep(600)\n")
    second = bench.spec(2, workers=2, env={"PYTHONPATH": str(bench.base / "hangs")})
    bench.engine.apply(second)
    folder = bench.folder(2)
    for stamp in range(1, 11):  # In the name of its supervisor: the imports got on since the last look.
        folder.warming.touch()
        os.utime(folder.warming, (stamp, stamp))
        bench.engine.apply(second)
        time.sleep(0.1)
        plan = Membership.read(second.incarnation_dir)
        assert plan is not None
        assert plan.generation == 1
    bench.wait(lambda gangs: gangs[1].state is GangState.ENDED, "the old one leaves")
    assert not folder.warm.exists()
    bench.engine.stop("job", 1.0)
    assert bench.wait_state(2, GangState.ENDED).outcome is GangOutcome.STOPPED


@pytest.mark.parametrize("victim", ["fork server", *slow("supervisor")])
def test_a_warm_up_that_is_killed_is_made_up_for(local_bench: LocalBench, victim: str) -> None:
    bench = local_bench
    first = bench.spec(1, session={"progress_regex": REGEX})  # Plain, so that nothing waits for anything warm.
    bench.engine.apply(first)
    second = bench.spec(2, session={"steps": 5})
    bench.engine.apply(second)

    def supervisors() -> list[ProcessId]:
        return [child for child in children_of(os.getpid()) if b"g000002" in _command(child)]

    bench.wait(lambda _: supervisors(), "its supervisor")
    (supervisor,) = supervisors()
    servers = bench.wait(lambda _: children_of(supervisor.pid), "the server") and children_of(supervisor.pid)
    (servers[0] if victim == "fork server" else supervisor).kill()

    def left(gangs: dict[int, GangObservation]) -> bool:
        bench.engine.apply(second)  # As the service does in every pass.
        return gangs[1].state is GangState.ENDED

    def taken(_: dict[int, GangObservation]) -> bool:
        try:
            bench.engine.apply(replace(second, cleared_generation=1))
        except EngineError:  # The old one has ended, and its supervisor is about to give the slot back.
            return False
        return True

    bench.wait(left, "the old one leaves")
    bench.wait(taken, "its slot")
    bench.engine.apply(replace(second, cleared_generation=1))
    ended = bench.wait_state(2, GangState.ENDED)
    if victim == "supervisor":
        assert ended.outcome is GangOutcome.FINISHED
    else:
        assert ended.outcome is GangOutcome.FAILED
        assert "killed by SIGKILL" in (ended.failure or "")


def _command(process: ProcessId) -> bytes:
    return Path(f"/proc/{process.pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_who_is_slower_on_a_slot_has_lost_its_workers_and_not_failed(local_bench, monkeypatch):
    """Two services look at a slot in the same moment, and both find it free."""
    bench = local_bench
    holder = {"job_id": "other", "state_dir": "/elsewhere", "pid": 7, "generation": 1}
    lock = slots.acquire(bench.base / "locks", "cpu-0", holder)
    monkeypatch.setattr(bench.engine._machines, "check_slots", lambda wanted: None)
    bench.engine.apply(bench.spec(1))
    gang = bench.wait_state(1, GangState.ENDED)
    assert gang.outcome is GangOutcome.LOST
    assert "slot cpu-0 is held by job other of the service in /elsewhere" in gang.failure
    os.close(lock)


def test_slots_that_are_held_from_a_state_that_was_lost_are_busy(local_bench):
    """Somebody has emptied the state directory, and left the processes."""
    bench = local_bench
    holder = {"job_id": "left", "state_dir": str(bench.engine._state_dir), "pid": 7, "generation": 3}
    lock = slots.acquire(bench.base / "locks", "cpu-1", holder)
    busy = bench.engine.inventory()[0].busy
    assert list(busy) == [1]
    assert "job left of the service in" in busy[1]
    assert "no record of it: it leaves by itself when its lease ends, or now with kill 7" in busy[1]
    with pytest.raises(SlotsHeldError, match="held by job left") as refused:
        bench.engine.apply(bench.spec(1, workers=2))
    assert list(refused.value.held) == [Slot(bench.nodes[0], 1)]
    os.close(lock)
    assert not bench.engine.inventory()[0].busy


@pytest.mark.slow
def test_a_generation_that_is_passed_over_while_it_warms_up_leaves_at_once(local_bench: LocalBench) -> None:
    """The one after it need not wait for anybody, so nothing else would tell it to leave before its lease ends."""
    bench = local_bench
    bench.engine.apply(bench.spec(1))
    bench.wait_state(1, GangState.RUNNING)
    bench.engine.apply(bench.spec(2, placement=(Slot(bench.nodes[0], 1),)))
    passed_over = bench.folder(2)
    bench.wait(lambda _: (passed_over.path / "supervisor.lock").exists(), "it warms up")
    bench.lose()
    bench.wait(lambda gangs: gangs[1].state is GangState.ENDED, "the first is lost")
    bench.engine.apply(bench.spec(3, cleared_generation=1))
    bench.wait_state(3, GangState.RUNNING)
    bench.wait(lambda _: not [line for line in bench.processes() if "g000002-" in line], "it has left")
