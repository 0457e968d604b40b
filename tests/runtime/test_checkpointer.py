"""Saving in the background: training pays for a copy; what happens to writer or trainer is told, or mended."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from elasticflow_airflow.runtime.checkpoints import checkpoint, checkpointer
from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
from elasticflow_airflow.runtime.checkpoints.checkpointer import Checkpointer
from elasticflow_airflow.runtime.stores.manifest import CheckpointError, list_candidates, promoted, verify_candidate
from elasticflow_airflow.runtime.stores.store import Part

LIMIT_S = 60.0


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.01)


def wait_for_end(pid: int) -> None:
    """Of a process that need not be our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], LIMIT_S)[0], f"process {pid} still lives"
    finally:
        os.close(descriptor)


def trained(width: int = 64) -> Registered:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, width)).sum().backward()
    optimizer.step()
    return Registered(model, {"optimizer": optimizer})


@pytest.fixture
def checkpointers(tmp_path: Path) -> Iterator[Callable[..., Checkpointer]]:
    made: list[Checkpointer] = []

    def make(**options: object) -> Checkpointer:
        made.append(Checkpointer(tmp_path / "checkpoints", incarnation=1, **options))
        return made[-1]

    yield make
    pids = [one.writer_pid for one in made]
    for one in made:
        one.close()
    for pid in pids:
        assert pid is None or not Path(f"/proc/{pid}").exists()


def save(saver: Checkpointer, registered: Registered, step: int, **options: object):
    return saver.save(registered, generation=1, step=step, metadata={"step": step}, **options)


def begin(saver: Checkpointer, registered: Registered) -> int:
    """The first step is saved; returns the writer's pid."""
    save(saver, registered, 1)
    assert [saved.step for saved in saver.flush()] == [1]
    assert saver.writer_pid is not None
    return saver.writer_pid


@contextlib.contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    """The writer, made infinitely slow."""
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def weight_in(path: Path) -> torch.Tensor:
    return checkpoint.read_weights(path)["0.weight"]


def test_the_state_of_the_moment_is_saved_while_training_goes_on(checkpointers, tmp_path):
    saver, registered = checkpointers(), trained()
    saver.prepare(registered)
    begin(saver, registered)
    then = registered.model[0].weight.detach().clone()
    with stopped(saver.writer_pid):
        assert save(saver, registered, 2) is None
        assert saver.is_busy
        with torch.no_grad():
            registered.model[0].weight.zero_()
        assert saver.poll() == []
    (saved,) = saver.flush()
    assert (saved.step, saved.name) == (2, "g000001/step-000000000002")
    info = verify_candidate(tmp_path / "checkpoints" / saved.name)
    assert (info.digest, info.size_bytes, info.metadata) == (saved.digest, saved.size_bytes, {"step": 2})
    assert torch.equal(weight_in(info.path), then)
    assert saved.stall_s < saved.write_s + LIMIT_S
    again = trained()
    checkpoint.load(again, info)
    assert str(again.others["optimizer"].state_dict()) == str(registered.others["optimizer"].state_dict())
    assert not saver.is_busy
    assert saver.flush() == []


def test_a_background_save_holds_the_same_bytes_as_a_direct_one(checkpointers, tmp_path):
    registered = trained()
    saver = checkpointers()
    save(saver, registered, 1)
    (saved,) = saver.flush()
    direct = checkpoint.save(registered, tmp_path / "d", incarnation=1, generation=1, step=1, metadata={"step": 1})
    for name in ("model.tensors", "training.tensors"):
        assert (tmp_path / "checkpoints" / saved.name / name).read_bytes() == (direct.path / name).read_bytes()


def test_a_periodic_save_is_skipped_while_one_is_being_written(checkpointers):
    saver, registered = checkpointers(buffers=1), trained()
    begin(saver, registered)
    with stopped(saver.writer_pid):
        save(saver, registered, 2)
        save(saver, registered, 3)
        assert saver.skipped == 1
    assert [saved.step for saved in saver.flush()] == [2]


def test_two_copies_may_be_in_flight(checkpointers):
    saver, registered = checkpointers(buffers=2), trained()
    saver.prepare(registered)
    begin(saver, registered)
    with stopped(saver.writer_pid):
        for step in (2, 3, 4):
            save(saver, registered, step)
    assert saver.skipped == 1
    assert [saved.step for saved in saver.flush()] == [2, 3]


