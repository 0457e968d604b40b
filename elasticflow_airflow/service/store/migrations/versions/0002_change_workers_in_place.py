"""Changes of a job's workers in place, logical workers, and nodes that go away at a known time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. What is there was started by a restart, and chose its logical workers by itself.

    Columns are added and dropped one by one: SQLite can, and copying a table would break what refers to it.
    """
    json = sa.JSON(none_as_null=True)
    op.add_column("incarnation", sa.Column("logical_workers", sa.Integer(), nullable=True))
    op.add_column("incarnation", sa.Column("in_place", json, nullable=False, server_default="{}"))
    op.add_column("generation", sa.Column("mode", sa.String(length=16), nullable=False, server_default="restart"))
    op.add_column("generation", sa.Column("continues", sa.Integer(), nullable=True))
    op.add_column("generation", sa.Column("lost", json, nullable=False, server_default="[]"))
    op.create_table(
        "drain",
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("until_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("node_id"),
    )


def downgrade() -> None:
    """Undo."""
    op.drop_table("drain")
    for column in ("lost", "continues", "mode"):
        op.drop_column("generation", column)
    for column in ("in_place", "logical_workers"):
        op.drop_column("incarnation", column)
