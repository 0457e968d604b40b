"""With which speeds a run was planned, and how wrong those of a task's past runs were."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("incarnation", sa.Column("told_speeds", sa.JSON(none_as_null=True), nullable=True))
    op.add_column("history", sa.Column("errors", sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    """Undo."""
    op.drop_column("history", "errors")
    op.drop_column("incarnation", "told_speeds")
