"""Whatever a script makes of the files of its job: the others are observed as ever, and it can still be ended."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.cases import slow

from elasticflow_airflow.engines.local.files import worker_logs
from elasticflow_airflow.engines.port import EngineError, GangState
from elasticflow_airflow.runtime.protocol import read_json, read_some_reports
from elasticflow_airflow.runtime.stores.manifest import CheckpointError, verify_candidate
from elasticflow_airflow.scheduler_core.model.values import Slot

if TYPE_CHECKING:
    from conftest import LocalBench

pytestmark = pytest.mark.trouble

SLEEPS = "import time\nprint('step 1', flush=True)\ntime.sleep(3600)\n"


def make(path: Path, what: str) -> None:
    """Put something else where a file or folder is."""
    if os.path.lexists(path.parent) and not path.parent.is_dir():
        path.parent.unlink()
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "loop":
        path.symlink_to(path.name)
    elif what == "device":
        path.symlink_to("/dev/zero")
    elif what == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 30)
    else:
        path.write_text(what)


ODD = ["folder", "pipe", "loop", "device", "huge", "", "{}", "[]", '{"workers": 3}', '{"supervisor": {"pid": "x"}}']
"""What may stand where a file should."""


@pytest.mark.parametrize("what", ["folder", "pipe", "device", "huge", "loop"])
def test_no_file_of_a_script_keeps_whoever_reads_it(tmp_path: Path, what: str) -> None:
    path = tmp_path / "odd"
    make(path, what)
    with pytest.raises((OSError, ValueError)):
        read_json(path)
    if what == "huge":
        reports, offset = read_some_reports(path)
        assert (reports, offset) == ([], 1 << 24), "it reads on from there the next time"
    else:
        with pytest.raises((OSError, ValueError)):
            read_some_reports(path)
    make(tmp_path / "step" / "manifest.json", what)
    with pytest.raises(CheckpointError):
        verify_candidate(tmp_path / "step")
    make(tmp_path / "logs" / "w.log.000000000000", what)
    assert len(worker_logs.read(tmp_path / "logs", "w", 0, 1000).data) <= 1000
    assert len(worker_logs.tail(tmp_path / "logs", "w", 1000)) <= 1000


def test_gaps_and_strange_names_among_the_segments_of_a_log_are_passed_over(tmp_path: Path) -> None:
    for name in ("w.log.²", "w.log." + "9" * 200, "w.log.-1", "w.log.000000000005"):
        (tmp_path / name).write_bytes(b"later")
    (tmp_path / "w.log.000000000020").write_bytes(b"even later")
    assert worker_logs.read(tmp_path, "w", 0, 100).data == b"later"
    assert worker_logs.read(tmp_path, "w", 10, 100).data == b"even later"


@pytest.fixture
def running(local_bench: LocalBench) -> LocalBench:
    """Two plain jobs that train on a node each."""
    (local_bench.base / "code" / "train.py").write_text(SLEEPS)
    for number, job_id in enumerate(("job", "other")):
        place = (Slot(local_bench.nodes[number], 0),)
        local_bench.engine.apply(
            local_bench.spec(job_id=job_id, placement=place, session={"progress_regex": r"step (\d+)"}, grace_s=0.5)
        )
    local_bench.wait_state(1, GangState.RUNNING)
    local_bench.wait_state(1, GangState.RUNNING, "other")
    return local_bench


WRITTEN = [
    *("status", "trainer", "exit", "order", "kill", "lease", "warm"),
    *("reports", "report", "log", "logs", "membership"),
]


def place_of(bench: LocalBench, name: str) -> Path:
    """A file or folder of the first job."""
    folder = bench.folder().path
    incarnation = folder.parents[1]
    worker = "g000001-r000"
    return {
        "status": folder / "status.json",
        "trainer": folder / f"{worker}.trainer.json",
        "exit": folder / f"{worker}.exit.json",
        "order": folder / "order.json",
        "kill": folder / "kill.json",
        "lease": folder / "lease",
        "warm": folder / "warm",
        "reports": incarnation / "reports",
        "report": incarnation / "reports" / f"g000001-{worker}.jsonl",
        "logs": incarnation / "logs",
        "log": incarnation / "logs" / f"{worker}.log.000000000000",
        "membership": incarnation / "membership.json",
    }[name]


@pytest.mark.slow
@settings(
    max_examples=25,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    st.lists(st.tuples(st.sampled_from(WRITTEN), st.sampled_from(ODD)), min_size=1, max_size=4),
    st.booleans(),
)
def test_others_are_observed_whatever_a_script_makes_of_its_files(
    running: LocalBench, spoilt: list[tuple[str, str]], restarts: bool
) -> None:
    for name, what in spoilt:
        make(place_of(running, name), what)
    if restarts:
        running.restart()
    for _ in range(2):
        seen = {gang.job_id: gang for gang in running.engine.observe()}
        assert seen["other"].state in (GangState.RUNNING, GangState.STARTING)  # a new engine waits for its first word
        assert seen["other"].trouble is None
        if seen["job"].trouble is not None:
            assert [worker.slot for worker in seen["job"].workers] == [Slot(running.nodes[0], 0)]
    running.engine.renew("other")
    for call in (
        lambda: running.engine.renew("job"),
        lambda: running.engine.stacks("job"),
        lambda: running.engine.read_log("job", 1, "g000001-r000", 0, 1000),
        running.engine.inventory,
    ):
        try:
            call()
        except (EngineError, KeyError):
            continue


@pytest.mark.parametrize("name", ["status", *slow("order", "membership", "reports")])
def test_a_job_that_has_spoilt_its_files_can_be_stopped(running: LocalBench, name: str) -> None:
    make(place_of(running, name), "folder")
    running.wait(lambda _: _stop(running) or not running.engine._machines.held_by("job"), "its supervisor leaves")  # type: ignore[attr-defined]
    running.wait(lambda gangs: gangs[1].state is GangState.ENDED, "its end is seen")
    assert running.look("other")[1].state is GangState.RUNNING


def _stop(bench: LocalBench) -> None:
    try:
        bench.engine.stop("job", 0.5, "cancelled")
    except EngineError:
        return


@pytest.mark.parametrize("text", ["", *slow("{", "[]", '{"job_id": 3}', json.dumps({"job_id": "job", "gangs": [3]}))])
def test_a_record_that_cannot_be_read_is_the_trouble_of_its_job_alone(running: LocalBench, text: str) -> None:
    record = running.base / "state" / "engine" / "job.json"
    record.write_text(text)
    running.restart()
    gang = running.look()[1]
    assert "job.json cannot be read" in str(gang.trouble)
    assert (gang.state, gang.incarnation) == (GangState.RUNNING, 1)
    assert [worker.slot for worker in gang.workers] == [Slot(running.nodes[0], 0)]
    assert running.engine.latest("job") == 1
    assert running.engine.inventory()[0].busy == {}
    lease = running.folder().lease
    before = lease.stat().st_mtime_ns
    running.engine.renew("job")
    assert lease.stat().st_mtime_ns > before
    with pytest.raises(EngineError, match="cannot be read"):
        running.engine.apply(running.spec(2))
    running.engine.stop("job", 0.5, "cancelled")
    running.wait(lambda gangs: not gangs, "it leaves")
    running.engine.forget("job")
    assert not record.exists()
    assert running.look("other")[1].state in (GangState.RUNNING, GangState.STARTING)
