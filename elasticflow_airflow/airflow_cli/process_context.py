"""What Airflow takes this process for: by that it tells who may read connections from the metadata database."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_CONTEXT = "_AIRFLOW_PROCESS_CONTEXT"


@contextmanager
def reading_the_database() -> Iterator[None]:
    """Find connections in the metadata database, too, as ``airflow connections`` does: this is no task."""
    before = os.environ.get(_CONTEXT)
    os.environ[_CONTEXT] = "server"
    try:
        yield
    finally:
        del os.environ[_CONTEXT]
        if before is not None:
            os.environ[_CONTEXT] = before
