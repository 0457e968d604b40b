"""The parts of the local engine that need no training: processes, logs, slots, layout, environment, interpreters."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticflow_airflow.engines.local import LocalEngine, detect_nodes, observing
from elasticflow_airflow.engines.local.bridge import prepare_bridge
from elasticflow_airflow.engines.local.files import worker_logs
from elasticflow_airflow.engines.local.files.generation_folder import Status, WorkerStatus
from elasticflow_airflow.engines.local.files.records import GangRecord
from elasticflow_airflow.engines.local.gang_state import Heard, judge_ended
from elasticflow_airflow.engines.local.inherited_variables import worker_environment
from elasticflow_airflow.engines.local.machine import slots
from elasticflow_airflow.engines.local.machine.interpreter import InterpreterCheck
from elasticflow_airflow.engines.local.machine.layout import parse_virtual_nodes
from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.engines.local.workers.script_progress import PlainProgress
from elasticflow_airflow.engines.port import EngineError, GangOutcome
from elasticflow_airflow.runtime.protocol import read_reports
from elasticflow_airflow.scheduler_core.model.values import Slot

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def test_a_reused_pid_is_not_the_process_that_had_it() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        there = ProcessId.of(process.pid)
        assert there is not None
        assert there.is_alive()
        before = ProcessId(there.pid, there.start - 1, there.boot)
        assert not before.is_alive()
        before.kill()
        another_boot = ProcessId(there.pid, there.start, "another boot")
        assert not another_boot.is_alive()
        another_boot.kill()
        assert process.poll() is None
        there.kill()
        assert process.wait(10) == -9
    assert not there.is_alive()
    there.kill()


def test_a_pid_that_is_a_threads_number_by_now_kills_nobody() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        ProcessId(pid=thread.native_id, start=1, boot="of another process").kill()
    finally:
        over.set()
        thread.join()


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert ProcessId.of(process.pid) is None
    process.wait(10)


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=30),
    size=st.integers(4, 30),
    offset=st.one_of(st.integers(0, 300), st.just((1 << 62) - 1)),
)
def test_offsets_count_across_rotations(tmp_path_factory, pieces, size, offset) -> None:
    folder = tmp_path_factory.mktemp("logs")
    writer = worker_logs.LogWriter(folder, "w", segment_bytes=size, keep=3)
    for piece in pieces:
        writer.write(piece)
    writer.close()
    whole = b"".join(pieces)
    found = worker_logs.read(folder, "w", offset, 1000)
    assert found.at_end
    assert found.data == whole[found.start_offset :] or offset > len(whole)
    assert (
        found.start_offset == max(min(offset, len(whole)), worker_logs.segments(folder, "w")[0][0] if whole else 0)
        or not whole
    )
    assert len(worker_logs.segments(folder, "w")) <= 3
    assert len(whole) - found.start_offset <= 3 * size
    assert worker_logs.tail(folder, "w", 7) == whole[-7:]


def test_a_writer_goes_on_where_the_one_before_stopped(tmp_path: Path) -> None:
    for text in (b"first ", b"second ", b"third"):
        writer = worker_logs.LogWriter(tmp_path, "w", segment_bytes=8, keep=9)
        writer.write(text)
        writer.close()
    assert worker_logs.read(tmp_path, "w", 0, 100).data == b"first second third"
    assert (tmp_path / "w.log").read_bytes() == b"rd"


def test_a_full_disk_loses_lines_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = worker_logs.LogWriter(tmp_path, "w")
    writer.write(b"before\n")
    real = os.write

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    writer.write(b"lost\n")
    writer.write(b"lost\n")
    monkeypatch.setattr(os, "write", real)
    writer.write(b"after\n")
    writer.close()
    text = worker_logs.read(tmp_path, "w", 0, 1000).data
    assert text.startswith(b"before\n[elasticflow: ")
    assert b"disk was full" in text
    assert text.endswith(b"after\n")


def test_a_slot_has_one_holder(tmp_path: Path) -> None:
    holder = {"job_id": "j", "state_dir": "/a", "pid": 7}
    lock = slots.acquire(tmp_path, "cpu-0", holder)
    assert slots.holder_of(tmp_path, "cpu-0") == holder
    assert slots.holder_of(tmp_path, "cpu-1") is None
    with pytest.raises(slots.SlotHeldError, match="job j of the service in /a"):
        slots.acquire(tmp_path, "cpu-0", {})
    os.close(lock)
    assert slots.holder_of(tmp_path, "cpu-0") is None


def test_a_lock_folder_must_be_ours(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(OSError, match="not a folder of this user"):
        slots.prepare_lock_dir(tmp_path / "link")


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3, 4, 5, 6, 7})
    (node,) = detect_nodes(environ=NO_GPU)
    assert [slot.cores for slot in node.slots] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [slot.threads for slot in node.slots] == [2, 2, 2, 2]
    nodes = detect_nodes(virtual_nodes="4x4", environ=NO_GPU)
    assert [node.node_id for node in nodes] == ["local0", "local1", "local2", "local3"]
    assert nodes[3].slots[3].lock_name == "cpu-15"
    assert nodes[2].slots[1].cores == (1,)
    with pytest.raises(ValueError, match='for instance "4x2"'):
        parse_virtual_nodes("4 by 2")
    with pytest.raises(ValueError, match="contradicts"):
        detect_nodes(slots=3, virtual_nodes="2x2", environ=NO_GPU)
    with pytest.raises(ValueError, match="at least 1 slot"):
        detect_nodes(slots=0, environ=NO_GPU)


def test_the_environment_is_an_allow_list() -> None:
    environ = {"PATH": "/bin", "HF_HOME": "/hf", "HF_TOKEN": "x", "AWS_SECRET_ACCESS_KEY": "x", "AIRFLOW__A__B": "x"}
    env = worker_environment(environ, {"A": "1", "PYTHONPATH": "/mine"}, "/bridge")
    assert env["PATH"] == "/bin"
    assert env["HF_HOME"] == "/hf"
    assert env["A"] == "1"
    assert env["PYTHONPATH"] == "/bridge:/mine"
    assert not {"HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AIRFLOW__A__B"} & set(env)


def test_interpreters_are_checked(tmp_path: Path) -> None:
    check = InterpreterCheck()
    check.check(sys.executable, {})
    with pytest.raises(EngineError, match="is not there"):
        check.check(str(tmp_path / "nowhere"), {})
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    with pytest.raises(EngineError, match="chmod"):
        check.check(str(tmp_path / "plain"), {})
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(EngineError, match="has no torch"):
        check.check(str(bare), {})
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho what now >&2\nexit 9\n")
    broken.chmod(0o755)
    with pytest.raises(EngineError, match="what now"):
        check.check(str(broken), {})


def test_the_bridge_shows_runtime_and_entry_point_to_any_interpreter(tmp_path: Path) -> None:
    bridge = prepare_bridge(tmp_path)
    (bridge / "elasticflow_airflow-0.0.0.dist-info").mkdir()
    assert prepare_bridge(tmp_path) == bridge
    code = (
        "from importlib.metadata import entry_points\n"
        "import elasticflow_airflow.runtime.protocol, sys\n"
        "found = entry_points(group='torchrun.handlers')\n"
        "print([point.name for point in found], 'pydantic' in sys.modules)"
    )
    for flags in ([], ["-S"]):  # With the package installed, and without any site-packages.
        shown = subprocess.run(
            [sys.executable, *flags, "-c", code], env={"PYTHONPATH": str(bridge)}, capture_output=True, text=True
        )
        assert shown.stdout.strip() == "['elasticflow'] False", shown.stderr
    assert [path.name for path in bridge.glob("*.dist-info")] == [f"elasticflow_airflow-{_version()}.dist-info"]


def test_a_supervisor_imports_neither_torch_nor_numpy_nor_pydantic() -> None:
    code = (
        "import elasticflow_airflow.engines.local.workers.supervisor, sys\n"
        "print(sorted({'torch', 'numpy', 'pydantic', 'sqlalchemy', 'airflow'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout.strip() == "[]", shown.stderr


def test_a_state_directory_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineError, match=f"cannot write {tmp_path}/file"):
        LocalEngine(tmp_path / "file", detect_nodes(environ=NO_GPU), tmp_path / "locks")


@pytest.mark.parametrize(
    ("plain", "ends", "outcome"),
    [
        (True, [(0, False), (0, False)], GangOutcome.FINISHED),
        (True, [(0, False), (0, True)], GangOutcome.STOPPED),
        (True, [(0, False), (143, False)], GangOutcome.STOPPED),
        (True, [(0, False)], GangOutcome.STOPPED),
        (True, [], GangOutcome.STOPPED),
        (False, [(0, False), (0, False)], GangOutcome.STOPPED),
    ],
)
def test_a_plain_script_that_ends_before_anybody_signals_it_has_finished(plain, ends, outcome) -> None:
    """It was told to leave in its last second: one second is what it gets to end by itself."""
    slots_of_two = (Slot("node0", 0), Slot("node0", 1))
    gang = GangRecord(
        generation=1,
        incarnation=1,
        incarnation_dir="/nowhere",
        placement=slots_of_two,
        plain=plain,
        grace_s=10.0,
        started=True,
        told=True,
    )
    workers = {
        f"g000001-r{rank:03d}": WorkerStatus(rank=rank, exit_code=code, ended=True, signalled=signalled)
        for rank, (code, signalled) in enumerate(ends)
    }
    status = Status(workers=workers, told=True, ended=True)
    assert judge_ended(gang, {"node0": status}, [], Heard()).outcome is outcome


def test_progress_is_read_from_output_in_pieces(tmp_path: Path) -> None:
    progress = PlainProgress(
        report_file=tmp_path / "r", generation=1, worker_id="w", regex=r"step (?P<step>\d+)/9(?: loss=(?P<loss>\S+))?"
    )
    progress.feed(b"hello\nstep 1/9 los")
    progress.poll(last=True)
    progress.feed(b"step 2/9 loss=0.5\rstep 3/9 loss=oops\n")
    progress.feed(b"step 4/9 loss=0.25")
    progress.poll(last=True)
    found = [
        (report.kind.value, report.step, dict(report.data).get("loss")) for report, _ in read_reports(tmp_path / "r")
    ]
    assert [kind for kind, _, _ in found] == ["progress", "warning", "progress"]
    assert found[-1][1:] == (4, 0.25)


def test_progress_is_read_from_a_file(tmp_path: Path) -> None:
    shown = tmp_path / "progress.json"
    progress = PlainProgress(report_file=tmp_path / "r", generation=1, worker_id="w", file=shown)
    progress.poll(last=True)
    shown.write_text("7")
    progress.poll(last=True)
    shown.write_text('{"step": 8, "loss": 1.5}')
    os.utime(shown, ns=(1, 1))
    progress.poll(last=True)
    found = [(report.step, dict(report.data).get("loss")) for report, _ in read_reports(tmp_path / "r")]
    assert found == [(7, None), (8, 1.5)]


def _version() -> str:
    import elasticflow_airflow

    return elasticflow_airflow.__version__


def test_a_start_is_given_up_when_nobody_starts_it_for_long_not_when_it_takes_long(monkeypatch) -> None:
    now_s, coming = [0.0], [False]
    monkeypatch.setattr(observing.time, "monotonic", lambda: now_s[0])
    machines = SimpleNamespace(is_coming_up=lambda _folder: coming[0])
    observer = observing.Observer(machines, lambda _job: None)
    job, gang = SimpleNamespace(job_id="job"), SimpleNamespace(generation=1, folders={"node0": None})
    found = []
    for at_s, is_coming in ((0, False), (5, True), (40, False), (60, False), (71, False)):
        now_s[0], coming[0] = float(at_s), is_coming
        found.append(observer._never_comes(job, gang, "node0", {"node0": None}))
    assert found == [False, False, False, False, True]
