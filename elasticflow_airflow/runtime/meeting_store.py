"""A key-value store for workers that meet, on one address of this machine alone.

May import torch and the standard library only.
"""

from __future__ import annotations

import datetime
import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, but not marked so by torch


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
