"""``elasticflow simulate`` and ``compare`` on recurring work: with the calendar of its tasks, and without."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.schedule_checker import Report, check, read_jobs
from typer.testing import CliRunner, Result

from elasticflow_airflow.cli.main import app
from elasticflow_airflow.scheduler_core.simulator.expected_runs import timetables
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.synthetic import RecurringDags, recurring
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import TraceJob, write_trace

DAY_S, HOUR_S = 86400.0, 3600.0
CURVE = "global_batch_size,1,2,4,8\n256,0.6,1.0,1.9,3.5\n"
CLUSTER = ("--nodes", "2", "--slots-per-node", "4", "--pause-s", "10")


def nightly(day: int, steps: float = 6 * HOUR_S) -> TraceJob:
    """Due at midnight, two hours to its deadline: 1 h 43 min on all eight slots."""
    return TraceJob(
        job_id=f"nightly{day}",
        submitted_s=day * DAY_S + 60.0,
        steps=steps,
        model="net",
        batch_size=256,
        deadline_s=day * DAY_S + 2 * HOUR_S,
        workers=8,
        task="nightly",
        expected=True,
        due_s=day * DAY_S,
    )


def evening(day: int) -> TraceJob:
    """Comes at eleven of the evening before, and would hold all eight slots until half past one."""
    return TraceJob(
        job_id=f"evening{day}",
        submitted_s=day * DAY_S - HOUR_S,
        steps=8.75 * HOUR_S,
        model="net",
        batch_size=256,
        deadline_s=day * DAY_S + 1.6 * HOUR_S,
        workers=8,
    )


ROWS = sorted([*map(nightly, range(4)), *map(evening, (2, 3))], key=lambda row: row.submitted_s)


@pytest.fixture
def curves(curves_folder: Callable[..., Path]) -> Path:
    return curves_folder(CURVE)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    write_trace(tmp_path / "nights.csv", ROWS)
    return tmp_path / "nights.csv"


def without(trace: Path, *columns: str) -> Path:
    """The same trace without these columns."""
    with trace.open(newline="") as file:
        rows = [{name: cell for name, cell in row.items() if name not in columns} for row in csv.DictReader(file)]
    path = trace.with_name("plain.csv")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def run(command: str, trace: Path, curves: Path, *options: str) -> Result:
    done = CliRunner().invoke(
        app, [command, "--trace", str(trace), "--curves", str(curves), *CLUSTER, "--exact", *options]
    )
    assert done.exit_code == 0, done.output
    return done


def schedule(trace: Path, curves: Path, *options: str) -> list[str]:
    path = trace.with_name("schedule.jsonl")
    run("simulate", trace, curves, "--export", str(path), *options)
    return path.read_text(encoding="utf-8").splitlines()


def recount(lines: Sequence[str], trace: Path, curves: Path, nodes: int = 2) -> Report:
    return check(lines, read_jobs(trace, curves), [4] * nodes, 10.0)


def ended(lines: Sequence[str]) -> dict[str, str]:
    return {line["job"]: line["event"] for line in map(json.loads, lines) if "event" in line}


def test_runs_that_the_trace_expects_find_their_room(trace: Path, curves: Path) -> None:
    told, plain = schedule(trace, curves), schedule(trace, curves, "--no-calendar")
    for lines, refused in ((told, {"evening2", "evening3"}), (plain, {"nightly2", "nightly3"})):
        report = recount(lines, trace, curves)
        assert report.violations == []
        assert (report.met, report.late) == (4, 0)
        assert {job for job, event in ended(lines).items() if event == "rejected"} == refused


def test_without_the_columns_there_is_no_calendar(trace: Path, curves: Path) -> None:
    told, plain = schedule(trace, curves, "--calendar"), schedule(trace, curves, "--no-calendar")
    bare = without(trace, "task", "expected", "due_s")
    assert schedule(bare, curves) == schedule(bare, curves, "--no-calendar") == plain != told
    done = run("simulate", bare, curves, "--calendar")
    assert "plain.csv: no task is expected at two due times or more (columns task, expected, due_s)" in done.stderr


def test_the_figures_say_whether_there_was_one(trace: Path, curves: Path) -> None:
    bare = without(trace, "expected")
    for path, options, says in ((trace, (), 1), (trace, ("--no-calendar",), 0), (bare, (), 0)):
        printed = json.loads(run("simulate", path, curves, "--json", *options).stdout)
        assert printed["setting"]["calendar"] == says
    assert "calendar of 1 recurring task" in run("simulate", trace, curves).stdout
    assert "calendar" not in run("simulate", trace, curves, "--no-calendar").stdout


def test_other_policies_know_none(trace: Path, curves: Path) -> None:
    for policy in ("edf+admission", "gang-fifo", "elasticflow+types"):
        told, plain = (schedule(trace, curves, "--policy", policy, f) for f in ("--calendar", "--no-calendar"))
        assert told == plain
        done = run("simulate", trace, curves, "--policy", policy, "--calendar")
        assert f"--calendar is elasticflow's; {policy} knows none" in done.stderr
        assert "recurring task" not in done.stdout


def test_nothing_is_known_of_what_comes(trace: Path, curves: Path) -> None:
    """Another length of the last run changes nothing before it is submitted."""
    first = schedule(trace, curves)
    rows = [nightly(3, steps=6.2 * HOUR_S) if row.job_id == "nightly3" else row for row in ROWS]
    write_trace(trace, rows)
    other = schedule(trace, curves)
    assert other != first
    submitted = 3 * DAY_S + 60.0
    before, again = ([line for line in lines if json.loads(line)["t"] < submitted] for lines in (first, other))
    assert before == again != []


def test_more_scheduled_promises_are_kept_and_none_is_broken(tmp_path: Path, curves: Path) -> None:
    options = RecurringDags(slots=8, days=2, daily=3, hourly=1, now_and_then=1, ad_hoc_per_day=10, daily_load=0.4)
    rows = recurring(read_curves(curves), options, seed=2)
    path = tmp_path / "made.csv"
    write_trace(path, rows)
    scheduled = {row.job_id for row in rows if row.expected}
    kept = []
    for flag in ("--no-calendar", "--calendar"):
        export = tmp_path / "schedule.jsonl"
        done = run("simulate", path, curves, "--json", "--export", str(export), flag, "--nodes", "1")
        assert json.loads(done.stdout)["result"]["late_though_admitted"] == 0
        lines = export.read_text().splitlines()
        report = recount(lines, path, curves, nodes=1)
        assert (report.violations, report.late) == ([], 0)
        kept.append(sum(ended(lines)[job] == "finished" for job in scheduled))
    assert kept[0] < kept[1]


def test_both_stand_beside_each_other(trace: Path, curves: Path, tmp_path: Path) -> None:
    options = ("--no-plots", "--no-bound", "--json", "--out", str(tmp_path / "out"), "--schedules")
    both = "elasticflow,elasticflow:no-calendar,edf"
    printed = json.loads(run("compare", trace, curves, *options, "--policies", both).stdout)
    assert [row["policy"] for row in printed["policies"]] == ["elasticflow", "elasticflow:no-calendar", "edf"]
    told, plain = ((tmp_path / "out" / f"schedule-elasticflow{kind}.jsonl") for kind in ("", "-no-calendar"))
    assert {job for job, event in ended(told.read_text().splitlines()).items() if event == "rejected"} == {
        "evening2",
        "evening3",
    }
    run("compare", trace, curves, *options, "--policies", "elasticflow,elasticflow:calendar", "--no-calendar")
    assert told.read_text() == plain.read_text()
    again = tmp_path / "out" / "schedule-elasticflow-calendar.jsonl"
    assert again.read_text() != plain.read_text()


def test_the_smallest_cluster_is_looked_for_with_the_calendar(trace: Path, curves: Path, tmp_path: Path) -> None:
    """An evening that would end just in time for the night is refused: the night may be longer than any seen."""
    rows = [row for row in ROWS if row.job_id != "evening3"]
    write_trace(trace, [row if row.expected else replace(row, steps=4.56 * HOUR_S) for row in rows])
    sweep = ("--no-plots", "--no-bound", "--json", "--out", str(tmp_path / "out"), "--capacity-sweep", "--max-nodes")
    both = ("8", "--policies", "elasticflow,elasticflow:no-calendar")
    printed = json.loads(run("compare", trace, curves, *sweep, *both).stdout)
    smallest = {row["policy"]: row["smallest_nodes"] for row in printed["capacity"]}
    assert smallest == {"elasticflow": 3, "elasticflow:no-calendar": 2}


def test_due_times_within_a_minute_are_one() -> None:
    """A catch-up a second later makes no task of every second."""
    rows = [nightly(day) for day in range(3)]
    twin = replace(rows[1], job_id="twin", due_s=DAY_S + 1.0)
    assert timetables([*rows, twin])["nightly"].period_s == DAY_S


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (",1,100", "trace.csv:2: expected is 1, but there is no task that it is a run of"),
        ("t,1,160", "trace.csv:2: due_s is 160, after the submission at 100"),
    ],
)
def test_runs_that_cannot_be_expected_are_refused(
    cells: str, said: str, trace_file: Callable[..., Path], curves: Path
) -> None:
    header = "job_id,submitted_s,steps,model,batch_size,deadline_s,task,expected,due_s"
    path = trace_file(f"a,100,100,net,256,9000,{cells}", header=header)
    done = CliRunner().invoke(app, ["simulate", "--trace", str(path), "--curves", str(curves), *CLUSTER])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_a_contender_says_whether_it_has_one() -> None:
    assert Contender.parse("elasticflow:value:no-calendar").label == "elasticflow:value:no-calendar"
    assert Contender.parse("elasticflow:calendar").calendar is True
    assert Contender.parse("elasticflow").calendar is None
