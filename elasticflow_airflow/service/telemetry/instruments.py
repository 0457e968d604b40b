"""Metrics of this process: the durations of scheduling decisions and of database statements.

They start at zero in each process, as Prometheus expects of histograms. Events are counted elsewhere, from the event
log, and those counts continue across restarts (``tallies.py``). Knows nothing of the service's rules.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from prometheus_client import CollectorRegistry, Histogram

PROCESS = CollectorRegistry()
"""The metrics that belong to this process alone."""

_FINE = (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0)

DECISION_S = Histogram(
    "elasticflow_decision_seconds",
    "Time that the scheduler took to answer an event.",
    ["event"],
    registry=PROCESS,
    buckets=_FINE,
)
STATEMENT_S = Histogram(
    "elasticflow_store_statement_seconds",
    "Time that a statement took in the database; begin and lock wait for other writers.",
    ["statement"],
    registry=PROCESS,
    buckets=_FINE,
)
_KINDS = ("select", "insert", "update", "delete", "begin")
_BEGAN = "elasticflow_began_s"


@contextmanager
def deciding(event: object) -> Iterator[None]:
    """Measure how long the scheduler takes to answer one event."""
    began_s = time.perf_counter()
    try:
        yield
    finally:
        DECISION_S.labels(event=type(event).__name__).observe(time.perf_counter() - began_s)


def measure_statements(engine: sa.Engine) -> None:
    """Measure every statement on this engine from now on."""

    def before(connection: sa.Connection, *_: Any) -> None:
        connection.info[_BEGAN] = time.perf_counter()

    def after(connection: sa.Connection, _cursor: Any, statement: str, *_: Any) -> None:
        began_s = connection.info.pop(_BEGAN, None)
        if began_s is not None:
            STATEMENT_S.labels(statement=_kind(statement)).observe(time.perf_counter() - began_s)

    sa.event.listen(engine, "before_cursor_execute", before)
    sa.event.listen(engine, "after_cursor_execute", after)


def _kind(statement: str) -> str:
    if "pg_advisory" in statement:
        return "lock"
    word = statement.lstrip()[:6].lower().strip()
    return next((kind for kind in _KINDS if word.startswith(kind)), "other")
