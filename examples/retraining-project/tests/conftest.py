"""What the tests of this project share: where the DAG is, and a night in autumn."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from zoneinfo import ZoneInfo

import pytest


@pytest.fixture
def dag_file() -> Path:
    """The file of the DAG, as Airflow reads it."""
    return Path(__file__).parents[1] / "dags" / "nightly_models.py"


@pytest.fixture
def one_o_clock() -> datetime:
    """When the run of a night is due."""
    return datetime(2026, 11, 3, 1, 0, tzinfo=ZoneInfo("Europe/Berlin"))
