"""Several types of GPU in one cluster, and pairs that share one: nodes, curves, tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticflow_airflow.scheduler_core.cluster.placement import Layout
from elasticflow_airflow.scheduler_core.model.values import Placement, ScalingCurve, Slot
from elasticflow_airflow.scheduler_core.simulator.inputs.colocation import part_left, read_colocation
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.mixed import (
    at_batch,
    common_jobs,
    mixed_cluster,
    read_typed_curves,
)
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import Trace, TraceJob, read_trace
from elasticflow_airflow.scheduler_core.simulator.policies import make_policy
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, prepare
from elasticflow_airflow.scheduler_core.simulator.run import Change, Simulation

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
FAST = {("net", 64): ScalingCurve({1: 4.0, 2: 8.0, 4: 12.0}), ("other", 8): ScalingCurve({1: 1.0})}
SLOW = {("net", 128): ScalingCurve({1: 1.0, 2: 2.0})}


def row(job_id: str, model: str = "net", batch_size: int = 64) -> TraceJob:
    return TraceJob(job_id=job_id, submitted_s=0.0, steps=100.0, model=model, batch_size=batch_size, deadline_s=1e6)


def test_blocks_stay_within_a_type() -> None:
    nodes = mixed_cluster([("fast", 2, 4), ("slow", 2, 4)])
    assert [node.node_id for node in nodes] == ["fast-0", "fast-1", "slow-0", "slow-1"]
    layout = Layout(nodes)
    assert layout.largest(layout.availability.slots) == 8  # two nodes of four, of one type
    assert layout.of_type == {"fast": 0x00FF, "slow": 0xFF00}
    assert layout.type_of(layout.mask_of(Placement((Slot("slow-1", 3),)))) == "slow"


@pytest.mark.parametrize("parts", [[("a", 0, 4)], [("a", 1, 0)], [("a", 1, 4), ("a", 2, 4)]])
def test_an_impossible_cluster_is_refused(parts: list[tuple[str, int, int]]) -> None:
    with pytest.raises(InputError):
        mixed_cluster(parts)


def test_a_batch_that_a_type_lacks_runs_at_the_same_samples_by_second() -> None:
    assert at_batch(SLOW, "net", 64).steps_per_s == {1: 2.0, 2: 4.0}
    assert at_batch(SLOW, "net", 128).steps_per_s == {1: 1.0, 2: 2.0}


def test_jobs_that_one_type_cannot_run_are_left_out() -> None:
    trace, curves = common_jobs(Trace(None, (row("a"), row("b", "other", 8))), {"fast": FAST, "slow": SLOW})
    assert [job.job_id for job in trace.jobs] == ["a"]
    assert sorted(curves) == ["fast", "slow"]
    with pytest.raises(InputError, match="no job's model is in the tables"):
        common_jobs(Trace(None, (row("b", "other", 8),)), {"fast": FAST, "slow": SLOW})


def test_a_job_is_told_the_slowest_type_and_runs_at_the_one_it_stands_on() -> None:
    trace, curves = common_jobs(Trace(None, (row("a"),)), {"fast": FAST, "slow": SLOW})
    nodes = mixed_cluster([("fast", 1, 2)])
    jobs = prepare(trace, {}, nodes, Conditions(pause_s=0.0), curves)
    assert jobs[0].job.curve == ScalingCurve({1: 2.0, 2: 4.0})
    result = Simulation(name="x", policy=make_policy("optimus", nodes), nodes=nodes, jobs=jobs).run()
    assert result.records[0].finished_s == pytest.approx(100.0 / 8.0)


def test_what_sharing_gains_is_what_a_guest_has() -> None:
    assert part_left(0.8, 0.5) == pytest.approx(0.3)
    assert part_left(0.5, 0.5) == 0.0  # taking turns gains nothing
    assert part_left(0.3, 0.2) == 0.0
    assert part_left(1.0, 1.2) == 1.0


def test_tables_with_faults_are_refused_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("gpu,model_a\nv100,net\n")
    with pytest.raises(InputError, match=r"pairs\.csv:1: the header lacks batch_size_a"):
        read_colocation(path, "v100", FAST)
    with pytest.raises(InputError, match=r"pairs\.csv:1: the header lacks placement"):
        read_typed_curves(path)
    head = "gpu,placement,model,batch_size,workers,steps_per_s\n"
    path.write_text(head + "".join(f"v100,consolidated,net,64,{workers},{workers}\n" for workers in (1, 8, 2)))
    with pytest.raises(
        InputError, match=r"pairs\.csv: the curve of 'net' with batch size 64 on 'v100' has a hole at \[4"
    ):
        read_typed_curves(path)
    path.write_text(head + "v100,consolidated,net,64,one,2\n")
    with pytest.raises(InputError, match=r"pairs\.csv:2: a cell is not a number"):
        read_typed_curves(path)


def test_measured_pairs_leave_each_other_something() -> None:
    folder = DATA / "throughput" / "gavel"
    if not folder.is_dir():
        pytest.skip(f"needs the data folder {folder} beside the checkout")
    curves = read_typed_curves(folder / "curves.csv")
    assert sorted(curves) == ["k80", "p100", "v100"]
    table = read_colocation(folder / "colocation.csv", "v100", curves["v100"])
    parts = set(table.parts.values())
    assert min(parts) == 0.0
    assert 0.3 < max(parts) <= 1.0
    assert table.leftover("unknown:1", "unknown:2") == 0.0


@pytest.mark.parametrize("name", ["gavel", "optimus", "oasis", "elasticflow", "elasticflow+types"])
def test_a_mixed_cluster_plays_the_models_that_both_tables_have(name: str) -> None:
    if not DATA.is_dir():
        pytest.skip(f"needs the data folder {DATA} beside the checkout")
    if name == "gavel":
        pytest.importorskip("scipy")
    tables = {kind: read_curves(DATA / "throughput" / kind) for kind in ("a100", "t4")}
    trace, curves = common_jobs(read_trace(DATA / "traces" / "poisson_100job.csv"), tables)
    assert {job.model for job in trace.jobs} == {"bert", "deepspeech2"}
    nodes = mixed_cluster([("a100", 2, 8), ("t4", 4, 4)])
    jobs = prepare(trace, {}, nodes, Conditions(pause_s=30.0), curves)
    changes: list[Change] = []
    policy = make_policy(name, nodes)
    summary = Simulation(name=name, policy=policy, nodes=nodes, jobs=jobs, on_change=changes.append).run().summary()
    assert (summary["unfinished"], summary["late_though_admitted"]) == (0, 0)
    assert all(len({slot.node_id.split("-")[0] for slot in change.slots}) <= 1 for change in changes)
