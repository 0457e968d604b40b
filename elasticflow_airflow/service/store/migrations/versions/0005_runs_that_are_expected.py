"""Recurring tasks: when their next runs are due, and what their past runs were like."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "recurring_task",
        sa.Column("recurring_key", sa.Text(), nullable=False),
        sa.Column("due", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("past", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("facts", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("next_due_at", sa.Float(precision=53), nullable=True),
        sa.Column("updated_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("recurring_key"),
    )
    op.create_index("ix_recurring_task_next_due_at", "recurring_task", ["next_due_at"])


def downgrade() -> None:
    """Undo."""
    op.drop_index("ix_recurring_task_next_due_at", "recurring_task")
    op.drop_table("recurring_task")
