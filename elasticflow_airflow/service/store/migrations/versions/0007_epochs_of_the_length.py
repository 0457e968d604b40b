"""In how many epochs the remembered length of a task was: the next run may ask for another number of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.add_column("history", sa.Column("epochs", sa.Integer(), nullable=True))


def downgrade() -> None:
    """Undo."""
    op.drop_column("history", "epochs")
