"""The actor on each node of a Ray cluster: has the node's agent started, found again, and exchanged.

Ray kills the children of an actor when its raylet dies, also those in sessions of their own. So the agent is forked
twice (``agent_process.py``), and the next actor finds it by the card in its folder.
"""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

from elasticflow_airflow import __version__
from elasticflow_airflow.engines.cluster.agent_card import AgentCard
from elasticflow_airflow.engines.local.machine.processes import ProcessId
from elasticflow_airflow.engines.ray.messages import AgentSettings

START_LIMIT_S = 60.0
_LOOK_S = 0.05
_OWNER_S = 30.0
"""A service that has not asked for so long has ended: another one may take its place."""


class NodeActor:
    """Runs on a node of a Ray cluster, one for each; everything that it knows is in the agent's folder."""

    def __init__(self) -> None:
        self._owner, self._asked_s = "", 0.0

    def version(self) -> str:
        """Return the version of this package with which the actor runs."""
        return __version__

    def ensure_agent(self, settings_json: str) -> str:
        """Return where the node's agent listens; one with other settings, or none, is replaced first.

        Raises RuntimeError with the agent's last words when it does not start, and when another service uses the node.
        """
        settings = AgentSettings.model_validate_json(settings_json)
        if self._owner not in ("", settings.owner) and time.monotonic() - self._asked_s < _OWNER_S:
            raise RuntimeError(
                f"it is used by the service {self._owner}: end that one, or give each a namespace of its own with"
                " ELASTICFLOW_RAY_NAMESPACE, and slots that Ray has free"
            )
        self._owner, self._asked_s = settings.owner, time.monotonic()
        folder = (settings.folder or _own_folder()) / settings.namespace / settings.node_id
        card = AgentCard.read(folder)
        if card is not None and card.process.is_alive():
            if card.fingerprint == self._fingerprint(settings):
                return card.url
            card.end()
        return self._start(folder, settings)

    def _fingerprint(self, settings: AgentSettings) -> str:
        # One that ends with its actor is of no use to another actor.
        return settings.fingerprint + ("" if settings.reserved else f" {os.getpid()}")

    def _start(self, folder: Path, settings: AgentSettings) -> str:
        import ray

        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log = folder / "agent.log"
        me = ProcessId.current()
        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        words = ["-m", "elasticflow_airflow.engines.ray.agent_process", str(folder), address]
        if not settings.reserved:
            words += [str(me.pid), str(me.start)]
        with log.open("ab") as said:
            begin = said.tell()
            starting = subprocess.run(
                [sys.executable, *words],
                input=settings.model_dump_json().encode(),
                stdout=said,
                stderr=said,
                env=_without_ray(os.environ),
                cwd=folder,
                check=False,
            )
        end_s = time.monotonic() + START_LIMIT_S
        while starting.returncode == 0 and time.monotonic() < end_s:
            card = AgentCard.read(folder)
            if card is not None and card.fingerprint == self._fingerprint(settings) and card.process.is_alive():
                return card.url
            if "cannot start" in _said_since(log, begin):
                break
            time.sleep(_LOOK_S)
        last = _said_since(log, begin).strip().splitlines()[-3:]
        raise RuntimeError(f"its agent does not start: {' / '.join(last) or 'no output'}")


def _said_since(log: Path, begin: int) -> str:
    with log.open("rb") as said:
        said.seek(begin)
        return said.read().decode(errors="replace")


def _own_folder() -> Path:
    """Return a folder that nobody else can have made or can change. Raises RuntimeError."""
    folder = Path(f"/var/tmp/elasticflow-{os.getuid()}")  # noqa: S108  (checked below)
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise RuntimeError(f"{folder} belongs to somebody else: remove it, or set ELASTICFLOW_NODE_FOLDER")
    return folder


def _without_ray(environ: os._Environ[str]) -> dict[str, str]:
    """Return the environment without Ray's own variables: among them is the cluster's token."""
    return {name: value for name, value in environ.items() if not name.startswith("RAY_")}
