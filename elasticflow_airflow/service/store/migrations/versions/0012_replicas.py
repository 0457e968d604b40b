"""Several services on one database: who leads them, and what they share that was in the folder of one.

And which submissions have the last claims of a job: one may arrive again at another service.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    leader = op.create_table(
        "leader",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("holder", sa.Text, nullable=True),
        sa.Column("until_at", sa.Float(53), nullable=True),
        sa.Column("url", sa.Text, nullable=True),
        sa.Column("card", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("elected_at", sa.Float(53), nullable=True),
        sa.Column("change", sa.String(16), nullable=True),
        sa.Column("failed_over_at", sa.Float(53), nullable=True),
        sa.Column("key_id", sa.Text, nullable=True),
        sa.Column("schema_floor", sa.String(32), nullable=False),
    )
    op.create_table(
        "replica",
        sa.Column("replica_id", sa.Text, primary_key=True),
        sa.Column("url", sa.Text, nullable=True),
        sa.Column("card", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("seen_at", sa.Float(53), nullable=False),
    )
    op.create_table(
        "engine_record",
        sa.Column("job_id", sa.Text, primary_key=True),
        sa.Column("record", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
    )
    op.create_table(
        "snapshot",
        sa.Column("sha256", sa.String(64), primary_key=True),
        sa.Column("archive", sa.LargeBinary, nullable=False),
        sa.Column("stored_at", sa.Float(53), nullable=False),
    )
    op.add_column("job", sa.Column("claimed_by", sa.JSON(none_as_null=True), nullable=True))
    op.bulk_insert(leader, [{"id": 1, "epoch": 0, "schema_floor": revision}])


def downgrade() -> None:
    """Undo."""
    op.drop_column("job", "claimed_by")
    for table in ("snapshot", "engine_record", "replica", "leader"):
        op.drop_table(table)
