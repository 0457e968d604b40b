"""Brings a database to the newest schema. Alembic is imported only when there is something to do."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from elasticflow_airflow.service.models import SCHEMA_HEAD


class SchemaTooNewError(Exception):
    """The database was written by a newer version of this package."""


def ensure_schema(engine: sa.Engine) -> None:
    """Create or upgrade the tables. Raises SchemaTooNewError for a database of a newer version."""
    current = current_revision(engine)
    if current == SCHEMA_HEAD:
        return
    if current is not None and current > SCHEMA_HEAD:
        raise SchemaTooNewError(
            f"the database is at schema {current}, and this version of elasticflow-airflow knows up to {SCHEMA_HEAD}:"
            " install the version that wrote it, or choose another state directory"
        )
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations"))
    # As a write: of services that start together one migrates, the others then find nothing to do.
    with engine.connect().execution_options(elasticflow_write=True) as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()


def current_revision(engine: sa.Engine) -> str | None:
    """Alembic revision of the database; None when it is empty."""
    with engine.connect() as connection:
        if not sa.inspect(connection).has_table("alembic_version"):
            return None
        revision = connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
        return None if revision is None else str(revision)
