"""``elasticflow simulate``: what it prints and writes, what it refuses, and that it leaves nothing half done."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.schedule_checker import check, read_jobs
from typer.testing import CliRunner, Result

from elasticflow_airflow.cli.main import app
from elasticflow_airflow.scheduler_core.model import events as ev
from elasticflow_airflow.scheduler_core.simulator import run as loop
from elasticflow_airflow.scheduler_core.simulator.disturbances import Troubles, disturbances
from elasticflow_airflow.scheduler_core.simulator.prepare import cluster

CURVE = "global_batch_size,1,2,4,8\n64,3.0,5.0,8.0,12.0\n"
ROWS = ("a,0,3000,net,64,1500", "b,100,3000,net,64,1500", "c,200,600,net,64,", "d,300,90000,net,64,2000")


@pytest.fixture
def inputs(trace_file: Callable[..., Path], curves_folder: Callable[..., Path]) -> Callable[..., list[str]]:
    """The options that every run needs; another trace or table where given."""

    def given(*rows: str, curve: str = CURVE, **header: str) -> list[str]:
        trace, curves = trace_file(*(rows or ROWS), **header), curves_folder(curve)
        return ["--trace", str(trace), "--curves", str(curves), "--nodes", "2", "--slots-per-node", "4"]

    return given


def simulate(*options: str) -> Result:
    return CliRunner().invoke(app, ["simulate", *options])


def test_prints_what_became_of_the_jobs_and_exports_a_schedule_that_holds(
    inputs: Callable[..., list[str]], tmp_path: Path
) -> None:
    export = tmp_path / "schedule.jsonl"
    done = simulate(*inputs(), "--export", str(export))
    assert done.exit_code == 0, done.output
    assert "deadlines met         2 of 3 (66.7 %)" in done.stdout
    assert "late though admitted  0" in done.stdout
    jobs = read_jobs(tmp_path / "trace.csv", tmp_path / "curves")
    with export.open() as lines:
        report = check(lines, jobs, [4, 4], 30.0)
    assert not report.violations
    assert (report.met, report.rejected, report.finished) == (2, 1, 3)
    assert list(tmp_path.glob("*.partial")) == []


def test_prints_json_alone_where_asked(inputs: Callable[..., list[str]]) -> None:
    options = inputs(*(f"{row},x" for row in ROWS), header="job_id,submitted_s,steps,model,batch_size,deadline_s,team")
    done = simulate(*options, "--json", "--pause-s", "5", "--on-reject", "wait")
    printed = json.loads(done.stdout)
    assert printed["setting"] | {"slots": 8, "pause_s": 5.0, "on_reject": "wait"} == printed["setting"]
    assert printed["result"]["met"] == 2
    assert "columns that are not known are ignored: team" in done.stderr


def test_a_job_that_may_be_late_keeps_a_part_of_its_value(inputs: Callable[..., list[str]]) -> None:
    hard = json.loads(simulate(*inputs(), "--json").stdout)["result"]
    done = json.loads(simulate(*inputs(), "--json", "--on-reject", "late", "--late-by", "9").stdout)["result"]
    assert (hard["met"], hard["rejected"], hard["value_kept"]) == (2, 1, 2.0)
    assert (done["rejected"], done["late_though_admitted"]) == (0, 0)
    assert 2.0 < done["value_kept"] < 3.0


def test_a_best_effort_column_takes_a_deadline_away(inputs: Callable[..., list[str]]) -> None:
    rows = ("a,0,3000,net,64,1500,0", "b,0,3000,net,64,1,1")
    options = inputs(*rows, header="job_id,submitted_s,steps,model,batch_size,deadline_s,best_effort")
    done = simulate(*options, "--json")
    assert json.loads(done.stdout)["result"]["deadlines"] == 1


def test_values_choose_whom_to_admit(inputs: Callable[..., list[str]]) -> None:
    done = simulate(*inputs(), "--objective", "value", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["result"]["policy"] == "elasticflow:value"


def test_an_objective_that_a_policy_does_not_know_is_noted(inputs: Callable[..., list[str]]) -> None:
    done = simulate(*inputs(), "--objective", "value", "--policy", "edf")
    assert done.exit_code == 0
    assert "--objective value is elasticflow's; edf knows none" in done.stderr


def test_trouble_is_drawn_from_the_seed(inputs: Callable[..., list[str]]) -> None:
    options = [*inputs(*(f"j{i},{60 * i},3000,net,64,90000" for i in range(20))), "--json", "--throughput-error", "0.1"]
    runs = [
        json.loads(simulate(*options, "--mtbf-h", "1", "--seed", seed).stdout)["result"] for seed in ("1", "1", "2")
    ]
    for run in runs:
        for name in ("run_s", "decision_p50_ms", "decision_p99_ms"):
            del run[name]
    assert runs[0] == runs[1] != runs[2]


MANY = tuple(f"j{i},{60 * i},3000,net,64,90000" for i in range(20))


def test_drained_nodes_stand_empty_until_they_are_back(inputs: Callable[..., list[str]], tmp_path: Path) -> None:
    export = tmp_path / "schedule.jsonl"
    options = ["--drain-every-h", "1", "--drain-notice-h", "0.1", "--drain-away-h", "0.25", "--seed", "3"]
    done = simulate(*inputs(*MANY), *options, "--export", str(export), "--json")
    setting = json.loads(done.stdout)["setting"]
    assert (setting["drain_every_h"], setting["drain_notice_h"], setting["drain_away_h"]) == (1.0, 0.1, 0.25)
    troubles = Troubles(seed=3, drain_every_h=1.0, drain_notice_h=0.1, drain_away_h=0.25)
    lines = [json.loads(line) for line in export.read_text().splitlines()]
    events = disturbances(cluster(2, 4), troubles, 0.0, lines[-1]["t"])
    away: dict[int, float] = {}
    absences = []
    for at_s, event, _ in events:
        if isinstance(event, ev.NodeLost):
            away[int(event.node_id[1:])] = at_s
        elif isinstance(event, ev.NodeJoined):
            node = int(event.node.node_id[1:])
            absences.append((node, away.pop(node), at_s))
    hit = [absence for absence in absences if absence[1] < lines[-1]["t"]]
    assert hit
    holds: dict[str, tuple[float, set[int]]] = {}
    for line in lines:
        since, before = holds.get(line["job"], (0.0, set()))
        for node, gone, back in hit:
            assert node not in before or min(line["t"], back) <= max(since, gone), (line, node, gone, back)
        if "slots" in line:
            holds[line["job"]] = line["t"], {node for node, _ in line["slots"]}


def test_slow_slots_slow_their_gangs_and_may_be_named(inputs: Callable[..., list[str]]) -> None:
    options = [*inputs(*MANY), "--json"]
    slow = ["--straggler-every-h", "1", "--straggler-h", "2", "--straggler-factor", "0.2", "0.3"]

    def mean_s(*more: str) -> float:
        return float(json.loads(simulate(*options, *more).stdout)["result"]["completion_mean_s"])

    healthy, slowed, named = mean_s(), mean_s(*slow), mean_s(*slow, "--straggler-named-s", "120")
    assert healthy < min(named, slowed)
    assert named != slowed
    assert mean_s(*slow) == slowed != mean_s(*slow, "--seed", "1")
    told = simulate(*inputs(*MANY), *slow).stdout
    assert "a slot is slow every 1 h, for 2 h, seed 0" in told


LINE_3 = "trace.csv:3: "


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        pytest.param(("a,0,100,net,64,500", "b,0,many,net,64,500"), LINE_3 + "steps is 'many'", id="no number"),
        pytest.param(("a,0,100,net,64,500", "b,0,100,net"), LINE_3 + "4 cells where the header has 6", id="cells"),
        pytest.param(("a,0,100,net,64,500", "a,0,100,net,64,500"), LINE_3 + "job_id 'a' is already", id="same id"),
        pytest.param(("a,0,100,net,64,500", "b,0,100,nett,64,500"), LINE_3 + "unknown model 'nett'", id="model"),
        pytest.param(("a,0,100,net,64,500", "b,0,100,net,65,500"), LINE_3 + "model 'net' has no curve", id="batch"),
        pytest.param(("a,0,100,net,64,500", "b,99,100,net,64,50"), LINE_3 + "the deadline 50 is not", id="before"),
        pytest.param(("a,0,100,net,64,", "b,0,100,net,64,"), "no job of the trace has a deadline", id="no deadline"),
        pytest.param((), "the trace has no jobs", id="no jobs"),
    ],
)
def test_a_bad_trace_is_refused(
    rows: tuple[str, ...],
    said: str,
    trace_file: Callable[..., Path],
    curves_folder: Callable[..., Path],
    tmp_path: Path,
) -> None:
    options = ["--trace", str(trace_file(*rows)), "--curves", str(curves_folder(CURVE))]
    refused(simulate(*options, "--nodes", "2", "--slots-per-node", "4", "--export", f"{tmp_path}/x"), said, tmp_path)


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        pytest.param("global_batch_size,1,2,4\n64,3.0,,8.0\n", "net.csv:2: the curve of batch size 64 has", id="hole"),
        pytest.param("global_batch_size,1,2\n64,fast,5\n", "net.csv:2: a cell is not a number", id="no number"),
        pytest.param("global_batch_size,1\n64,1e-300\n", "trace.csv:2: job 'a' would take", id="slow"),
        pytest.param("batch,1\n64,1\n", "net.csv:1: the first line must be global_batch_size", id="header"),
        pytest.param("global_batch_size,16\n64,9.0\n", "trace.csv:2: job 'a' needs at least 16 slots", id="too large"),
    ],
)
def test_bad_curves_are_refused(curve: str, said: str, inputs: Callable[..., list[str]], tmp_path: Path) -> None:
    refused(simulate(*inputs(curve=curve), "--export", f"{tmp_path}/x"), said, tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--policy", "best"], "unknown policy 'best'; there are elasticflow, "),
        (["--throughput-error", "inf"], "throughput_error is inf"),
        (["--throughput-error", "10"], "throughput_error is 10.0; it is the sigma of a log-normal factor"),
        (["--throughput-error", "1000"], "throughput_error is 1000.0; it is the sigma of a log-normal factor"),
        (["--mtbf-h", "0"], "mtbf_h is 0.0; it must be a number of hours above 0"),
        (["--mtbf-h", "9", "--repair-h", "0"], "repair_h is 0.0; it must be a number of hours above 0"),
        (["--repair-h", "2"], "--repair-h says nothing without --mtbf-h; give that, too"),
        (["--drain-every-h", "inf"], "drain_every_h is inf; it must be a number of hours above 0"),
        (["--drain-away-h", "2"], "--drain-away-h says nothing without --drain-every-h"),
        (["--drain-every-h", "9", "--drain-away-h", "0"], "drain_away_h is 0.0; it must be a number of hours above 0"),
        (["--drain-every-h", "9", "--drain-notice-h", "-1"], "should be greater than or equal to 0"),
        (["--straggler-every-h", "0"], "straggler_every_h is 0.0; it must be a number of hours above 0"),
        (["--straggler-every-h", "9", "--straggler-factor", "0.8", "0.4"], "straggler_factor is (0.8, 0.4); it must"),
        (["--straggler-every-h", "9", "--straggler-named-s", "inf"], "straggler_named_s is inf; it must be a number"),
        (["--straggler-named-s", "60"], "--straggler-named-s says nothing without --straggler-every-h"),
        (["--trace", "nowhere.csv"], "nowhere.csv: cannot be read as a CSV file"),
        (["--curves", "nowhere"], "nowhere: is not a folder"),
        (["--objective", "profit"], "'profit' is not one of 'auto', 'first-come', 'value'"),
        (["--nodes", "0"], "should be greater than or equal to 1"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], said: str, inputs: Callable[..., list[str]], tmp_path: Path
) -> None:
    refused(simulate(*inputs(), "--export", f"{tmp_path}/x", *options), said, tmp_path)


def refused(done: Result, said: str, tmp_path: Path) -> None:
    text = " ".join(done.stderr.replace("\u2502", " ").split())  # options that typer refuses stand in a frame
    assert said in text
    assert done.exit_code == 2
    assert done.stdout == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves", "trace.csv"]


def test_what_cannot_be_written_is_said_before_anything_runs(
    inputs: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop.Simulation, "run", lambda self: pytest.fail("simulated for nothing"))
    options = inputs()
    before = (tmp_path / "trace.csv").read_text()
    assert "is read by this very command" in simulate(*options, "--export", f"{tmp_path}/trace.csv").stderr
    assert "is no regular file" in simulate(*options, "--export", str(tmp_path)).stderr
    assert "cannot be written" in simulate(*options, "--export", f"{tmp_path}/none/x.jsonl").stderr
    assert "is read by this very command" in simulate(*options, "--export", f"{tmp_path}/curves/net.csv").stderr
    assert "is in the folder of scaling curves" in simulate(*options, "--export", f"{tmp_path}/curves/x.csv").stderr
    os.link(tmp_path / "curves" / "net.csv", tmp_path / "same")
    assert "is read by this very command" in simulate(*options, "--export", f"{tmp_path}/same").stderr
    assert (tmp_path / "trace.csv").read_text() == before
    assert (tmp_path / "curves" / "net.csv").read_text() == CURVE


def test_a_file_that_is_called_as_a_partial_one_would_be_stays(
    inputs: Callable[..., list[str]], tmp_path: Path
) -> None:
    own = tmp_path / "schedule.jsonl.partial"
    own.write_text("mine")
    assert simulate(*inputs(), "--export", f"{tmp_path}/schedule.jsonl").exit_code == 0
    assert own.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "curves",
        "schedule.jsonl",
        "schedule.jsonl.partial",
        "trace.csv",
    ]


def test_an_interrupt_while_writing_leaves_no_file(
    inputs: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elasticflow_airflow.scheduler_core.simulator.outputs import export

    def interrupted(line: dict[str, object]) -> str:
        if line.get("event"):
            raise KeyboardInterrupt
        return json.JSONEncoder().encode(line)

    monkeypatch.setattr(export.json, "dumps", interrupted)
    done = simulate(*inputs(), "--export", f"{tmp_path}/schedule.jsonl")
    assert done.exit_code == 2
    assert "interrupted, nothing was written" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves", "trace.csv"]


def test_a_defect_of_a_policy_is_said_as_one(inputs: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: loop.Simulation) -> None:
        raise loop.SimulationError("a slot twice")

    monkeypatch.setattr(loop.Simulation, "run", broken)
    done = simulate(*inputs())
    assert done.exit_code == 1
    assert "a defect of the policy, nothing was written: a slot twice" in done.stderr


def test_a_library_that_a_policy_needs_is_named(
    inputs: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(self: loop.Simulation) -> None:
        raise ModuleNotFoundError("No module named 'scipy'", name="scipy")

    monkeypatch.setattr(loop.Simulation, "run", missing)
    done = simulate(*inputs(), "--policy", "chronus")
    assert done.exit_code == 2
    assert "this needs scipy, which is not installed; pip install 'elasticflow-airflow[simulate]'" in done.stderr


@pytest.mark.parametrize(("sent", "says"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")])
def test_a_run_that_is_interrupted_leaves_nothing(
    sent: signal.Signals, says: str, inputs: Callable[..., list[str]], tmp_path: Path
) -> None:
    rows = (f"j{i},{i},30000000,net,64,{9_000_000_000 + i},x" for i in range(3000))  # takes minutes
    options = inputs(*rows, header="job_id,submitted_s,steps,model,batch_size,deadline_s,team")
    command = [Path(sys.executable).parent / "elasticflow", "simulate", *options, "--export", tmp_path / "x.jsonl"]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "TERM": "dumb"}
    )
    with running:
        try:
            assert running.stderr
            assert "columns that are not known" in running.stderr.readline()  # it has read the trace, and goes on
            running.send_signal(sent)
            _, said = running.communicate(timeout=60)
        finally:
            running.kill()
    assert running.returncode == 2, said
    assert f"elasticflow: {says}, nothing was written" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves", "trace.csv"]


def test_the_command_line_starts_without_what_it_does_not_use() -> None:
    program = (
        "import sys, elasticflow_airflow.cli.main; "
        "print([m for m in ('numpy', 'scipy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_whoever_looks_sees_how_far_it_is_its_rate_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from elasticflow_airflow.cli.simulator.display import Bars

    monkeypatch.setenv("FORCE_COLOR", "1")  # as if it were a terminal
    monkeypatch.setenv("COLUMNS", "160")
    with Bars(200) as bars:
        progressed = bars.start("elasticflow")
        for over in range(1, 101):
            progressed(over, 86400.0 * over)
        assert bars.wait("bound", lambda: 7) == 7
        with bars.trying("edf on fewer and more nodes") as tried:
            tried(12)
    said = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capsys.readouterr().err)
    assert re.search(r"elasticflow .* 200/200 .* jobs/s left 0:00:00", said)
    assert "edf on fewer and more nodes" in said


def test_nobody_looks_at_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from elasticflow_airflow.cli.simulator.display import Bars

    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    with Bars(2) as bars:
        bars.start("elasticflow")(1, 0.0)
    assert capsys.readouterr().err == ""
