"""``elasticflow compare``: policies side by side, their tables and plots, and the smallest clusters."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from elasticflow_airflow.cli.main import app
from elasticflow_airflow.scheduler_core.model.config import Objective
from elasticflow_airflow.scheduler_core.model.values import OnReject, Slot
from elasticflow_airflow.scheduler_core.simulator import compare as comparing
from elasticflow_airflow.scheduler_core.simulator import run as loop
from elasticflow_airflow.scheduler_core.simulator import smallest_cluster
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, Setting, parse_contenders, play
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import read_trace
from elasticflow_airflow.scheduler_core.simulator.outputs import plots, series
from elasticflow_airflow.scheduler_core.simulator.policies import POLICY_NAMES
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster
from elasticflow_airflow.scheduler_core.simulator.run import Change

CURVE = "global_batch_size,1,2,4\n64,1.0,2.0,4.0\n"
ROWS = ("a,0,1000,net,64,1100,1", "b,0,1000,net,64,1100,4", "c,0,1000,net,64,1100,1", "d,0,9000,net,64,1100,4")
HEADER = "job_id,submitted_s,steps,model,batch_size,deadline_s,workers"


@pytest.fixture
def options(trace_file: Callable[..., Path], curves_folder: Callable[..., Path], tmp_path: Path) -> list[str]:
    trace, curves = trace_file(*ROWS, header=HEADER), curves_folder(CURVE)
    out = tmp_path / "out"
    return f"--trace {trace} --curves {curves} --nodes 1 --slots-per-node 4 --out {out} --pause-s 10".split()


@pytest.fixture
def setting(trace_file: Callable[..., Path], curves_folder: Callable[..., Path]) -> Setting:
    trace, curves = read_trace(trace_file(*ROWS, header=HEADER)), read_curves(curves_folder(CURVE))
    return Setting(trace=trace, curves=curves, nodes=cluster(1, 4), conditions=Conditions(pause_s=10.0))


def compare(*options: str) -> Result:
    return CliRunner().invoke(app, ["compare", *options])


def test_writes_tables_plots_and_schedules(options: list[str], tmp_path: Path) -> None:
    for library in ("matplotlib", "scipy"):
        pytest.importorskip(library, reason="needs the extra [simulate]")
    done = compare(*options, "--policies", "elasticflow:value:wait,edf", "--schedules", "--capacity-sweep")
    assert done.exit_code == 0, done.output
    out = tmp_path / "out"
    labels = ["elasticflow:value:wait", "edf"]
    names = [label.replace(":", "-") for label in labels]
    figures = {"deadlines", "slots", "completion", "capacity", *(f"gantt-{name}" for name in names)}
    assert {path.name for path in out.iterdir()} == {
        *("summary.csv", "summary.json", "jobs.csv", "capacity.csv"),
        *(f"schedule-{name}.jsonl" for name in names),
        *(f"{figure}.{kind}" for figure in figures for kind in ("png", "svg")),
    }
    for figure in figures:
        assert (out / f"{figure}.png").read_bytes().startswith(b"\x89PNG")
        assert ET.parse(out / f"{figure}.svg").getroot().tag.endswith("svg")

    with (out / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == labels
    # a, b and c fit side by side or one after the other; d would take nine times as long as it may.
    assert [rows[0][name] for name in ("deadlines", "bound", "met", "of_bound")] == ["4", "3", "3", "1.0"]
    assert all(row["late_though_admitted"] == "0" for row in rows)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["bound"] == 3
    assert summary["capacity"][0]["smallest_nodes"] == 1
    assert set(summary["columns"]) == set(summary["policies"][0]) - {"policy"}
    with (out / "jobs.csv").open() as file:
        jobs = [row for row in csv.DictReader(file) if row["policy"] == labels[0]]
    assert [row["met_by_bound"] for row in jobs] == ["1", "1", "1", "0"]
    assert "d" in [row["job_id"] for row in jobs if row["reject_reason"]]
    assert "4 deadlines, of which no schedule can meet more than 3" in done.stdout
    assert "smallest cluster on which all 3 deadlines are met that can be met at all" in done.stdout


def test_prints_json_and_does_without_what_is_not_wanted(options: list[str], tmp_path: Path) -> None:
    done = compare(*options, "--policies", "elasticflow,gang-fifo", "--no-bound", "--no-plots", "--json")
    printed = json.loads(done.stdout)
    assert [row["policy"] for row in printed["policies"]] == ["elasticflow", "gang-fifo"]
    assert printed["bound"] is None
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["jobs.csv", "summary.csv", "summary.json"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--policies", "edf,nobody"], "unknown policy 'nobody'; there are elasticflow, "),
        (
            ["--policies", "elasticflow:never"],
            "'never' is no choice of a policy; there are first-come, value",
        ),
        (["--policies", ","], "no policy to simulate"),
        (["--window-h", "1", "0"], "--window-h is (1.0, 0.0)"),
        (["--window-h", "nan", "5"], "--window-h is (nan, 5.0)"),
        (["--window-h", "0", "inf"], "--window-h is (0.0, inf)"),
        (["--throughput-error", "10"], "throughput_error is 10.0; it is the sigma of a log-normal factor"),
        (["--capacity-sweep", "--nodes", "4", "--max-nodes", "2"], "--max-nodes is 2, less than --nodes, which is 4"),
        (["--curves", "nowhere"], "nowhere: is not a folder"),
    ],
)
def test_bad_options_are_refused(options: list[str], more: list[str], said: str, tmp_path: Path) -> None:
    done = compare(*options, "--no-plots", "--no-bound", *more)
    assert done.exit_code == 2
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("library", "option"), [("matplotlib", "--no-plots"), ("scipy", "--no-bound")])
def test_a_missing_library_is_said_before_anything_runs(
    options: list[str], library: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (plots, comparing):
        monkeypatch.setattr(module, "find_spec", lambda name: None if name == library else object())
    done = compare(*options, "--policies", "elasticflow")
    assert done.exit_code == 2
    assert f"{library}, which is not installed; pip install 'elasticflow-airflow[simulate]'" in done.stderr
    assert option in done.stderr


def test_an_interrupt_while_drawing_leaves_no_file(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(plots, "draw", interrupted)
    monkeypatch.setattr(plots, "require_library", lambda: None)
    done = compare(*options, "--policies", "elasticflow", "--no-bound")
    assert done.exit_code == 2
    assert "interrupted, nothing was written" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("summary.csv", []),
        ("jobs.csv", []),
        ("summary.json", []),
        ("capacity.csv", ["--capacity-sweep"]),
        ("schedule-elasticflow-wait.jsonl", ["--schedules"]),
        ("slots.svg", ["--plots"]),
        ("gantt-elasticflow-wait.png", ["--plots"]),
        ("capacity.png", ["--plots", "--capacity-sweep"]),
    ],
)
def test_no_trace_and_no_other_thing_is_written_over(
    options: list[str], name: str, more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace may have any of the names that are written, and so may a folder: both are found before anything runs."""
    monkeypatch.setattr(plots, "require_library", lambda: None)
    monkeypatch.setattr(loop.Simulation, "run", lambda self: pytest.fail("simulated for nothing"))
    own = tmp_path / name
    own.write_text((tmp_path / "trace.csv").read_text())
    base = [*options, "--no-plots", "--no-bound", "--policies", "elasticflow:wait", *more]
    done = compare(*base, "--trace", str(own), "--out", str(tmp_path))
    assert (done.exit_code, "is read by this very command" in done.stderr) == (2, True), done.output
    (tmp_path / "out" / name).mkdir(parents=True)
    done = compare(*base)
    assert (done.exit_code, "is no regular file" in done.stderr) == (2, True), done.output
    assert name in done.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]


