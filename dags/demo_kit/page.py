"""A private Airflow api-server with the page of this demo: to watch while it runs, and to look at afterwards."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import psutil

from demo_kit.layout import DemoPaths

_POLITENESS = 10
"""The trainings come first: on two cores the server would slow them down."""
_LOOK_S = 0.5


def start(layout: DemoPaths) -> str:
    """Start it, once Airflow's database is there; it answers some seconds later. Returns the page's address."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    settings = {
        "API__BASE_URL": url,
        "API__HOST": "127.0.0.1",
        "API__PORT": str(port),
        "API__SECRET_KEY": secrets.token_urlsafe(32),
        "API__WORKERS": "1",
        "API_AUTH__JWT_SECRET": secrets.token_urlsafe(64),
        "CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
    }
    with (layout.root / "api-server.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "airflow", "api-server"],
            env=os.environ | {f"AIRFLOW__{name}": value for name, value in settings.items()},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    server = psutil.Process(process.pid)
    address = f"{url}/plugin/elasticflow"
    noted = {"pid": server.pid, "created_at": server.create_time(), "address": address}
    layout.page.write_text(json.dumps(noted))
    server.nice(_POLITENESS)
    return address


def stay(layout: DemoPaths) -> str | None:
    """Return the page's address if its server runs and answers; None otherwise."""
    if layout.page_server() is None:
        return None
    address = str(json.loads(layout.page.read_text())["address"])
    with suppress(OSError):
        urllib.request.urlopen(address, timeout=10).close()  # noqa: S310 - our own address
        return address
    return None


def wait_while_it_runs(layout: DemoPaths) -> None:
    """Return when the server has ended; Ctrl-C raises KeyboardInterrupt."""
    while layout.page_server() is not None:
        time.sleep(_LOOK_S)
