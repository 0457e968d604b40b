"""A Ray cluster: its head, without slots, on this machine, and a raylet on each of some machines (``machines.py``)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from support.machines import Machines

RAY_TOKEN = "b" * 48
_NODE_ID = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False)
print(*(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeName"] == sys.argv[2]))
"""
_RAY = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
_START = (
    *(*_RAY, "start", "--block"),
    *("--num-gpus=0", "--object-store-memory=80000000", "--disable-usage-stats", "--include-log-monitor=false"),
)


class RayMachines(Machines):
    """``slots``: CPUs of each machine; ``own_folder``: one that each has for itself.

    The head is at ``address``, with a temporary folder of its own.
    """

    def __init__(self, count: int, slots: int = 1, own_folder: Path | None = None) -> None:
        super().__init__(count)
        self.slots = slots
        self._folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Short: Ray makes sockets far below it.
        self._own_folders = [self._folder / "r", *([] if own_folder is None else [own_folder])]
        token = self._folder / "token"
        token.write_text(RAY_TOKEN)
        self.ray_env = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        with socket.socket() as free, socket.socket() as other:
            free.bind((self.outside, 0))
            other.bind((self.outside, 0))
            self.address = f"{self.outside}:{free.getsockname()[1]}"
            self._client_port = other.getsockname()[1]
        self.client_address = f"ray://{self.outside}:{self._client_port}"
        """Of the server for those that are not part of the cluster."""
        self.head: subprocess.Popen[bytes] | None = None

    def start_head(self, autoscaling: Mapping[str, Any] | None = None) -> None:
        """Start the head, at the same address each time. ``autoscaling``: the configuration of Ray's autoscaler."""
        port = self.address.rpartition(":")[2]
        words = [
            "--head",
            f"--port={port}",
            f"--ray-client-server-port={self._client_port}",
            "--num-cpus=0",
            f"--node-ip-address={self.outside}",
            "--node-name=head",
        ]
        if autoscaling is not None:
            config = self._folder / "autoscaling.json"
            config.write_text(json.dumps(autoscaling))
            words.append(f"--autoscaling-config={config}")
        (self._folder / "r" / "ray_current_cluster").unlink(missing_ok=True)
        with (self._folder / "head.log").open("wb") as log:
            self.head = subprocess.Popen(
                [*_START, *words, "--include-dashboard=false", f"--temp-dir={self._folder}/r"],
                env=self._env(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._wait(lambda: b"Ray runtime started" in (self._folder / "head.log").read_bytes(), "the head starts")

    def start_node(self, index: int, name: str | None = None) -> None:
        """Start a machine with its raylet; when that ends, all else goes on there."""
        # Each machine has files of its own where Ray, and the locks of slots, are.
        own = " && ".join(f"mkdir -p {folder} && mount -t tmpfs none {folder}" for folder in self._own_folders)
        command = ["sh", "-c", f'{own} && exec "$@"', "sh", *self._raylet(index, name or f"node{index}")]
        self.run(index, command, self._env())

    def start_ray(self, index: int) -> None:
        """Start the raylet of a machine again."""
        self.run_beside(index, self._raylet(index, f"node{index}"), self._env())

    def _raylet(self, index: int, name: str) -> list[str]:
        where = [f"--address={self.address}", f"--node-ip-address={self.addresses[index]}"]
        return [*_START, *where, f"--node-name={name}", f"--num-cpus={self.slots}"]

    def kill_raylet(self, index: int) -> None:
        """Kill Ray on a machine, but for what others started there."""
        for process in self.processes(index):
            if "raylet" in process.name() or "ray/scripts" in " ".join(process.cmdline()):
                process.kill()

    def drain(self, index: int, left_s: int) -> None:
        """Have Ray say that a node goes away, as its autoscaler does before a preemption."""
        asked = [sys.executable, "-c", _NODE_ID, self.address, f"node{index}"]
        node_id = subprocess.run(asked, env=self._env(), check=True, capture_output=True, text=True).stdout.split()[-1]
        reason = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", f"--node-id={node_id}"]
        words = [f"--address={self.address}", *reason, f"--deadline-remaining-seconds={left_s}"]
        subprocess.run([*_RAY, "drain-node", *words], env=self._env(), check=True, capture_output=True)

    def workers(self, index: int) -> list[str]:
        """Return the command lines of our workers and supervisors on a machine."""
        found = []
        for process in self.processes(index):
            with contextlib.suppress(psutil.Error):
                found.append(" ".join(process.cmdline()))
        return [line for line in found if "torchrun" in line or "workers.supervisor" in line]

    def kill_head(self) -> None:
        """Kill the head and all that belongs to it on this machine."""
        for process in self._in_network("/proc/self/ns/net"):
            with contextlib.suppress(psutil.Error):
                if str(self._folder) in " ".join(process.cmdline()):
                    process.kill()
        if self.head is not None:
            self.head.wait()

    def _env(self) -> dict[str, str]:
        # The provider of machines is among the tests.
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        own = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path, "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        return {**os.environ, **self.ray_env, **own}

    def close(self) -> None:
        """Kill everything."""
        super().close()
        self.kill_head()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, happened: Callable[[], object], what: str, limit_s: float = 60.0) -> None:
        end_s = time.monotonic() + limit_s
        while not happened():
            if time.monotonic() > end_s:
                raise AssertionError(f"{what}: not in time\n{(self._folder / 'head.log').read_text()}")
            time.sleep(0.05)
