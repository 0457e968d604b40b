"""Slots that are avoided for a while, as a worker was slow there."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "avoided_slot",
        sa.Column("node_id", sa.Text(), nullable=False),
        sa.Column("slot_index", sa.Integer(), nullable=False),
        sa.Column("until_at", sa.Float(precision=53), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("node_id", "slot_index"),
    )


def downgrade() -> None:
    """Undo."""
    op.drop_table("avoided_slot")
