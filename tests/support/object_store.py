"""A server that speaks S3, and a way to it that can be cut."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

LIMIT_S = 60.0


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """A server of moto's that speaks S3 (not Amazon's), for this test run."""
    pytest.importorskip("s3fs", reason="needs s3fs")
    pytest.importorskip("moto", reason="needs moto[server]")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/"):
                break
            assert server.poll() is None, "moto's server has ended"
            assert time.monotonic() < end, "moto's server did not come up"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def bucket(server: str, monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    for variable, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server,
    }.items():
        monkeypatch.setenv(variable, value)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}/training"


class Road:
    """A way to a server through which answers come, or break off: after ``cut_after`` bytes while ``cuts`` are left."""

    def __init__(self, server: str) -> None:
        self._to = ("127.0.0.1", int(server.rsplit(":", 1)[1]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.cuts = 0
        self.cut_after = 0
        self.made = 0
        """Cuts that were made."""
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Nobody gets through any more."""
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # It was closed.
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._pass_on, args=[client], daemon=True).start()

    def _pass_on(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._to) as server, contextlib.suppress(OSError):
            passed = 0
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(1 << 14)
                    if not data:
                        return
                    if ready is client:
                        server.sendall(data)
                        passed = 0
                        continue
                    passed += len(data)
                    if self.cuts > 0 and passed > self.cut_after:
                        self.cuts -= 1
                        self.made += 1
                        return
                    client.sendall(data)
