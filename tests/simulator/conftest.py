"""Shared means of the simulator's tests: small traces, curves and clusters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from elasticflow_airflow.scheduler_core.model.values import Job, Node, RescaleCosts, ScalingCurve
from elasticflow_airflow.scheduler_core.simulator.run import SimulatedJob

HEADER = "job_id,submitted_s,steps,model,batch_size,deadline_s"


@pytest.fixture
def trace_file(tmp_path: Path) -> Callable[..., Path]:
    """Write a trace of the given lines; the header is our own shortest one unless told otherwise."""

    def write(*rows: str, header: str = HEADER) -> Path:
        path = tmp_path / "trace.csv"
        path.write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture
def curves_folder(tmp_path: Path) -> Callable[..., Path]:
    """Write a folder with one table, its text as given."""

    def write(text: str, model: str = "net") -> Path:
        folder = tmp_path / "curves"
        folder.mkdir(exist_ok=True)
        (folder / f"{model}.csv").write_text(text, encoding="utf-8")
        return folder

    return write


@pytest.fixture
def uneven() -> Callable[..., tuple[Node, ...]]:
    """Nodes of the given sizes, in this order."""
    return lambda *sizes: tuple(Node(node_id=f"n{i:02}", slots=size) for i, size in enumerate(sizes))


@pytest.fixture
def simulated() -> Callable[..., SimulatedJob]:
    """A job that is told one curve and runs at another (by default the same)."""

    def make(
        job_id: str,
        *,
        at_s: float = 0.0,
        steps: float = 100.0,
        deadline_s: float | None = None,
        curve: Mapping[int, float] | None = None,
        truth: Mapping[int, float] | None = None,
        startup_s: float = 0.0,
        pause_s: float = 0.0,
        tail_s: float = 0.0,
        **more: object,
    ) -> SimulatedJob:
        speeds = dict(curve or {1: 1.0, 2: 2.0, 4: 4.0})
        job = Job(
            job_id=job_id,
            submitted_s=at_s,
            deadline_s=deadline_s,
            total_steps=steps,
            curve=ScalingCurve(speeds),
            costs=RescaleCosts(startup_s=startup_s, pause_s=pause_s, tail_s=tail_s),
            explore=False,
            **more,  # type: ignore[arg-type]  # tests pass the rest of Job's fields by name
        )
        return SimulatedJob(job=job, truth=dict(truth or speeds), arrives_s=at_s)

    return make
