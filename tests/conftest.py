"""What holds for all tests."""

import signal
from fnmatch import fnmatch
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import LoadScopeScheduling

# The same examples for the same code: a new one is found by `make soak`, not by whoever changes something else. Nor by
# whoever writes a number into another file: hypothesis would try the constants of all modules that are imported.
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
if hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = lambda: providers._local_constants

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell without job control starts what runs in the background so, and every process below inherits it: none of
    # those that the tests interrupt would notice.
    signal.signal(signal.SIGINT, signal.default_int_handler)

TRAINING = ("demo/", "runtime/", "service/*_local.py")
"""Where slow tests train for long, with workers that need the cores. Those of the engines train, too, but little: with
them both processes have as much to do."""


class Rooms(LoadScopeScheduling):
    """One process runs what trains, another one what mostly waits, each one test at a time."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0].removeprefix("tests/")
        return "trains" if any(fnmatch(path, f"{pattern}*") for pattern in TRAINING) else "waits"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """``--dist loadscope`` goes by :class:`Rooms`."""
    return Rooms(config, log) if config.getvalue("dist") == "loadscope" else None
