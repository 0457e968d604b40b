"""Shared means of the scheduler's tests: the independent checker, a virtual world, the data beside the checkout."""

from __future__ import annotations

import csv
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from elasticflow_airflow.scheduler_core.model.values import Job, Node, RescaleCosts, ScalingCurve

HERE = Path(__file__).parent
DATA = HERE.parents[2] / "shared" / "data"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scheduler_core_{name}", HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def plan_checker() -> ModuleType:
    return _load("plan_checker")


@pytest.fixture(scope="session")
def world() -> ModuleType:
    return _load("world")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    if not DATA.is_dir():
        pytest.skip(f"needs the data folder {DATA} beside the checkout")
    return DATA


@pytest.fixture(scope="session")
def a100_curves(data_dir: Path) -> dict[tuple[str, int], dict[int, float]]:
    curves: dict[tuple[str, int], dict[int, float]] = {}
    for path in sorted((data_dir / "throughput" / "a100").glob("*.csv")):
        with path.open() as file:
            for row in csv.DictReader(file):
                batch = int(row.pop("global_batch_size"))
                speeds = {int(n): float(v) for n, v in row.items() if v and v != "nan"}
                curves[path.stem, batch] = {n: v for n, v in speeds.items() if v > 0}
    return curves


@pytest.fixture
def make_job() -> Callable[..., Job]:
    def make(
        job_id: str = "a",
        *,
        steps: float | None = 100.0,
        deadline: float | None = 1000.0,
        curve: dict[int, float] | None = {1: 1.0, 2: 1.6, 4: 2.4},  # noqa: B006
        startup: float = 0.0,
        pause: float = 0.0,
        tail: float = 0.0,
        **more: object,
    ) -> Job:
        return Job(
            job_id=job_id,
            submitted_s=0.0,
            deadline_s=deadline,
            total_steps=steps,
            curve=ScalingCurve(curve) if curve else None,
            costs=RescaleCosts(startup_s=startup, pause_s=pause, tail_s=tail),
            **more,  # type: ignore[arg-type]  # tests pass the rest of Job's fields by name
        )

    return make


@pytest.fixture
def nodes() -> Callable[..., list[Node]]:
    return lambda *sizes: [Node(node_id=f"n{i:03}", slots=size) for i, size in enumerate(sizes)]
