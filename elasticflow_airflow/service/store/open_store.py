"""Explains in one sentence why a database cannot be used at start, and what to do."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from elasticflow_airflow.service.store.migrate import SchemaTooNewError, current_revision
from elasticflow_airflow.service.store.service_lock import FIRST_WITH_LEASE, OwnedError
from elasticflow_airflow.service.store.store import connect_options


class EmptiedDatabaseError(Exception):
    """The database is empty, but the files next to it show that it once was not."""


class JobsElsewhereError(Exception):
    """What live jobs need is in the state directory of the service of an earlier release, and not in this one."""


_EXPLAINED = (OwnedError, SchemaTooNewError, EmptiedDatabaseError, JobsElsewhereError)
CANNOT_OPEN = (sa.exc.SQLAlchemyError, *_EXPLAINED, ImportError, OSError)
"""The exceptions that opening a database may raise."""


def refuse_emptied(url: str, state_dir: Path) -> None:
    """Raise EmptiedDatabaseError if the database file has 0 bytes although jobs or a write-ahead log exist.

    SQLite takes such a file for a new database; opening it would also delete the log from which it could be repaired.
    """
    parsed = sa.make_url(url)
    if parsed.get_backend_name() != "sqlite" or not parsed.database:
        return
    path = Path(parsed.database)
    try:
        if path.stat().st_size > 0:
            return
    except FileNotFoundError:
        return
    jobs = state_dir / "jobs"
    log = Path(f"{path}-wal")
    if (jobs.is_dir() and any(jobs.iterdir())) or (log.exists() and log.stat().st_size > 0):
        raise EmptiedDatabaseError(
            f"the database {path} is empty (0 bytes), though {jobs} holds jobs that were known to it: put a copy of the"
            f" database back, or remove {path} to begin without them"
        )


def refuse_jobs_from_elsewhere(url: str, state_dir: Path) -> None:
    """Raise JobsElsewhereError for the live jobs of a release that knew no replicas, without its state directory.

    The engine's records of them, their code and the key of their secrets are only there; whoever upgrades the database
    elsewhere would start all of them again, if it could. To be called before the database is upgraded, for engines with
    workers. Raises what the driver raises.
    """
    if (state_dir / "engine").is_dir():  # A service that has no others beside it keeps its records there.
        return
    engine = sa.create_engine(url, connect_args=connect_options(url), poolclass=sa.pool.NullPool)
    try:
        revision = current_revision(engine)
        if revision is None or revision >= FIRST_WITH_LEASE:
            return
        with engine.connect() as connection:
            live = connection.scalar(sa.text("SELECT count(*) FROM incarnation WHERE NOT terminal"))
    finally:
        engine.dispose()
    if live:
        raise JobsElsewhereError(
            f"this database holds unfinished jobs ({live}) of a release that knew no replicas: what their workers and"
            f" their code are is known in the state directory of its service, and not in {state_dir}. Start one service"
            " of this release on that directory first, then others. If that directory is lost, make an empty folder"
            f" {state_dir / 'engine'}: jobs whose workers are unknown start again"
        )


def why_not(error: Exception, url: str) -> str:
    """Return the explanation as one sentence. It never shows the whole ``url``, which may hold a password."""
    if isinstance(error, _EXPLAINED):
        return str(error)
    if isinstance(error, ImportError):
        return f"the driver for the database is not installed ({error}): pip install 'elasticflow-airflow[postgres]'"
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError:
        return "ELASTICFLOW_DATABASE_URL is no URL such as postgresql://user:password@host/database"
    said = " ".join(str(getattr(error, "orig", None) or error).split())
    if isinstance(error, sa.exc.NoSuchModuleError):
        return f"ELASTICFLOW_DATABASE_URL names a kind of database that is not known here: {parsed.drivername}"
    if parsed.get_backend_name() != "sqlite":
        where = f"{parsed.database!r} on {parsed.host or parsed.query.get('host', 'this machine')}"
        return f"the database {where} cannot be used: {said}. Start it, or correct ELASTICFLOW_DATABASE_URL"
    if "is not a database" in said or "malformed" in said or "no such table" in said or "no such column" in said:
        return (
            f"the database {parsed.database} is damaged ({said}): put a copy of it back, or move it away to begin"
            " without the jobs that it knew"
        )
    if "full" in said or "No space" in said or "disk I/O" in said:
        return f"the disk of the database {parsed.database} is full or fails ({said}): free space there"
    return f"the database {parsed.database} cannot be used: {said}"