def test_nothing_is_written_among_the_curves(options: list[str], tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "curves")
    for out in ("curves", "link"):
        done = compare(*options, "--no-plots", "--no-bound", "--out", str(tmp_path / out))
        assert (done.exit_code, "is in the folder of scaling curves" in done.stderr) == (2, True), done.output
    assert [path.name for path in (tmp_path / "curves").iterdir()] == ["net.csv"]


def test_the_files_foreseen_are_those_written(options: list[str], tmp_path: Path, setting: Setting) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra [simulate]")
    contenders = parse_contenders(["elasticflow:value,edf"])
    done = compare(
        *options, "--no-bound", "--policies", "elasticflow:value,edf", "--schedules", "--capacity-sweep", "--plots"
    )
    assert done.exit_code == 0, done.output
    foreseen = comparing.file_names(contenders, capacities=True, schedules=True)
    foreseen += plots.file_names(contenders, capacities=True)
    assert sorted(foreseen) == sorted(path.name for path in (tmp_path / "out").iterdir())


def test_a_folder_that_appears_meanwhile_stops_all_files(tmp_path: Path) -> None:
    (tmp_path / "b.csv").mkdir()

    def write() -> None:
        with comparing.whole_or_nothing(tmp_path) as folder:
            for name in ("a.csv", "b.csv", "c.csv"):
                (folder / name).write_text("")

    with pytest.raises(InputError, match=r"b\.csv: is no regular file"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["b.csv"]


def test_contenders_are_read_as_they_are_written() -> None:
    for text in ("elasticflow", "elasticflow:value", "elasticflow:value:wait", "edf:wait"):
        assert Contender.parse(text).label == text
    assert Contender.parse("elasticflow:auto").label == "elasticflow"
    assert [contender.policy for contender in parse_contenders(["all"])] == list(POLICY_NAMES)
    chosen = parse_contenders(["elasticflow, edf", "elasticflow:first-come"], objective=Objective.VALUE)
    assert [contender.label for contender in chosen] == ["elasticflow:value", "edf", "elasticflow:first-come"]


def test_each_contender_waits_or_not_as_it_says(setting: Setting) -> None:
    waiting = setting.jobs(Contender(policy="elasticflow", on_reject=OnReject.WAIT))
    assert {simulated.job.on_reject for simulated in waiting} == {OnReject.WAIT}
    assert {simulated.job.on_reject for simulated in setting.jobs(Contender(policy="edf"))} == {OnReject.FAIL}


# -- the smallest cluster ----------------------------------------------------------------------------------------------


def test_the_smallest_cluster_keeps_what_can_be_kept_at_all(setting: Setting) -> None:
    assert set(smallest_cluster.achievable(setting)) == {"a", "b", "c"}
    ours = smallest_cluster.smallest_cluster(setting, Contender(policy="elasticflow"), limit=8)
    # 3,000 steps within 1,100 s, at a step a second and slot: 3 slots and more, which is one node.
    assert (ours.nodes, ours.needed, ours.monotone) == (1, 3, True)
    # First come, first served, at the size that was asked for: c waits for b, which waits for a.
    first_come = smallest_cluster.smallest_cluster(setting, Contender(policy="gang-fifo"), limit=8)
    assert first_come.nodes == 2
    nobody = smallest_cluster.smallest_cluster(setting.resized(1), Contender(policy="gang-fifo"), limit=1)
    assert nobody.nodes is None
    assert nobody.as_row()["largest_tried_nodes"] == 1


def test_no_deadline_counts_that_only_a_larger_block_could_keep(
    trace_file: Callable[..., Path], curves_folder: Callable[..., Path]
) -> None:
    """Nodes of 3 hold blocks of 2 and 1 slots however many there are; a needs 4 workers to be in time, b one."""
    trace = read_trace(trace_file("a,0,3600,net,64,500", "b,0,300,net,64,2000"))
    curves = read_curves(curves_folder("global_batch_size,1,2,4\n64,3.0,5.0,12.0\n"))
    setting = Setting(trace=trace, curves=curves, nodes=cluster(3, 3), conditions=Conditions(pause_s=60.0))
    assert set(smallest_cluster.achievable(setting.resized(12))) == {"b"}
    found = smallest_cluster.smallest_cluster(setting, Contender(policy="elasticflow"), limit=12)
    assert (found.nodes, found.needed) == (1, 1)


@pytest.mark.parametrize(
    ("keeping", "found", "monotone"),
    [
        (set(range(5, 17)), 5, True),
        ({5, *range(7, 17)}, 5, False),
        ({3, *range(6, 17)}, 6, True),  # two sizes fail in between: beyond the edge nobody looks
        ({16}, 16, True),
        (set(range(1, 17)), 1, True),
        (set(), None, True),
    ],
)
def test_the_search_looks_below_what_it_found(
    setting: Setting, keeping: set[int], found: int | None, monotone: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keeps(resized: Setting, contender: Contender, promised: dict[str, float]) -> bool:
        return len(resized.nodes) in keeping

    monkeypatch.setattr(smallest_cluster, "_keeps", keeps)
    asked: list[int] = []
    result = smallest_cluster.smallest_cluster(
        setting.resized(8), Contender(policy="edf"), limit=16, on_try=asked.append
    )
    assert result.nodes == found
    assert result.monotone is monotone
    assert len(asked) == len(set(asked))


# -- series for the plots ----------------------------------------------------------------------------------------------

X0, X1, Y0 = Slot("x", 0), Slot("x", 1), Slot("y", 0)
CHANGES = [
    Change(0.0, "a", (X0,)),
    Change(10.0, "a", (X0, X1)),
    Change(10.0, "b", (Y0,)),
    Change(20.0, "b", ()),
    Change(30.0, "a", ()),
    Change(30.0, "a", (), "finished"),
]


def test_spans_of_a_schedule() -> None:
    found = series.spans(CHANGES)
    assert found == [("a", 0.0, 10.0, (X0,)), ("b", 10.0, 20.0, (Y0,)), ("a", 10.0, 30.0, (X0, X1))]
    assert series.mean_use(found, 0.0, 40.0, 4) == [1.0, 3.0, 2.0, 0.0]
    assert series.mean_use(found, 5.0, 25.0, 1) == [(5 + 15 * 2 + 10) / 20]
    assert series.busiest_window(found, 5.0) == (10.0, 15.0)
    assert series.busiest_window([], 5.0) == (0.0, 5.0)


def test_rows_and_unbroken_blocks() -> None:
    rows = series.rows_of(cluster(2, 2))
    slots = [Slot("n1", 1), Slot("n0", 1), Slot("n0", 0)]
    assert series.blocks(slots, rows) == [(0, 2), (3, 1)]


def test_the_distribution_counts_jobs_that_were_refused(setting: Setting) -> None:
    played = play(setting, Contender(policy="elasticflow"))
    times, parts = series.completion_cdf(played.result.records)
    assert len(times) == 3
    assert times == sorted(times)
    assert parts == [0.25, 0.5, 0.75]


def test_unknown_policies_are_bad_input() -> None:
    with pytest.raises(InputError, match="unknown policy 'x'"):
        Contender(policy="x")


def test_a_cluster_on_which_a_job_cannot_run_keeps_no_promise(
    trace_file: Callable[..., Path], curves_folder: Callable[..., Path]
) -> None:
    trace = read_trace(trace_file("a,0,1000,net,64,1100"))
    curves = read_curves(curves_folder("global_batch_size,4\n64,4.0\n"))
    setting = Setting(trace=trace, curves=curves, nodes=cluster(1, 2), conditions=Conditions())
    found = smallest_cluster.smallest_cluster(setting, Contender(policy="elasticflow"), limit=4)
    assert found.nodes == 2
    with pytest.raises(InputError, match="needs at least 4 slots"):
        smallest_cluster.smallest_cluster(setting, Contender(policy="elasticflow"), limit=1)
