"""When somebody asked for a job last, and what Airflow said of its task instance."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

_COLUMNS = (
    ("job", "owner_known_to", sa.String(64)),
    ("job", "owner_seen_at", sa.Float(53)),
    ("incarnation", "heard_at", sa.Float(53)),
    ("incarnation", "owner_gone_at", sa.Float(53)),
)


def upgrade() -> None:
    """Apply."""
    for table, name, kind in _COLUMNS:
        op.add_column(table, sa.Column(name, kind, nullable=True))


def downgrade() -> None:
    """Undo."""
    for table, name, _ in _COLUMNS:
        op.drop_column(table, name)
