"""A Ray cluster on this machine for ``make demo-cluster``: a head without slots, and two nodes with one slot each."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import ray

from demo_kit.layout import DemoPaths

NODES = ("node0", "node1")
_START_LIMIT_S = 120.0


class RayCluster:
    """Started in the constructor; ``close`` ends all of it."""

    def __init__(self, layout: DemoPaths) -> None:
        self._layout = layout
        self._folder = Path(tempfile.mkdtemp(prefix="ef-ray-"))  # Short: Ray makes sockets far below it.
        token = self._folder / "token"
        token.write_text(secrets.token_hex(24))
        token.chmod(0o600)
        self._env = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
        }
        self._node_token = secrets.token_hex(24)
        # Ray takes this one of the machine's addresses, whatever it is told of 127.0.0.1.
        self._address = str(ray.util.get_node_ip_address())
        with socket.socket() as free:
            free.bind((self._address, 0))
            self._port = free.getsockname()[1]
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._log = layout.root / "ray.log"
        try:
            self._start(
                "head",
                "--head",
                f"--port={self._port}",
                "--num-cpus=0",
                "--include-dashboard=false",
                f"--temp-dir={self._folder}/r",
            )
            # One after the other: on one machine they may take one port.
            for number, name in enumerate(NODES, start=1):
                self._wait("Ray runtime started.", number)
                self.start_node(name)
            self._wait("Ray runtime started.", 1 + len(NODES))
        except BaseException:
            self.close()
            raise

    def environment(self) -> dict[str, str]:
        """Return what the service needs to use it."""
        return {
            "ELASTICFLOW_ENGINE": "ray",
            "ELASTICFLOW_RAY_ADDRESS": f"{self._address}:{self._port}",
            "ELASTICFLOW_SHARED_DIR": str(self._layout.root / "shared"),
            "ELASTICFLOW_NODE_FOLDER": str(self._layout.root / "nodes"),
            "ELASTICFLOW_NODE_TOKEN": self._node_token,
            # Two busy cores: an agent may have to wait for its turn.
            "ELASTICFLOW_SUSPICION_S": "10",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": self._env["RAY_AUTH_TOKEN_PATH"],
            "CUDA_VISIBLE_DEVICES": "",
        }

    def kill(self, name: str) -> None:
        """Kill a node as a whole, as when its machine loses its power."""
        first = self._nodes.pop(name)
        with suppress(psutil.NoSuchProcess):
            all_of_it = [psutil.Process(first.pid), *psutil.Process(first.pid).children(recursive=True)]
            for process in all_of_it:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        first.wait()

    def start_node(self, name: str) -> None:
        """Start a node, again if it was killed; it joins the cluster seconds later."""
        self._start(name, f"--address={self._address}:{self._port}", "--num-cpus=1")

    def close(self) -> None:
        """End Ray, and with it the agents and workers that are left."""
        for name in list(self._nodes):
            self.kill(name)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, name: str, *words: str) -> None:
        command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block", *words]
        with self._log.open("ab") as log:
            self._nodes[name] = subprocess.Popen(
                [
                    *command,
                    f"--node-name={name}",
                    f"--node-ip-address={self._address}",
                    "--num-gpus=0",
                    "--object-store-memory=80000000",
                    "--disable-usage-stats",
                ],
                env=self._env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _wait(self, said: str, times: int) -> None:
        end_s = time.monotonic() + _START_LIMIT_S
        while self._log.read_text(errors="replace").count(said) < times:
            if time.monotonic() > end_s or any(node.poll() is not None for node in self._nodes.values()):
                raise RuntimeError(f"Ray does not start: {self._log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.1)
