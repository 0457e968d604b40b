"""A private PostgreSQL for tests: a real one, on a Unix socket, gone at the end."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class Postgres:
    """A server that a test may stop and start."""

    base: Path
    programs: Path
    user: str | None
    address: str = ""
    """Where it also listens, on its usual port, for everybody; empty: on its Unix socket only."""

    @property
    def url(self) -> str:
        """URL with ``{}`` for the database's name."""
        return f"postgresql://elasticflow@/{{}}?host={self.base}"

    def sql(self, command: str) -> None:
        """Run one command."""
        import psycopg

        with psycopg.connect(f"host={self.base} user=elasticflow dbname=postgres", autocommit=True) as connection:
            connection.execute(command.encode())

    def create_for_airflow(self, name: str) -> str:
        """Create a database for Airflow; its SQLAlchemy URL.

        Workers of a scheduler that was killed outlive it, and keep its connection open: without a limit, what it had
        locked in that moment would be left out by every scheduler that follows (FOR UPDATE SKIP LOCKED), for ever.
        """
        self.sql(f"CREATE DATABASE {name}")
        self.sql(f"ALTER DATABASE {name} SET idle_in_transaction_session_timeout = '20s'")
        return self.url.format(name).replace("postgresql:", "postgresql+psycopg:")

    def create(self) -> None:
        self._run("initdb", "-U", "elasticflow", "-A", "trust", "--no-sync", "-E", "UTF8")
        if self.address:
            with (self.base / "data" / "pg_hba.conf").open("a") as rules:
                rules.write("host all all 0.0.0.0/0 trust\n")

    def start(self) -> None:
        options = f"-c listen_addresses={self.address} -c unix_socket_directories={self.base} -c fsync=off"
        self._run("pg_ctl", "-w", "-t", "60", "-l", str(self.base / "log"), "-o", options, "start")

    def stop(self) -> None:
        """As when its machine goes down: whoever is connected is not asked."""
        self._run("pg_ctl", "-w", "-m", "immediate", "stop")

    def _run(self, program: str, *words: str) -> None:
        # Into a file: pg_ctl leaves a server behind that must not hold our pipes.
        log, said = self.base / "log", self.base / "said"
        with said.open("wb") as output:
            done = subprocess.run(
                [str(self.programs / program), "-D", str(self.base / "data"), *words],
                user=self.user,
                group=self.user and pwd.getpwnam(self.user).pw_gid,
                cwd=self.base,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        ends = [path.read_text()[-3000:] for path in (said, log) if path.exists()]
        assert done.returncode == 0, "\n".join([f"{program} {words} failed", *ends])


def why_not() -> str | None:
    """Why there is no PostgreSQL here; None: there is one."""
    if _programs() is None:
        return "no PostgreSQL on this machine: initdb and pg_ctl are neither in /usr/lib/postgresql/*/bin nor PATH"
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not installed: pip install elasticflow-airflow[postgres]"
    if os.geteuid() == 0 and _user() is None:
        return "PostgreSQL does not run as root, and there is neither a user postgres nor nobody"
    return None


@contextmanager
def postgres(address: str = "") -> Iterator[Postgres]:
    """Start one, which also listens at an address if that is given. Skips the test where there is none."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    programs, user = _programs(), _user()
    assert programs is not None
    with tempfile.TemporaryDirectory(prefix="ef-pg-") as folder:
        if user is not None:
            shutil.chown(folder, user)
        server = Postgres(Path(folder), programs, user, address)
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def service_database(kind: str) -> Iterator[str | None]:
    """URL of an empty database for a service: "sqlite" (None: it makes one in its state directory) or "postgresql"."""
    if kind == "sqlite":
        yield None
        return
    with postgres() as server:
        server.sql("CREATE DATABASE service")
        yield server.url.format("service")


def _user() -> str | None:
    """Who runs it, as PostgreSQL refuses to run as root; None: we ourselves."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), None)


def _programs() -> Path | None:
    """Folder of ``initdb`` and ``pg_ctl``: the system's package, newest version first, else PATH."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda p: float(p.parts[-3]), reverse=True)
    on_path = shutil.which("initdb")
    found = [*versions, *([Path(on_path)] if on_path else [])]
    return next((path.parent for path in found if (path.parent / "pg_ctl").exists()), None)