def test_a_save_that_must_be_on_disk_waits_for_the_one_before(checkpointers, tmp_path):
    saver, registered = checkpointers(buffers=1, promotes=True), trained()
    pid = begin(saver, registered)
    os.kill(pid, signal.SIGSTOP)
    save(saver, registered, 2)
    going_on = threading.Timer(0.2, os.kill, (pid, signal.SIGCONT))
    going_on.start()
    saved = save(saver, registered, 3, wait=True)
    going_on.join()
    assert saved.step == 3
    assert [one.step for one in saver.poll()] == [2]
    assert promoted(tmp_path / "checkpoints", pytest.fail).step == 3


def test_alone_the_writer_promotes_and_keeps_the_newest(checkpointers, tmp_path):
    saver, registered = checkpointers(promotes=True, keep=2), trained()
    for step in (1, 2, 3):
        save(saver, registered, step, wait=True)
    assert [path.name for path in list_candidates(tmp_path / "checkpoints")] == [f"step-{n:012d}" for n in (2, 3)]
    assert promoted(tmp_path / "checkpoints", pytest.fail).step == 3


def test_the_writer_is_a_small_process_of_low_priority(checkpointers):
    saver, registered = checkpointers(), trained()
    begin(saver, registered)
    assert os.getpriority(os.PRIO_PROCESS, saver.writer_pid) == 19
    assert "libtorch" not in Path(f"/proc/{saver.writer_pid}/maps").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_what_tells_a_trainer_to_leave_does_not_end_the_writer(checkpointers, number):
    saver, registered = checkpointers(), trained()
    begin(saver, registered)
    os.kill(saver.writer_pid, number)
    save(saver, registered, 2)
    assert [saved.step for saved in saver.flush()] == [2]


def test_a_state_may_grow(checkpointers, tmp_path):
    saver = checkpointers(buffers=1)
    for step, width in enumerate((4, 64, 512, 4), start=1):
        registered = trained(width)
        save(saver, registered, step)
        (saved,) = saver.flush()
        assert torch.equal(weight_in(tmp_path / "checkpoints" / saved.name), registered.model[0].weight)


def test_a_description_may_grow(checkpointers, tmp_path):
    class History:
        events: list[str] = []  # noqa: RUF012

        def state_dict(self):
            return {"events": self.events}

        def load_state_dict(self, state):
            self.events = state["events"]

    saver, history = checkpointers(buffers=1), History()
    registered = Registered(nn.Linear(1, 1), {"history": history})
    begin(saver, registered)
    history.events = ["x" * 100] * 10_000
    save(saver, registered, 2)
    (saved,) = saver.flush()
    history.events = []
    checkpoint.load(registered, verify_candidate(tmp_path / "checkpoints" / saved.name))
    assert len(history.events) == 10_000


# -- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_writer_that_is_killed_is_told_of_and_replaced(checkpointers, tmp_path):
    saver, registered = checkpointers(promotes=True), trained()
    pid = begin(saver, registered)
    os.kill(pid, signal.SIGSTOP)
    save(saver, registered, 2)
    os.kill(pid, signal.SIGKILL)
    assert saver.flush() == []
    (warning,) = saver.take_warnings()
    assert "has ended (status -9): the checkpoint of step 2 is not there; those before stay valid" in warning
    assert saver.take_warnings() == []
    assert promoted(tmp_path / "checkpoints", pytest.fail).step == 1
    assert save(saver, registered, 3, wait=True).step == 3
    assert saver.writer_pid != pid


def test_a_writer_that_is_killed_while_idle(checkpointers):
    saver, registered = checkpointers(), trained()
    begin(saver, registered)
    os.kill(saver.writer_pid, signal.SIGKILL)
    wait_for_end(saver.writer_pid)
    save(saver, registered, 2)
    assert [saved.step for saved in saver.flush()] == [2]
    assert saver.take_warnings() == []  # nothing was lost


def test_a_writer_that_hangs_is_told_of_and_replaced(checkpointers, tmp_path, monkeypatch):
    """Training goes on, and checkpoints are written again; a limit that was too short for slow storage doubles."""
    monkeypatch.setattr(checkpointer, "WRITE_LIMIT_S", 0.5)
    saver, registered = checkpointers(promotes=True), trained()
    pid = begin(saver, registered)
    os.kill(pid, signal.SIGSTOP)
    save(saver, registered, 2)
    until(lambda: saver.poll() == [] and not saver.is_busy, "the writer is given up")
    (warning,) = saver.take_warnings()
    assert re.search(r"hangs for \d+ s: the checkpoint of step 2 is not there; those before stay valid", warning)
    save(saver, registered, 3)
    assert [saved.step for saved in saver.flush()] == [3]
    assert promoted(tmp_path / "checkpoints", pytest.fail).step == 3
    wait_for_end(pid)

    os.kill(saver.writer_pid, signal.SIGSTOP)
    began = time.monotonic()
    save(saver, registered, 4)
    assert save(saver, registered, 5, wait=True).step == 5
    assert time.monotonic() - began >= 1.0
    assert "step 4 is not there" in saver.take_warnings()[0]


