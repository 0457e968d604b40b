"""A pooler of transactions before a PostgreSQL of the tests: a real PgBouncer, gone at the end."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def pgbouncer(server_folder: Path, user: str | None) -> Iterator[str]:
    """Start one, as ``user``, which cannot be root; yields a URL with ``{}`` for the database's name.

    ``server_folder``: where the server's socket is. Skips the test where there is no PgBouncer.
    """
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("no PgBouncer on this machine: apt-get install pgbouncer")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="ef-pool-") as folder:
        yield from _running(program, Path(folder), server_folder, user, port)


def _running(program: str, folder: Path, server_folder: Path, user: str | None, port: int) -> Iterator[str]:
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n* = host={server_folder} user=elasticflow\n[pgbouncer]\nlisten_addr = 127.0.0.1\n"
        f"listen_port = {port}\nunix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 8\n"
        f"logfile = {folder / 'log'}\npidfile = {folder / 'pid'}\n"
    )
    if user is not None:
        shutil.chown(folder, user)
    process = subprocess.Popen(
        [program, "-q", str(folder / "pgbouncer.ini")],
        user=user,
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end_s = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                said = (folder / "log").read_text() if (folder / "log").exists() else ""
                assert process.poll() is None, said
                assert time.monotonic() < end_s, said
                time.sleep(0.05)
        yield f"postgresql://elasticflow@127.0.0.1:{port}/{{}}"
    finally:
        process.kill()
        process.wait()
