"""The pytest plugin: creates the private home, defines fixtures. Loaded by ``-p elasticflow_airflow.testing``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from _pytest._code.code import ExceptionRepr

from elasticflow_airflow.api import ServiceCard
from elasticflow_airflow.client import Endpoint, ensure_service
from elasticflow_airflow.testing.cluster import SimulatedCluster
from elasticflow_airflow.testing.home import Home, HomeError
from elasticflow_airflow.testing.running import RunDag

_home: Home | None = None
_RUNS = pytest.StashKey[RunDag]()
_STOP_LIMIT_S = 20.0


def pytest_plugin_registered() -> None:
    """Create the private home as early as pytest lets a plugin act: conftest files may import DAGs."""
    global _home
    if _home is None:
        try:
            _home = Home()
        except HomeError as error:
            raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, Any, Any]:
    """Add the results of a failed test's DAG runs to its report: pytest truncates ``assert ..., result``."""
    report = yield
    if call.when == "call" and report.failed and _RUNS in item.stash:
        shown = report.longrepr
        for result in item.stash[_RUNS].results:
            if isinstance(shown, ExceptionRepr):  # its own sections are shown regardless of --show-capture
                shown.addsection(f"run of DAG {result.dag_id}", repr(result), "-")
            else:  # a plugin has replaced it
                report.sections.append((f"run of DAG {result.dag_id}", repr(result)))
    return report


@pytest.fixture(scope="session")
def airflow_home() -> Path:
    """The private AIRFLOW_HOME of this test process."""
    return _the_home().path


@pytest.fixture(scope="session")
def _local_service(airflow_home: Path) -> Iterator[Callable[[int], Endpoint]]:
    """Function that returns the service with real training for a number of slots, started on first use."""
    started: dict[int, Endpoint] = {}

    def start(slots: int) -> Endpoint:
        if slots not in started:
            started[slots] = _start_service(airflow_home / f"local{slots}", slots)
        return started[slots]

    yield start
    for endpoint in started.values():
        _stop_service(endpoint)


@pytest.fixture
def run_dag(_local_service: Callable[[int], Endpoint], request: pytest.FixtureRequest) -> Iterator[RunDag]:
    """Run a DAG to its end and return its result: see :class:`RunDag`. Each test has its own cluster."""
    clusters: list[SimulatedCluster] = []

    def prepare() -> None:
        cache = getattr(request.config, "cache", None)  # pytest can run without a cache
        _the_home().ensure_database(None if cache is None else Path(cache.mkdir("elasticflow")))

    def cluster(start_at: float | None) -> SimulatedCluster:
        if not clusters:
            home = _the_home()
            empty = home.path / "empty-elasticflow.db"
            made = SimulatedCluster(home.new_folder(), start_at=start_at, empty_store=empty)
            clusters.append(made)
            stack.callback(made.close)
        return clusters[0]

    with ExitStack() as stack:
        request.node.stash[_RUNS] = runner = RunDag(prepare, cluster, _local_service)
        yield runner


def _start_service(folder: Path, slots: int) -> Endpoint:
    """Start the embedded service of this machine with ``slots`` CPU slots. Raises EmbeddedStartError."""
    return ensure_service(
        folder,
        {
            "ELASTICFLOW_ENGINE": "local",
            "ELASTICFLOW_SLOTS": str(slots),
            "ELASTICFLOW_SLOT_LOCK_DIR": str(folder / "slots"),
            "ELASTICFLOW_IDLE_EXIT_S": "120",
        },
    )


def _stop_service(endpoint: Endpoint) -> None:
    """Stop the service; the jobs of a test are over by then, or have been cancelled."""
    folder = endpoint.embedded_state_dir
    card = None if folder is None else ServiceCard.read(folder)
    if folder is None or card is None:
        return
    with suppress(ProcessLookupError):
        os.kill(card.pid, signal.SIGTERM)
    end_s = time.monotonic() + _STOP_LIMIT_S
    while (folder / "service.sock").exists() and time.monotonic() < end_s:
        time.sleep(0.02)


def _the_home() -> Home:
    if _home is None:
        raise HomeError("elasticflow_airflow.testing is no plugin of this pytest run: load it with -p")
    return _home
