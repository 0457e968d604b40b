"""Tests of your DAGs: a pytest plugin with a private Airflow home, ``run_dag``, and a simulated cluster.

Load it before anything imports Airflow, in ``pyproject.toml``::

    [tool.pytest.ini_options]
    addopts = ["-p", "elasticflow_airflow.testing"]

Then, in a test::

    def test_the_model_is_there_by_six(run_dag):
        result = run_dag("dags/retrain.py", run_after=datetime(2026, 11, 2, 1, 0, tzinfo=UTC))
        assert result.succeeded, result
        assert result.jobs["train"].met

Fixtures: ``run_dag`` (see :class:`RunDag`), ``airflow_home`` (the private home). Everything created is removed when the
process ends. Importing this module outside pytest has no side effects.
"""

from __future__ import annotations

from elasticflow_airflow.testing.cluster import SimulatedCluster, SimulationStuckError
from elasticflow_airflow.testing.dags import DagError, find_dag
from elasticflow_airflow.testing.home import HomeError
from elasticflow_airflow.testing.results import ByTask, DagResult, JobOutcome, TaskOutcome
from elasticflow_airflow.testing.running import RunDag
from elasticflow_airflow.testing.trainings import DEFAULT_CURVE, SimulatedTraining

pytest_plugins = ("elasticflow_airflow.testing.plugin",)
"""Where the fixtures are: pytest reads this when it loads this module as a plugin."""

__all__ = [
    "DEFAULT_CURVE",
    "ByTask",
    "DagError",
    "DagResult",
    "HomeError",
    "JobOutcome",
    "RunDag",
    "SimulatedCluster",
    "SimulatedTraining",
    "SimulationStuckError",
    "TaskOutcome",
    "find_dag",
]
