"""What holds for all tests."""

import gc
import signal
from fnmatch import fnmatch
from typing import Any

import pytest
import structlog
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from support.marked_files import pytest_collection_modifyitems, pytest_ignore_collect  # noqa: F401  (hooks)
from support.skips import (  # noqa: F401  (hooks)
    pytest_configure,
    pytest_make_collect_report,
    pytest_runtest_setup,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from xdist.scheduler import LoadScopeScheduling

# The same examples for the same code: a new one is found by `make soak`, not by whoever changes something else. Nor by
# whoever writes a number into another file: hypothesis would try the constants of all modules that are imported.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts what runs in the background so, and every process below inherits it: none of
    # those that the tests interrupt would notice.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What tests break on purpose is logged with its traceback. Rich would take seconds for each, to show local variables.
structlog.configure(
    processors=[
        *(p for p in structlog.get_config()["processors"] if not isinstance(p, structlog.dev.ConsoleRenderer)),
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

TRAINING = ("demo/", "runtime/", "service/cluster/", "service/local/", "upgrade/")
"""Where slow tests train for long, with workers that need the cores. Those of the engines train, too, but little: with
them both processes have as much to do."""
STACK = "tests/airflow/stack"
LONGEST = (
    STACK,
    "tests/demo/",
    "tests/service/troubles/test_soak.py",
    "tests/service/cluster/test_random_faults.py",
    "tests/service/cluster/test_ray_service.py",
    "tests/engines/test_in_place_contract.py",
    "tests/service/leadership/test_failover.py",
    "tests/service/local/test_in_place.py",
    "tests/engines/troubles/",
    "tests/service/local/test_kills.py",
    "tests/packaging/test_docker.py",
    "tests/service/leadership/test_rolling_upgrade.py",
    "tests/engines/test_local_in_place.py",
    "tests/upgrade/",
    "tests/airflow/test_authoring.py",
    "tests/service/cluster/",
    "tests/ui/",
    "tests/runtime/test_rescale.py",
    "tests/runtime/test_in_place.py",
    "tests/engines/test_engine_contract.py",
    "tests/docs/test_tutorial.py",
    "tests/service/troubles/test_kills.py",
    "tests/service/troubles/test_setting_aside.py",
    "tests/engines/test_local_engine.py",
    "tests/testing/",
    "tests/docs/test_migrate_page.py",
    "tests/simulator/baselines/test_shared_traces.py",
)
"""What takes more than a minute, the longest first: what is left for the end is short."""


class Rooms(LoadScopeScheduling):
    """Every second process runs what trains, the others what mostly waits, file by file; who is done helps the others.

    All tests on real Airflow components are one piece: they share what takes a minute to start.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        return STACK if path.startswith(STACK) else path

    def _assign_work_unit(self, node: Any) -> None:
        trains = self.nodes.index(node) % 2 == 1
        own = [scope for scope in self.workqueue if is_training(scope) == trains]
        # What takes longest comes first: at the end it would keep one process waiting for the other.
        first = min(own or self.workqueue, key=rank)
        self.workqueue.move_to_end(first, last=False)
        super()._assign_work_unit(node)


def rank(scope: str) -> int:
    """Where the tests of a file stand among the longest."""
    return next((at for at, path in enumerate(LONGEST) if scope.startswith(path)), len(LONGEST))


def is_training(scope: str) -> bool:
    """Whether the tests of a file train for long."""
    return any(fnmatch(scope.removeprefix("tests/"), f"{pattern}*") for pattern in TRAINING)


def pytest_collection_finish() -> None:
    """Leave what was imported and collected alone: each garbage collection would walk through it, for nothing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadscope`` goes by :class:`Rooms`."""
    return Rooms(config, log) if config.getvalue("dist") == "loadscope" else None
