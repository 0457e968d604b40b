"""Reports: what a worker says comes out as it was said, whole lines only, and never as broken JSON."""

from __future__ import annotations

import json
import math
import resource
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticflow_airflow.runtime import reporting
from elasticflow_airflow.runtime.protocol import (
    Member,
    Membership,
    Report,
    ReportKind,
    RescaleMode,
    append_report,
    membership_path,
    read_json,
    read_reports,
    report_path,
)
from elasticflow_airflow.runtime.reporting import (
    PROGRESS_INTERVAL_S,
    STEADY_INTERVAL_S,
    ConsoleReporter,
    FileReporter,
    Speedometer,
    plain,
)
from elasticflow_airflow.runtime.session_steps import last_words


def report(step: int = 1, **data) -> Report:
    return Report(kind=ReportKind.PROGRESS, generation=2, worker_id="w0", rank=0, step=step, data=data)


def test_what_is_appended_is_read_from_any_offset(tmp_path):
    path = report_path(tmp_path, 2, "w0")
    assert list(read_reports(path)) == []
    written = [report(step, loss=step / 3) for step in range(4)]
    for one in written:
        append_report(path, one)
    found = list(read_reports(path))
    assert [one for one, _ in found] == written
    assert [one for one, _ in read_reports(path, found[1][1])] == written[2:]
    assert found[-1][1] == path.stat().st_size


@pytest.mark.parametrize("size", [10, 200_000])
def test_the_last_report_is_found_however_long_it_is(tmp_path, size):
    path = tmp_path / "reports.jsonl"
    for step in range(3):
        append_report(path, report(step))
    append_report(path, report(7, metrics={"text": "x" * size}))
    assert last_words(path)[-1].step == 7


def test_a_torn_last_line_is_left_until_it_is_whole(tmp_path):
    path = tmp_path / "reports.jsonl"
    append_report(path, report(1))
    line = report(2).to_line()
    with path.open("ab") as file:
        file.write(line[:-7])
    ((_, offset),) = read_reports(path)
    with path.open("ab") as file:
        file.write(line[-7:])
    assert [one.step for one, _ in read_reports(path, offset)] == [2]


@pytest.mark.parametrize("damage", [b"\n", b"{}\n", b"null\n", b"\xff\xfe\n", b'{"kind": "dance"}\n', b"[1]\n"])
def test_a_damaged_line_in_the_middle_is_skipped(tmp_path, damage):
    path = tmp_path / "reports.jsonl"
    path.write_bytes(report(1).to_line() + damage + report(2).to_line())
    assert [one.step for one, _ in read_reports(path)] == [1, 2]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(values)
def test_plain_values_are_json_and_stay_what_they_are(value):
    made = plain(value)
    assert plain(json.loads(json.dumps(made, allow_nan=False))) == made
    assert Report.from_line(report(value=made).to_line()).data == {"value": made}


def test_plain_turns_tensors_and_the_unknown_into_what_json_knows():
    assert plain({"t": torch.tensor([1, 2]), 3: (torch.tensor(0.5), float("inf"))}) == {"t": [1, 2], "3": [0.5, "inf"]}
    assert plain(OrderedDict(a=torch.tensor(float("nan")))) == {"a": "nan"}
    assert plain(ReportKind.STARTED) == "started"
    assert plain({1}) == "{1}"


def test_a_file_reporter_says_who_and_where(tmp_path):
    FileReporter(tmp_path, 7, "w3").say(ReportKind.PROGRESS, 3, 120, loss=torch.tensor(0.25))
    ((found, _),) = read_reports(report_path(tmp_path, 7, "w3"))
    assert (found.generation, found.worker_id, found.rank, found.step, found.data) == (7, "w3", 3, 120, {"loss": 0.25})


def test_the_console_shows_rank_0_and_every_failure(capsys):
    console = ConsoleReporter()
    console.say(ReportKind.PROGRESS, 0, 5, loss=0.123456789, path=None)
    console.say(ReportKind.PROGRESS, 1, 5, loss=0.1)
    console.say(ReportKind.FAILED, 1, 5, message="no")
    captured = capsys.readouterr()
    assert captured.out == "elasticflow: progress step=5 loss=0.12346\n"
    assert captured.err == "elasticflow: failed step=5 message=no\n"


