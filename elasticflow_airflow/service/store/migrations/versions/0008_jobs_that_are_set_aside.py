"""Why a job is set aside: the service failed on it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("incarnation", sa.Column("set_aside", sa.Text(), nullable=True))


def downgrade() -> None:
    """Undo."""
    op.drop_column("incarnation", "set_aside")
