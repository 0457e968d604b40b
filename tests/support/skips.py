"""What a run skipped, and why, at its end: one whole line for each reason, however many tests it is about.

Tests that a run has no time for are skipped, too, and such a run has failed: see ``TESTS_BEGIN_UNTIL``.

pytest cuts its own lines to the terminal's width, folds them by where the skip is written, and tells nothing of modules
that are skipped as a whole where several processes run the tests.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import pytest

_MODULES: pytest.StashKey[list[tuple[str, str]]] = pytest.StashKey()
"""Modules that were skipped as a whole: their paths, and the reasons."""
_BEGIN_UNTIL = "TESTS_BEGIN_UNTIL"
"""Environment variable with Unix seconds: no test begins after them, so that a run ends in time to say what failed."""
_NOT_RUN = "NOT RUN, as the time that this run was given is over"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if time.time() > float(os.environ.get(_BEGIN_UNTIL, "inf")):
        pytest.skip(_NOT_RUN)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_MODULES] = []


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    report = yield
    if report.skipped:
        collector.config.stash[_MODULES].append((report.nodeid, _reason(report)))
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of many tells the one that started it. What was not run is not known to work."""
    if any(_reason(one) == _NOT_RUN for one in _skipped(session.config)) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["skipped modules"] = session.config.stash[_MODULES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Where several processes run the tests, all of them collect the same."""
    known = node.config.stash[_MODULES]
    told = getattr(node, "workeroutput", {}).get("skipped modules", ())  # One that died has told nothing.
    known += [module for module in map(tuple, told) if module not in known]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    reports = _skipped(config)
    tests = Counter(_reason(one) for one in reports)
    modules = {reason: path for path, reason in reversed(config.stash[_MODULES])}
    wholly = Counter(reason for _, reason in config.stash[_MODULES])
    examples = {**{_reason(one): one.nodeid.split("[")[0] for one in reversed(reports)}, **modules}
    if not examples:
        return
    terminalreporter.write_sep("=", "skipped, and why")
    for reason in sorted(examples):
        numbers = [(wholly[reason], "module"), (tests[reason], "test")]
        what = " and ".join(f"{n} {kind}{'s' if n > 1 else ''}" for n, kind in numbers if n)
        others = ", and others" if tests[reason] + wholly[reason] > 1 else ""
        terminalreporter.write_line(f"{what}: {reason} ({examples[reason]}{others})")


def _skipped(config: pytest.Config) -> list[pytest.TestReport]:
    """Return what the tests that were skipped reported; empty in one process of many, which reports to another."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    found = () if reporter is None else reporter.stats.get("skipped", ())
    return [one for one in found if isinstance(one, pytest.TestReport)]


def _reason(report: Any) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return " ".join(text.removeprefix("Skipped: ").split())
