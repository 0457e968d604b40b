"""Opens the store of checkpoints that a folder or a URL names.

May import the standard library only, and fsspec through remote.py where there is a URL.
"""

from __future__ import annotations

from pathlib import Path

from elasticflow_airflow.runtime.stores.store import LocalStore, Store, is_remote


def open_store(where: str | Path) -> Store:
    """Open a folder or an fsspec URL. Raises CheckpointError for a URL that cannot be served, saying why."""
    if not is_remote(where):
        return LocalStore(Path(where))
    from elasticflow_airflow.runtime.stores.remote import RemoteStore

    return RemoteStore(str(where))
