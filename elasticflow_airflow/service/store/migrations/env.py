"""Alembic's entry: runs the revisions on the connection that ``migrate.py`` hands over."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import context

from elasticflow_airflow.service.store.tables import Base

_LOCK_KEY = 0x456C4672  # any constant: services that start together must agree on it

connection: sa.Connection = context.config.attributes["connection"]
if connection.dialect.name == "postgresql":
    connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
context.configure(
    connection=connection,
    target_metadata=Base.metadata,
    render_as_batch=connection.dialect.name == "sqlite",
    transaction_per_migration=False,
)
with context.begin_transaction():
    context.run_migrations()
