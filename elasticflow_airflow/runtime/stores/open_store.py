"""Opens the checkpoint store for a folder or a URL.

May import the standard library only, plus fsspec through remote.py for a URL.
"""

from __future__ import annotations

from pathlib import Path

from elasticflow_airflow.runtime.stores.store import LocalStore, Store, is_remote


def open_store(where: str | Path) -> Store:
    """Open a folder or an fsspec URL. Raises CheckpointError, with the reason, for a URL that cannot be used."""
    if not is_remote(where):
        return LocalStore(Path(where))
    from elasticflow_airflow.runtime.stores.remote import RemoteStore

    return RemoteStore(str(where))
