"""The seed of a training, which belonged to its submission's digest: what has begun with that keeps it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

_BITS = 31


def upgrade() -> None:
    """Apply."""
    op.add_column("incarnation", sa.Column("seed", sa.Integer(), nullable=True))
    table = sa.table(
        "incarnation",
        sa.column("job_id", sa.Text),
        sa.column("incarnation", sa.Integer),
        sa.column("equality_key", sa.Text),
        sa.column("seed", sa.Integer),
    )
    connection = op.get_bind()
    rows = connection.execute(sa.select(table.c.job_id, table.c.incarnation, table.c.equality_key)).all()
    known = [
        {"of_job": job_id, "of_incarnation": incarnation, "to": int(key[:8], 16) & ((1 << _BITS) - 1)}
        for job_id, incarnation, key in rows
        if _is_digest(key)
    ]
    if known:
        which = (table.c.job_id == sa.bindparam("of_job")) & (table.c.incarnation == sa.bindparam("of_incarnation"))
        connection.execute(sa.update(table).where(which).values(seed=sa.bindparam("to")), known)


def downgrade() -> None:
    """Undo."""
    op.drop_column("incarnation", "seed")


def _is_digest(key: object) -> bool:
    return isinstance(key, str) and len(key) >= 8 and all(letter in "0123456789abcdef" for letter in key[:8])
