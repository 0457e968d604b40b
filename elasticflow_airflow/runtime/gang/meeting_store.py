"""The rendezvous store of a generation: rank 0 serves it and publishes its address, the others wait for that address.

A generation can have two stores, each with its own address file. torchrun needs one before the script starts, which
its agent holds; sessions also need one for a change in place, in which no agent takes part. Workers started before an
upgrade meet workers of the new release under these exact file names. May import torch and the standard library only.
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


def publish_store(path: Path, address: str, limit: datetime.timedelta) -> TCPStore:
    """Open a store at ``address``, on a free port, and write both to ``path``; operations time out after ``limit``.

    By default torch's store listens on all interfaces without authentication, so this function passes in its own
    socket. With port 0 the kernel picks a free port, so no other process can take it between choice and use. Raises
    OSError if the address does not belong to this machine.
    """
    family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server((address, 0), family=family)
    port = listener.getsockname()[1]
    store = TCPStore(
        address, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=listener.detach()
    )
    write_json_atomic(path, {"address": address, "port": store.port})
    return store


def wait_for_address(path: Path, stopped: Callable[[], bool]) -> tuple[str, int] | None:
    """Wait until rank 0 has published its store in ``path``; return host and port, or None once stopped."""
    while (found := read_json(path)) is None:
        if stopped():
            return None
        time.sleep(_POLL_S)
    return str(found["address"]), int(found["port"])