def test_the_speedometer_leaves_saving_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("elasticflow_airflow.runtime.reporting.time.perf_counter", lambda: now[0])
    meter = Speedometer(lambda: 10.0)
    for _ in range(3):
        now[0] += 2.0
        meter.step_done()
    now[0] += 5.0
    meter.leave_out()
    assert meter.due
    now[0] += 2.0
    meter.step_done()
    assert meter.take() == (4, 8.0)
    assert not meter.due
    assert meter.take() == (0, 0.0)


def test_reports_become_rarer_with_the_age_of_a_generation(monkeypatch, tmp_path):
    now = [100.0]
    monkeypatch.setattr("elasticflow_airflow.runtime.reporting.time.monotonic", lambda: now[0])
    reporter = FileReporter(tmp_path, 1, "w0")
    assert reporter.interval_s == PROGRESS_INTERVAL_S
    now[0] += 60.0
    assert reporter.interval_s == 1.0
    now[0] += 3600.0
    assert reporter.interval_s == STEADY_INTERVAL_S
    reporter.adopt(2)  # another size, which is to be measured soon
    assert reporter.interval_s == PROGRESS_INTERVAL_S


def test_a_plan_comes_through_its_file_and_knows_ranks(tmp_path):
    assert Membership.read(tmp_path) is None
    members = tuple(Member(worker_id=f"w{i}", rank=1 - i, node_id="n", slot_index=i) for i in range(2))
    plan = Membership(generation=4, mode=RescaleMode.IN_PLACE, members=members, reason="more slots")
    plan.write(tmp_path)
    assert Membership.read(tmp_path) == plan
    assert [plan.rank_of(worker) for worker in ("w0", "w1", "w2")] == [1, 0, None]


def test_a_damaged_plan_is_an_error(tmp_path):
    membership_path(tmp_path).write_text("[]")
    with pytest.raises(ValueError, match=r"membership\.json does not hold a JSON object"):
        read_json(membership_path(tmp_path))


def test_a_report_for_which_the_disk_had_half_the_room_spoils_no_other(tmp_path):
    path = tmp_path / "reports" / "g000001-a.jsonl"
    append_report(path, report(1))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, hard))  # what a full disk does to a write
    try:
        with pytest.raises(OSError, match="took only 10"):
            append_report(path, report(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    append_report(path, replace(report(3), kind=ReportKind.FINISHED))
    assert [found.step for found, _ in read_reports(path)] == [1, 3]


class FullDisk:
    """Stands for ``append_report``: takes nothing for some time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: float) -> None:
        self.failures, self.tried, self.real = failures, 0, reporting.append_report
        monkeypatch.setattr(reporting, "append_report", self)
        monkeypatch.setattr(reporting, "_FIRST_PAUSE_S", 0.0)

    def __call__(self, path: Path, one: Report) -> None:
        self.tried += 1
        if self.tried <= self.failures:
            raise OSError(28, "No space left on device")
        self.real(path, one)


@pytest.mark.parametrize("kind", [ReportKind.STARTED, ReportKind.FINISHED])
def test_what_the_service_must_know_is_said_again_until_the_disk_takes_it(tmp_path, monkeypatch, capfd, kind):
    disk = FullDisk(monkeypatch, failures=3)
    FileReporter(tmp_path, 2, "w0").say(kind, 0, 9, path="g000002/step-000000000009")
    ((found, _),) = read_reports(report_path(tmp_path, 2, "w0"))
    assert (found.kind, found.step, disk.tried) == (kind, 9, 4)
    assert "No space left on device: tries again" in capfd.readouterr().err


def test_who_cannot_say_that_it_has_finished_leaves_with_a_status_that_says_so(tmp_path, monkeypatch, capfd):
    FullDisk(monkeypatch, failures=math.inf)
    monkeypatch.setattr(reporting, "REPORT_LIMIT_S", 0.0)
    reporter = FileReporter(tmp_path, 2, "w0")
    reporter.say(ReportKind.PROGRESS, 0, 8)  # the next one says the same and more
    with pytest.raises(SystemExit) as left:
        reporter.say(ReportKind.FINISHED, 0, 9)
    assert left.value.code == reporting.UNREPORTED_STATUS != 0
    assert "leaving with status 74" in capfd.readouterr().err
