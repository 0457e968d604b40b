"""A loss to train to: what a job's reports say of it, and the loss curve of the last run."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply. No job that is there has a target."""
    json = sa.JSON(none_as_null=True)
    op.add_column("incarnation", sa.Column("target", json, nullable=False, server_default="{}"))
    op.add_column("history", sa.Column("loss_curve", json, nullable=True))


def downgrade() -> None:
    """Undo."""
    op.drop_column("history", "loss_curve")
    op.drop_column("incarnation", "target")
