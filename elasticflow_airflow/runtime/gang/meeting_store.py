"""The store in which workers of a generation meet: rank 0 serves it and publishes its address, the others wait for it.

A generation can have two of them, in files of their own: torchrun needs one before the script starts, and its agent
holds it; sessions need one at a change in place too, where no agent takes part. A worker that was started before an
upgrade meets workers of the new release under these very names. May import torch and the standard library only.
"""

from __future__ import annotations

import datetime
import socket
import time
from collections.abc import Callable
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked so by torch

from elasticflow_airflow.runtime.protocol import read_json, write_json_atomic

_POLL_S = 0.01


def serve_store(address: str, limit: datetime.timedelta) -> TCPStore:
    """Open a store at ``address``, on a port that is free; operations on it wait for ``limit`` at most.

    A store of torch listens on all interfaces by itself, and asks nobody who he is: hence a socket of our own. Port 0:
    the kernel picks one that is free, and nobody can take it between choice and use. Raises OSError for an address
    that is not this machine's.
    """
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
    )


def publish_store(path: Path, address: str, limit: datetime.timedelta) -> TCPStore:
    """Open a store as :func:`serve_store` does, and write its address to ``path``."""
    store = serve_store(address, limit)
    write_json_atomic(path, {"address": address, "port": store.port})
    return store


def wait_for_address(path: Path, stopped: Callable[[], bool]) -> tuple[str, int] | None:
    """Wait until rank 0 has published its store in ``path``: its host and port; None once ``stopped`` says so."""
    while (found := read_json(path)) is None:
        if stopped():
            return None
        time.sleep(_POLL_S)
    return str(found["address"]), int(found["port"])
