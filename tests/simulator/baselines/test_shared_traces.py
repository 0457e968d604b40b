"""Every policy on the shared traces: what it exports could have happened, recounted apart from the simulator.

Our own scheduler as it is by default stands in ``tests/simulator/test_schedule_checker.py`` for the smaller traces.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.schedule_checker import CheckedJob, Report, check, read_jobs

from elasticflow_airflow.scheduler_core.simulator.baselines.common.by_type import ByType
from elasticflow_airflow.scheduler_core.simulator.experiment import Contender, Setting, play
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.mixed import common_jobs, mixed_cluster
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import read_trace
from elasticflow_airflow.scheduler_core.simulator.outcome import Result
from elasticflow_airflow.scheduler_core.simulator.outputs.export import write_schedule
from elasticflow_airflow.scheduler_core.simulator.policies import POLICY_NAMES, Policy, make_policy
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster, prepare
from elasticflow_airflow.scheduler_core.simulator.run import Change, Simulation

DATA = Path(__file__).resolve().parents[4] / "shared" / "data"
PAUSE_S = 30.0


class Case(NamedTuple):
    """A trace on a cluster."""

    trace: str
    nodes: int
    slots: int


OWN_SIZE = (Case("195job", 16, 8), Case("t4_195job", 16, 4), Case("cluster10", 32, 8), Case("poisson_100job", 16, 8))
SMALL = ("t4_195job", "poisson_100job")
"""Traces that are played in the slow tests; the long ones play the others as well, which show the same."""
CONTENDED = Case("195job", 4, 8)
CLUSTER01, CLUSTER04 = Case("cluster01", 64, 8), Case("cluster04", 128, 8)
OTHERS = tuple(name for name in POLICY_NAMES if name != "elasticflow")
CHOICES = (
    "elasticflow:value",
    pytest.param("elasticflow:wait", marks=pytest.mark.soak),
    pytest.param("elasticflow:value:wait", marks=pytest.mark.soak),
    "elasticflow:late",
)
PROMISING = ("chronus", "chronus:wait", "chronus+size", "chronus+size:wait", "edf+admission", "edf+admission:wait")
SOME_PROMISE = ("chronus", "chronus+size", "edf+admission:wait")
GREEDY = ("edf", "edf+elastic", "edf+admission", "gang-fifo", "gandiva", "tiresias", "themis", "optimus")
MIXED = (("a100", 8, 8), ("t4", 8, 4))
TYPES = "+types"
MIXED_POLICIES = ("chronus+size+types", "oasis+types", "aonline+types", *OTHERS)
"""``gavel`` chooses types itself, ``+types`` is one scheduler a type; the others stand wherever there is room."""
SOME_MIXED = ("gavel", "elasticflow+types", "chronus+size+types", "oasis+types", "aonline+types", "edf", "gandiva")


def title(case: Case) -> str:
    return f"{case.trace}-{case.nodes}x{case.slots}"


def some_slow(values: Iterable[Any], is_slow: Callable[[Any], bool]) -> list[Any]:
    """Return parameters of which the long tests play all, and the slow ones some."""
    return [value if is_slow(value) else pytest.param(value, marks=pytest.mark.soak) for value in values]


@pytest.fixture(autouse=True)
def _data() -> None:
    if not DATA.is_dir():
        pytest.skip(f"needs the data folder {DATA} beside the checkout")
    pytest.importorskip("scipy")


def sound(label: str, case: Case, folder: Path) -> Report:
    """Play, export, recount; what the two counts have in common is the same."""
    tables = DATA / "throughput" / ("t4" if case.trace.startswith("t4") else "a100")
    path = DATA / "traces" / f"{case.trace}.csv"
    setting = Setting(
        trace=read_trace(path),
        curves=read_curves(tables),
        nodes=cluster(case.nodes, case.slots),
        conditions=Conditions(pause_s=PAUSE_S),
    )
    played = play(setting, Contender.parse(label))
    write_schedule(folder / "schedule.jsonl", setting.nodes, played.changes)
    with (folder / "schedule.jsonl").open(encoding="utf-8") as lines:
        report = check(lines, read_jobs(path, tables), [case.slots] * case.nodes, PAUSE_S)
    agree(report, played.result)
    return report


def agree(report: Report, result: Result) -> None:
    assert not report.violations, report.violations[:5]
    told = result.summary()
    assert (report.met, report.rejected) == (told["met"], told["rejected"])
    assert (report.changes, report.migrations) == (told["changes"], told["migrations"])
    assert report.finished + report.rejected == report.jobs
    assert told["late_though_admitted"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", some_slow(OWN_SIZE, lambda case: case.trace in SMALL), ids=title)
@pytest.mark.parametrize("name", [name for name in OTHERS if name != "elasticflow+types"])
def test_all_policies_are_free_of_faults(name: str, case: Case, tmp_path: Path) -> None:
    sound(name, case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("label", CHOICES)
def test_our_choices_are_free_of_faults_where_not_everybody_fits(label: str, tmp_path: Path) -> None:
    report = sound(label, CONTENDED, tmp_path)
    assert bool(report.late) == label.endswith("late")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("label", "case"),
    [
        pytest.param(
            label,
            case,
            id=f"{label}-{title(case)}",
            marks=[pytest.mark.soak] * (case.trace != "195job" or label not in SOME_PROMISE),
        )
        for label, case in itertools.product(PROMISING, (Case("195job", 8, 8), Case("cluster10", 2, 8)))
    ],
)
def test_others_who_promise_keep_it_where_not_everybody_fits(label: str, case: Case, tmp_path: Path) -> None:
    sound(label, case, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("label", PROMISING)
def test_others_who_promise_keep_it_where_far_too_few_fit(label: str, tmp_path: Path) -> None:
    sound(label, CONTENDED, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in OWN_SIZE if case.trace != "t4_195job"], ids=title)
def test_one_scheduler_a_type_is_free_of_faults(case: Case, tmp_path: Path) -> None:
    sound("elasticflow+types", case, tmp_path)


@pytest.mark.soak
def test_one_scheduler_a_type_is_free_of_faults_under_contention(tmp_path: Path) -> None:
    sound("elasticflow+types", Case("t4_195job", 16, 4), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", some_slow(MIXED_POLICIES, lambda name: name in SOME_MIXED))
def test_schedules_of_a_mixed_cluster_are_free_of_faults(name: str, tmp_path: Path) -> None:
    tables = {kind: read_curves(DATA / "throughput" / kind) for kind, _, _ in MIXED}
    nodes = mixed_cluster(MIXED)
    trace, curves = common_jobs(read_trace(DATA / "traces" / "195job.csv"), tables)
    jobs = prepare(trace, {}, nodes, Conditions(pause_s=PAUSE_S), curves)
    policy: Policy
    if name in POLICY_NAMES:
        policy = make_policy(name, nodes)
    else:
        plain = name.removesuffix(TYPES)
        policy = ByType(lambda config, some: make_policy(plain, some, config), None, nodes)
    changes: list[Change] = []
    result = Simulation(name=name, policy=policy, nodes=nodes, jobs=jobs, on_change=changes.append).run()
    write_schedule(tmp_path / "schedule.jsonl", nodes, changes)
    known: Mapping[str, CheckedJob] = {
        row.job_id: CheckedJob(
            row.submitted_s,
            row.deadline_s,
            row.steps,
            {},
            {kind: curves[kind][row.model, row.batch_size].steps_per_s for kind, _, _ in MIXED},
        )
        for row in trace.jobs
    }
    with (tmp_path / "schedule.jsonl").open(encoding="utf-8") as lines:
        report = check(lines, known, [n.slots for n in nodes], PAUSE_S, node_types=[n.gpu_type for n in nodes])
    agree(report, result)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["elasticflow", *GREEDY])
def test_greedy_policies_are_free_of_faults_on_thousands_of_jobs(name: str, tmp_path: Path) -> None:
    sound(name, CLUSTER01, tmp_path)


@pytest.mark.soak
def test_ours_is_free_of_faults_on_the_largest_trace(tmp_path: Path) -> None:
    report = sound("elasticflow", CLUSTER04, tmp_path)
    assert report.late == 0