def test_the_part_of_a_writer_that_hangs_ends_the_training(checkpointers, monkeypatch):
    """The other workers wait for it."""
    saver, registered = checkpointers(), trained()
    os.kill(begin(saver, registered), signal.SIGSTOP)
    monkeypatch.setattr(checkpointer, "WRITE_LIMIT_S", 0.3)
    monkeypatch.setattr(checkpointer, "PART_LIMIT_S", 0.2)
    save(saver, registered, 2, part=Part(rank=1, size=2, token="a" * 12, sweeps=True))
    with pytest.raises(CheckpointError, match="the checkpoint of step 2 is not there"):
        saver.flush()


def test_what_must_be_on_disk_needs_no_writer(checkpointers, tmp_path):
    """Neither one that was never started, nor one that has died with the save before."""
    saver, registered = checkpointers(promotes=True), trained()
    assert save(saver, registered, 1, wait=True).step == 1
    assert saver.writer_pid is None
    save(saver, registered, 2)
    os.kill(saver.writer_pid, signal.SIGKILL)
    assert save(saver, registered, 3, wait=True).step == 3
    assert promoted(tmp_path / "checkpoints", pytest.fail).step == 3


def test_writers_that_were_dropped_leave_nothing_behind(checkpointers):
    saver, registered = checkpointers(), trained()

    def left() -> tuple[int, int]:
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
        return len(children), len(os.listdir("/proc/self/fd"))

    counts = []
    for step in range(1, 6):
        saver.save(registered, generation=step, step=step, metadata={})
        os.kill(saver.writer_pid, signal.SIGSTOP)  # so that it is writing when it is dropped
        counts.append(left())
        pid = saver.writer_pid
        saver.drop()
        wait_for_end(pid)
    assert counts[-1] <= counts[1], counts


def test_what_nobody_would_look_at_is_dropped(checkpointers, tmp_path):
    saver, registered = checkpointers(), trained()
    os.kill(begin(saver, registered), signal.SIGSTOP)
    save(saver, registered, 2)
    saver.drop()
    assert not saver.is_busy
    save(saver, registered, 3)
    assert [saved.step for saved in saver.flush()] == [3]
    assert [path.name[-1] for path in list_candidates(tmp_path / "checkpoints")] == ["1", "3"]


def test_a_full_disk_is_told_at_the_next_boundary(checkpointers, tmp_path):
    """A limit on the size of files stands in for a full disk: the kernel refuses the write in the same place."""
    saver, registered = checkpointers(promotes=True), trained(512)
    begin(saver, registered)
    _, hard = resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE)
    resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE, (100_000, hard))
    save(saver, registered, 2)
    with pytest.raises(
        CheckpointError, match=r"step 2 could not be written below .*checkpoints: File too large\. Free space there"
    ):
        saver.flush()
    resource.prlimit(saver.writer_pid, resource.RLIMIT_FSIZE, (hard, hard))
    assert promoted(tmp_path / "checkpoints", pytest.fail).step == 1
    assert not list((tmp_path / "checkpoints").glob("*/.writing-*"))
    assert save(saver, registered, 3, wait=True).step == 3


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    saver = Checkpointer(tmp_path / "file" / "checkpoints", incarnation=1)
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint below .*Not a directory"):
        save(saver, trained(), 1, wait=True)
    save(saver, trained(), 1)
    with pytest.raises(CheckpointError, match=r"cannot write a checkpoint below .*Not a directory"):
        saver.flush()
    saver.close()


def test_what_cannot_be_saved_is_refused_at_once(checkpointers):
    saver, registered = checkpointers(), trained()
    with pytest.raises(CheckpointError, match="metadata that JSON cannot hold"):
        saver.save(registered, generation=1, step=1, metadata={"x": object()}, wait=True)
    with pytest.raises(CheckpointError, match="metadata that JSON cannot hold"):
        saver.save(registered, generation=1, step=1, metadata={"x": float("nan")})
    registered.others["optimizer"].param_groups[0]["mine"] = object()
    with pytest.raises(CheckpointError, match="at training/optimizer/param_groups/0/mine is a object"):
        save(saver, registered, 2)


