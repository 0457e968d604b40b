"""A private PostgreSQL for tests: a real one, on a Unix socket, gone at the end."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def postgres() -> Iterator[tuple[str, Callable[[str], None]]]:
    """Start one: (URL with ``{}`` for the database's name, run one SQL command). Skips the test where there is none."""
    programs = _programs()
    if programs is None:
        pytest.skip(
            "no PostgreSQL on this machine: initdb and pg_ctl are neither in /usr/lib/postgresql/*/bin nor PATH"
        )
    try:
        import psycopg
    except ImportError:
        pytest.skip("psycopg is not installed: pip install elasticflow-airflow[postgres]")
    user: str | None = None  # PostgreSQL refuses to run as root.
    if os.geteuid() == 0:
        names = {entry.pw_name for entry in pwd.getpwall()}
        user = next((name for name in ("postgres", "nobody") if name in names), None)
        if user is None:
            pytest.skip("PostgreSQL does not run as root, and there is neither a user postgres nor nobody")
    with tempfile.TemporaryDirectory(prefix="ef-pg-") as folder:
        base = Path(folder)
        if user is not None:
            shutil.chown(base, user)

        def run(*words: str) -> None:
            done = subprocess.run(words, user=user, group=user and _group_of(user), cwd=base, capture_output=True)
            log = base / "log"
            said = (done.stdout + done.stderr).decode() + (log.read_text() if log.exists() else "")
            assert done.returncode == 0, f"{words} failed: {said}"

        data = str(base / "data")
        run(str(programs / "initdb"), "-D", data, "-U", "elasticflow", "-A", "trust", "--no-sync", "-E", "UTF8")
        options = f"-c listen_addresses= -c unix_socket_directories={base} -c fsync=off"
        # pg_ctl leaves a server behind that must not hold our pipes.
        started = subprocess.run(
            [str(programs / "pg_ctl"), "-D", data, "-w", "-t", "60", "-l", str(base / "log"), "-o", options, "start"],
            user=user,
            group=user and _group_of(user),
            cwd=base,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert started.returncode == 0, (base / "log").read_text() if (base / "log").exists() else "no log"

            def sql(command: str) -> None:
                with psycopg.connect(f"host={base} user=elasticflow dbname=postgres", autocommit=True) as connection:
                    connection.execute(command.encode())

            yield f"postgresql://elasticflow@/{{}}?host={base}", sql
        finally:
            run(str(programs / "pg_ctl"), "-D", data, "-w", "-m", "immediate", "stop")


def _programs() -> Path | None:
    """Folder of ``initdb`` and ``pg_ctl``: the system's package, newest version first, else PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3]), reverse=True)
    on_path = shutil.which("initdb")
    found = [*versions, *([Path(on_path)] if on_path else [])]
    return next((path.parent for path in found if (path.parent / "pg_ctl").exists()), None)


def _group_of(user: str) -> int:
    return pwd.getpwnam(user).pw_gid
