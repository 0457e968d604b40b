"""Two replicas of the service for ``make demo-cluster``: ``elasticflow serve`` twice, on one PostgreSQL."""

from __future__ import annotations

import base64
import json
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

import httpx

from demo_kit.database import Database
from demo_kit.layout import DemoPaths

NAMES = ("replica0", "replica1")
_START_LIMIT_S = 180.0
_LOOK_S = 0.1
_ASK_LIMIT_S = 5.0


class Replicas:
    """Each has a port and a folder of its own; token, key and database are the same. ``settings`` are the engine's."""

    def __init__(self, layout: DemoPaths, settings: Mapping[str, str]) -> None:
        self._layout, self._settings = layout, settings
        self._database = Database(layout.database_dir)
        self._token, self._key = secrets.token_hex(24), base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
        self._ports = dict(zip(NAMES, _free_ports(len(NAMES)), strict=True))
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self) -> dict[str, str]:
        """Return what names all replicas: to Airflow its connection, and to the ``elasticflow`` command its variables.

        An Airflow that is set up for good has this connection in its database.
        """
        hosts = [f"127.0.0.1:{port}" for port in self._ports.values()]
        connection = {"conn_type": "elasticflow", "host": ",".join(hosts), "password": self._token}
        return {
            "AIRFLOW_CONN_ELASTICFLOW_DEFAULT": json.dumps(connection),
            "ELASTICFLOW_URL": ",".join(f"http://{host}" for host in hosts),
            "ELASTICFLOW_TOKEN": self._token,
        }

    def start(self) -> None:
        """Start the database and all replicas, and return when one of them decides. Raises RuntimeError."""
        self._database.start()
        for name in NAMES:
            self.start_one(name)
        end_s = time.monotonic() + _START_LIMIT_S
        while self.leader() is None:
            ended = [name for name, process in self._running.items() if process.poll() is not None]
            if ended or time.monotonic() > end_s:
                name = next(iter(ended), NAMES[0])
                said = (self._layout.replicas_dir / name / "service.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the replicas of the service do not start, {name} says: {said}")
            time.sleep(_LOOK_S)

    def leader(self) -> str | None:
        """Return the replica that decides at this moment; None: nobody does."""
        return next((name for name in list(self._running) if self._decides(name)), None)

    def start_one(self, name: str) -> None:
        """Start a replica, again if it was killed; it answers seconds later."""
        folder, port = self._layout.replicas_dir / name, self._ports[name]
        folder.mkdir(parents=True, exist_ok=True)
        own = {
            "ELASTICFLOW_STATE_DIR": str(folder),
            "ELASTICFLOW_HOST": "127.0.0.1",
            "ELASTICFLOW_PORT": str(port),
            "ELASTICFLOW_ADVERTISE_URL": f"http://127.0.0.1:{port}",
            "ELASTICFLOW_TOKEN": self._token,
            "ELASTICFLOW_SECRET_KEY": self._key,
            "ELASTICFLOW_DATABASE_URL": self._database.url,
        }
        with (folder / "service.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                # What `elasticflow serve` runs; bring_down() finds it by these arguments.
                [sys.executable, "-m", "elasticflow_airflow.service", "--state-dir", str(folder)],
                env={**self._settings, **own},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self, name: str) -> None:
        """Kill a replica as the kernel does: it can say and save nothing any more."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def _decides(self, name: str) -> bool:
        """Ask a replica what only the one that decides answers; by the header, it does not pass the question on."""
        try:
            answer = httpx.get(
                f"http://127.0.0.1:{self._ports[name]}/v1/cluster",
                headers={"Authorization": f"Bearer {self._token}", "x-elasticflow-forwarded": "1"},
                timeout=_ASK_LIMIT_S,
                trust_env=False,
            )
        except httpx.TransportError:
            return False  # It starts, or was killed.
        return answer.status_code == httpx.codes.OK


def _free_ports(count: int) -> list[int]:
    """Return ports of 127.0.0.1 that nobody uses at this moment."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()