def test_without_memory_for_a_copy_it_writes_at_once(checkpointers, monkeypatch, tmp_path):
    monkeypatch.setattr(checkpointer, "available_bytes", lambda: 1000)
    saver, registered = checkpointers(promotes=True), trained()
    saved = save(saver, registered, 1)
    assert saved.step == 1
    assert not saver.in_background
    assert promoted(tmp_path / "checkpoints", pytest.fail).digest == saved.digest


def test_prepared_memory_is_had_before_the_first_save(checkpointers):
    saver, registered = checkpointers(buffers=1), trained(512)
    saver.prepare(registered)
    saver.prepare(registered)
    saver._preparing.join()
    (buffer,) = saver._buffers
    assert os.fstat(buffer.descriptor).st_blocks * 512 == buffer.size_bytes
    begin(saver, registered)
    assert saver._buffers == [buffer]


TRAINER = textwrap.dedent("""
    import os, signal, sys, threading, time
    from pathlib import Path
    import torch
    from torch import nn
    from elasticflow_airflow.runtime.checkpoints.checkpoint import Registered
    from elasticflow_airflow.runtime.checkpoints.checkpointer import Checkpointer
    folder, how = Path(sys.argv[1]), sys.argv[2]
    registered = Registered(nn.Linear(2000, 500))
    saver = Checkpointer(folder, incarnation=1, promotes=True)
    save = lambda step, **more: saver.save(registered, generation=1, step=step, metadata={}, **more)
    if how == "from a thread":
        thread = threading.Thread(target=save, args=(1,))
        thread.start()
        thread.join()
    saver.flush()
    save(2)
    saver.flush()
    child = 0
    if how == "with a fork":
        child = os.fork()
        if child == 0:
            saver.close()
            signal.pause()
    if how == "writer stopped":
        os.kill(saver.writer_pid, signal.SIGSTOP)
    save(3)
    print(saver.writer_pid, child, flush=True)
    if how == "by itself":
        sys.exit(0)
    step = 3
    while True:
        step += 1
        save(step)
        saver.poll()
        time.sleep(0.001)
""")


@pytest.mark.parametrize("how", ["plain", "with a fork", "from a thread", "writer stopped", "by itself"])
def test_the_writer_ends_with_its_trainer(tmp_path, how):
    trainer = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(tmp_path), how], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    child = 0
    with trainer:
        try:
            writer, child = map(int, trainer.stdout.readline().split())
            if how != "by itself":
                trainer.kill()
            trainer.wait(LIMIT_S)
            wait_for_end(writer)
        finally:
            trainer.kill()
            if child:
                os.kill(child, signal.SIGKILL)
    found = promoted(tmp_path, pytest.fail)
    assert found.step >= 2


@pytest.mark.slow
def test_kills_at_any_moment_leave_a_valid_checkpoint(tmp_path):
    """Trainer or writer, while saves follow each other without a pause."""
    chaos = random.Random(4)
    newest = -1
    for attempt in range(60):
        if attempt >= 9 and newest > 3:  # a busy machine saves less often in half a second
            break
        trainer = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(tmp_path), "plain"], stdout=subprocess.PIPE, text=True
        )
        with trainer:
            try:
                writer = int(trainer.stdout.readline().split()[0])
                time.sleep(chaos.uniform(0, 0.5))  # the moment is what chance is for
                if attempt % 3 == 0:  # The trainer goes on with another writer.
                    os.kill(writer, signal.SIGKILL)
                    time.sleep(0.3)
                trainer.kill()
                trainer.wait(LIMIT_S)
                wait_for_end(writer)
            finally:
                trainer.kill()
        found = promoted(tmp_path, pytest.fail)
        assert found is not None or newest < 0
        newest = max(newest, -1 if found is None else found.step)
    assert newest > 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_snapshots_of_a_gpu_are_copied_into_pinned_memory(checkpointers, tmp_path):
    registered = trained()
    registered.model.cuda()
    optimizer = torch.optim.AdamW(registered.model.parameters())
    registered.model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    registered = Registered(registered.model, {"optimizer": optimizer})
    saver = checkpointers()
    saver.prepare(registered)
    save(saver, registered, 1)
    (saved,) = saver.flush()
    assert all(buffer.is_pinned for buffer in saver._buffers)
    assert torch.equal(weight_in(tmp_path / "checkpoints" / saved.name), registered.model[0].weight.cpu())
