"""Upgrades a database to the newest schema. Alembic is imported only when there is something to do."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from elasticflow_airflow.service.store.tables import SCHEMA_HEAD


class SchemaTooNewError(Exception):
    """The database was written by a newer version of this package."""


def ensure_schema(engine: sa.Engine) -> None:
    """Create or upgrade the tables. Raises SchemaTooNewError if a newer version wrote the database.

    A newer version that only added to the tables says so in ``leader.schema_floor``: during an upgrade, both are used.
    """
    current = current_revision(engine)
    if current == SCHEMA_HEAD:
        return
    if current is not None and current not in _known_revisions():
        if _floor(engine) in _known_revisions():
            return
        raise SchemaTooNewError(
            f"the database is at schema {current[:40]!r}, and this version of elasticflow-airflow knows up to"
            f" {SCHEMA_HEAD!r}: install the version that wrote it, or choose another state directory"
        )
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    # One write transaction covers the check of the revision, too: if several services start together, one migrates
    # and the others find nothing to do. By itself, Alembic would check first, and on SQLite begin a transaction for
    # each revision.
    with engine.connect().execution_options(elasticflow_write=True) as connection, connection.begin():
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _floor(engine: sa.Engine) -> str | None:
    """Return the oldest revision that may be known to whoever uses the database; None if it does not say."""
    with engine.connect() as connection:
        if not sa.inspect(connection).has_table("leader"):
            return None
        floor = connection.execute(sa.text("SELECT schema_floor FROM leader WHERE id = 1")).scalar()
        return None if floor is None else str(floor)


def _known_revisions() -> set[str]:
    return {path.name.partition("_")[0] for path in (Path(__file__).parent / "migrations/versions").glob("[0-9]*.py")}


def current_revision(engine: sa.Engine) -> str | None:
    """Return the Alembic revision of the database; None when it is empty."""
    with engine.connect() as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        revision = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
        return None if revision is None else str(revision)
