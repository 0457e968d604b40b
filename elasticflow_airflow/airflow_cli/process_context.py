"""Sets Airflow's process context, which decides whether connections may be read from the metadata database."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_CONTEXT = "_AIRFLOW_PROCESS_CONTEXT"


@contextmanager
def reading_the_database() -> Iterator[None]:
    """Also find connections in the metadata database, as ``airflow connections`` does: this is not a task."""
    before = os.environ.get(_CONTEXT)
    os.environ[_CONTEXT] = "server"
    try:
        yield
    finally:
        del os.environ[_CONTEXT]
        if before is not None:
            os.environ[_CONTEXT] = before
