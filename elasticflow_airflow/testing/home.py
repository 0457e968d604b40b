"""A private AIRFLOW_HOME for one test process: created before Airflow is imported, removed when the process ends.

Every process has its own, including those of pytest-xdist. Does not import Airflow until a database is requested.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

_PREFIX = "ef-test-"
_LOCK = "in-use.lock"
_YOUNG_S = 60.0

_FOREIGN = (
    "AIRFLOW_CONFIG",
    "AIRFLOW__CORE__SQL_ALCHEMY",
    "AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE",
    "AIRFLOW__DATABASE__",
    "AIRFLOW__ELASTICFLOW__",
    "AIRFLOW__LOGGING__REMOTE",
    "AIRFLOW__METRICS__",
    "AIRFLOW__SECRETS__",
    "AIRFLOW__WORKERS__SECRETS",
    "ELASTICFLOW_",
)
"""Prefixes of variables that would connect a test to a real Airflow, real secrets or a real service."""


_LONGEST_ROOM = 60
"""In bytes. A Unix socket path has at most 107, of which the service's socket in a home needs up to 40."""


def _room() -> Path:
    """Return the folder for homes: that of temporary files or, if its path is too long for sockets, /tmp."""
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual)) <= _LONGEST_ROOM else Path("/tmp")  # noqa: S108 - a folder of 0700 in it


class HomeError(Exception):
    """The private home cannot be created; the message says what to do."""


class Home:
    """The home folder and its content. ``path`` is short, as it contains sockets."""

    def __init__(self) -> None:
        refuse_imported_airflow()
        room = _room()
        _remove_abandoned(room)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=room))
        self._lock = (self.path / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        atexit.register(self.remove)
        self._pid = os.getpid()
        self._has_database = False
        self._folders = 0
        for folder in ("dags", "plugins", "logs"):
            (self.path / folder).mkdir()
        for name in [name for name in os.environ if name.startswith(_FOREIGN)]:
            del os.environ[name]
        os.environ.update(
            {
                "AIRFLOW_HOME": str(self.path),
                "AIRFLOW__CORE__DAGS_FOLDER": str(self.path / "dags"),
                "AIRFLOW__CORE__PLUGINS_FOLDER": str(self.path / "plugins"),
                "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
                "AIRFLOW__CORE__UNIT_TEST_MODE": "True",
                "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{self.path}/airflow.db",
                "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(self.path / "logs"),
                "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
            }
        )

    def ensure_database(self, cache: Path | None) -> None:
        """Create the metadata database, once. ``cache``: folder to keep a migrated copy for later processes, or None.

        Imports Airflow. Raises HomeError when Airflow has been configured to use another database in the meantime.
        """
        if self._has_database:
            return
        from airflow import __version__
        from airflow.configuration import conf

        database = self.path / "airflow.db"
        url = conf.get("database", "sql_alchemy_conn")
        if url != f"sqlite:///{database}":
            raise HomeError(
                f"Airflow uses the database {url.split('@')[-1]}, not the one of this test process: something has"
                " changed AIRFLOW__DATABASE__SQL_ALCHEMY_CONN or AIRFLOW_HOME after elasticflow_airflow.testing had"
                " set them; leave both to it"
            )
        managers = conf.get("database", "external_db_managers", fallback="")
        digest = hashlib.sha256(f"{__version__} {managers} {sys.version_info[:2]}".encode()).hexdigest()[:12]
        template = None if cache is None else cache / f"airflow-{__version__}-{digest}.db"
        if template is not None and template.is_file() and not (database.exists() and database.stat().st_size):
            shutil.copyfile(template, database)
        else:
            from airflow.utils.db import initdb

            initdb()
            if template is not None:
                _keep_copy(database, template)
        self._has_database = True

    def new_folder(self) -> Path:
        """Return the path of a fresh folder in the home, with a short name."""
        self._folders += 1
        return self.path / f"s{self._folders}"

    def remove(self) -> None:
        """Remove the folder, unless this is a forked child: then the parent removes it."""
        if os.getpid() == self._pid:
            self._lock.close()
            shutil.rmtree(self.path, ignore_errors=True)


def refuse_imported_airflow() -> None:
    """Raise HomeError when Airflow has already read its configuration."""
    if "airflow.configuration" in sys.modules or "airflow.sdk.configuration" in sys.modules:
        home = os.environ.get("AIRFLOW_HOME", "~/airflow")
        raise HomeError(
            f"Airflow was imported before elasticflow_airflow.testing could give it a private AIRFLOW_HOME: tests would"
            f" run in {home}. Load the plugin first, in pyproject.toml:\n"
            "    [tool.pytest.ini_options]\n"
            '    addopts = ["-p", "elasticflow_airflow.testing"]\n'
            "and import Airflow and your DAGs in test modules or fixtures, not in a plugin that is loaded before it"
        )


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables temporarily."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _keep_copy(database: Path, template: Path) -> None:
    template.parent.mkdir(parents=True, exist_ok=True)
    own = template.with_suffix(f".{os.getpid()}")
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(own)) as target:
        source.backup(target)
    own.replace(template)


def _remove_abandoned(folder: Path) -> None:
    """Remove homes of killed processes: those whose lock is not held."""
    for home in folder.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or gone by now
            if time.time() - home.stat().st_mtime < _YOUNG_S or home.stat().st_uid != os.getuid():
                continue
            with (home / _LOCK).open("r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(home, ignore_errors=True)
