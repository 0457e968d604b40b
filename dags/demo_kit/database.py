"""A private PostgreSQL for the replicas of ``make demo-cluster``: on a Unix socket only, and gone at the end."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
from pathlib import Path

_PACKAGED = Path("/usr/lib/postgresql")
"""Where Debian and Ubuntu put the programs, in a folder per version: they are not in PATH."""
_START_LIMIT_S = 120


def why_not() -> str | None:
    """Why there can be no PostgreSQL here; None: there can."""
    if _programs() is None:
        return "PostgreSQL is not there (apt-get install postgresql)"
    if importlib.util.find_spec("psycopg") is None:
        return "psycopg is not there (pip install 'psycopg[binary]')"
    if os.geteuid() == 0 and _user() is None:
        return "PostgreSQL does not run as root, and there is neither a user postgres nor nobody"
    return None


class Database:
    """A PostgreSQL in ``folder``, which is made by ``start`` and removed by ``stop``.

    The folder's path must be short: the socket is in it. Only its owner and root get there, so nobody is asked for a
    password.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def url(self) -> str:
        """SQLAlchemy URL of its one database."""
        return f"postgresql://elasticflow@/postgres?host={self._folder}"

    def start(self) -> None:
        """Make the folder and start the server.

        Raises FileExistsError if something of that name is there, and RuntimeError with what PostgreSQL has said.
        """
        self._folder.mkdir(mode=0o700)
        user = _user()
        if user is not None:
            shutil.chown(self._folder, user)
        self._run("initdb", "-U", "elasticflow", "-A", "trust", "--no-sync", "-E", "UTF8")
        options = f"-c listen_addresses='' -c unix_socket_directories={self._folder} -c fsync=off"
        log = str(self._folder / "log")
        self._run("pg_ctl", "-w", "-t", str(_START_LIMIT_S), "-l", log, "-o", options, "start")

    def stop(self) -> None:
        """End the server, if it runs, and remove its folder: also one that an earlier process has left."""
        if (self._folder / "data").exists() and self._call("pg_ctl", "status").returncode == 0:
            self._run("pg_ctl", "-w", "-m", "immediate", "stop")
        if self._folder.exists():
            shutil.rmtree(self._folder)

    def _run(self, program: str, *words: str) -> None:
        done = self._call(program, *words)
        if done.returncode != 0:
            said = [path.read_text(errors="replace")[-2000:] for path in self._logs if path.exists()]
            raise RuntimeError("\n".join([f"{program} has ended with status {done.returncode}", *said]))

    @property
    def _logs(self) -> tuple[Path, Path]:
        return self._folder / "said", self._folder / "log"

    def _call(self, program: str, *words: str) -> subprocess.CompletedProcess[bytes]:
        programs, user = _programs(), _user()
        if programs is None:
            raise RuntimeError(why_not())
        # Into a file: the server that pg_ctl leaves behind would hold a pipe for as long as it lives.
        with self._logs[0].open("wb") as said:
            return subprocess.run(
                [str(programs / program), "-D", str(self._folder / "data"), *words],
                user=user,
                group=None if user is None else pwd.getpwnam(user).pw_gid,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                start_new_session=True,  # Ctrl-C is not for the server
                check=False,
            )


def _user() -> str | None:
    """Who runs it, as PostgreSQL refuses to run as root; None: we ourselves, or there is nobody."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next((name for name in ("postgres", "nobody") if name in names), None)


def _programs() -> Path | None:
    """Folder of ``initdb`` and ``pg_ctl``: that in PATH, else the newest that is packaged."""
    on_path = shutil.which("initdb")
    packaged = sorted(_PACKAGED.glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]), reverse=True)
    found = [*([Path(on_path)] if on_path else []), *packaged]
    return next((path.parent for path in found if (path.parent / "pg_ctl").exists()), None)
