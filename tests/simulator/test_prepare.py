"""From rows to jobs: costs, seeded errors and jitter; what cannot run on the cluster is refused beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from statistics import mean, pstdev

import pytest

from elasticflow_airflow.scheduler_core.model.values import Node, OnReject, RescaleCosts
from elasticflow_airflow.scheduler_core.simulator.inputs.curves import read_curves
from elasticflow_airflow.scheduler_core.simulator.inputs.problems import InputError
from elasticflow_airflow.scheduler_core.simulator.inputs.trace import read_trace
from elasticflow_airflow.scheduler_core.simulator.prepare import Conditions, cluster, prepare
from elasticflow_airflow.scheduler_core.simulator.run import SimulatedJob

TABLE = "global_batch_size,1,2,4,8\n8,1,1.8,3,4\n64,,,3,5\n"


@pytest.fixture
def ready(trace_file: Callable[..., Path], curves_folder: Callable[..., Path]) -> Callable[..., list[SimulatedJob]]:
    def make(*rows: str, nodes: tuple[Node, ...] | None = None, **conditions: object) -> list[SimulatedJob]:
        given = Conditions(**conditions)  # type: ignore[arg-type]  # tests pass fields by name
        return prepare(read_trace(trace_file(*rows)), read_curves(curves_folder(TABLE)), nodes or cluster(2, 4), given)

    return make


def test_jobs_are_told_the_table_and_the_costs(ready: Callable[..., list[SimulatedJob]]) -> None:
    told, other = ready("a,5,100,net,8,50", "b,6,10,net,64,", pause_s=20.0, tail_s=3.0, on_reject=OnReject.WAIT)
    job = told.job
    assert (job.submitted_s, told.arrives_s, job.deadline_s, job.total_steps) == (5, 5, 50, 100)
    assert job.costs == RescaleCosts(startup_s=20.0, pause_s=20.0, tail_s=3.0)
    assert job.on_reject is OnReject.WAIT
    assert not job.explore
    assert told.truth == {1: 1.0, 2: 1.8, 4: 3.0, 8: 4.0}
    assert other.job.deadline_s is None
    assert ready("a,5,100,net,8,50", pause_s=20.0, startup_s=0.0)[0].job.costs.startup_s == 0.0


def test_the_error_is_a_factor_per_job_and_size_that_the_policy_is_not_told(
    ready: Callable[..., list[SimulatedJob]],
) -> None:
    rows = [f"j{i},0,100,net,8,500" for i in range(400)]
    jobs = ready(*rows, throughput_error=0.1, seed=3)
    logs = [
        math.log(speed / job.job.curve.steps_per_s[size])
        for job in jobs
        if job.job.curve is not None
        for size, speed in job.truth.items()
    ]
    assert len(set(logs)) == 1600
    assert mean(logs) == pytest.approx(0.0, abs=0.01)
    assert pstdev(logs) == pytest.approx(0.1, rel=0.1)
    assert all(dict(job.job.curve.steps_per_s) == {1: 1.0, 2: 1.8, 4: 3.0, 8: 4.0} for job in jobs if job.job.curve)
    again = ready(*rows, throughput_error=0.1, seed=3)
    assert [job.truth for job in again] == [job.truth for job in jobs]
    assert [job.truth for job in ready(*rows, throughput_error=0.1, seed=4)] != [job.truth for job in jobs]


def test_a_job_keeps_its_error_whoever_else_is_there(ready: Callable[..., list[SimulatedJob]]) -> None:
    alone = ready("b,1,100,net,8,500", throughput_error=0.2)
    beside = ready("a,0,100,net,8,500", "b,1,100,net,8,500", throughput_error=0.2)
    assert beside[1].truth == alone[0].truth
    assert beside[0].truth != beside[1].truth


def test_jitter_moves_deadlines_within_its_part_and_not_with_the_error(
    ready: Callable[..., list[SimulatedJob]],
) -> None:
    rows = [f"j{i},100,100,net,8,1100" for i in range(50)]
    exact = [job.job.deadline_s for job in ready(*rows, deadline_jitter=0.2, seed=1)]
    assert all(deadline is not None and 900 <= deadline <= 1300 for deadline in exact)
    assert len(set(exact)) == 50
    assert [job.job.deadline_s for job in ready(*rows, deadline_jitter=0.2, seed=1, throughput_error=0.1)] == exact


def test_deadlines_are_soft_where_jobs_may_be_late(ready: Callable[..., list[SimulatedJob]]) -> None:
    rows = ("a,100,100,net,8,500", "b,100,100,net,8,")
    assert [job.job.latest_deadline_s for job in ready(*rows)] == [None, None]
    soft = ready(*rows, on_reject=OnReject.LATE, late_by=0.25)
    assert [job.job.latest_deadline_s for job in soft] == [600.0, None]
    assert soft[0].job.value_at(550.0) == 0.5


def test_a_job_that_fits_at_no_size_is_refused_with_its_line(
    ready: Callable[..., list[SimulatedJob]], uneven: Callable[..., tuple[Node, ...]]
) -> None:
    with pytest.raises(InputError, match=r"trace.csv:3: job 'big' needs at least 4 slots; the largest block .* is 2"):
        ready("a,0,1,net,8,50", "big,0,1,net,64,50", nodes=uneven(2))
    with pytest.raises(InputError, match=r"needs at least 4 slots; the largest block of this cluster is 2"):
        ready("big,0,1,net,64,50", nodes=uneven(3, 3))  # six slots, and yet no block of four
    assert len(ready("big,0,1,net,64,50", nodes=uneven(3, 5))) == 1


def test_an_unknown_model_is_refused_with_its_line(ready: Callable[..., list[SimulatedJob]]) -> None:
    with pytest.raises(InputError, match=r"trace.csv:2: unknown model 'bert'; the tables have \['net'\]"):
        ready("a,0,1,bert,8,50")
    with pytest.raises(InputError, match=r"trace.csv:3: model 'net' has no curve for batch size 16; there are \[8, 64"):
        ready("a,0,1,net,8,50", "b,0,1,net,16,50")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pause_s", -1.0),
        ("pause_s", math.inf),
        ("tail_s", math.nan),
        ("startup_s", -0.5),
        ("throughput_error", -0.1),
        ("speed_factor", 0.0),
        ("deadline_jitter", 1.0),
        ("late_by", -0.5),
    ],
)
def test_conditions_say_which_number_is_wrong(field: str, value: float) -> None:
    with pytest.raises(InputError, match=f"{field} is {value!r}; it must be"):
        Conditions(**{field: value})  # type: ignore[arg-type]  # one field by its name


def test_a_cluster_of_equal_nodes_is_in_the_order_of_its_names() -> None:
    nodes = cluster(12, 3)
    assert [node.node_id for node in nodes] == sorted(node.node_id for node in nodes)
    assert [node.slots for node in nodes] == [3] * 12
    for wrong in [(0, 4), (4, 0), (-1, 1)]:
        with pytest.raises(InputError, match="give at least 1"):
            cluster(*wrong)


def test_all_speeds_can_be_a_part_of_those_of_the_curves(ready: Callable[..., list[SimulatedJob]]) -> None:
    (job,) = ready("a,0,100,net,8,500", speed_factor=0.9)
    assert job.job.curve is not None
    assert dict(job.truth) == pytest.approx({size: 0.9 * speed for size, speed in job.job.curve.steps_per_s.items()})
