"""Samples of how jobs do, times of workers, when checkpoints were written; indexes for what every pass asks."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_INDEXES = (
    ("ix_incarnation_drained", "incarnation", "drained"),
    ("ix_incarnation_finished", "incarnation", "finished_at"),
    ("ix_generation_handled", "generation", "handled"),
    ("ix_generation_ended", "generation", "ended_at"),
)


def upgrade() -> None:
    """Apply."""
    json = sa.JSON(none_as_null=True)
    op.create_table(
        "sample",
        sa.Column("job_id", sa.String(length=120), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("loss", sa.Float(precision=53), nullable=True),
        sa.Column("steps_per_s", sa.Float(precision=53), nullable=True),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["job_id", "incarnation"], ["incarnation.job_id", "incarnation.incarnation"]),
        sa.PrimaryKeyConstraint("job_id", "incarnation", "number"),
    )
    op.create_table(
        "worker_times",
        sa.Column("job_id", sa.String(length=120), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("worker_id", sa.String(length=120), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("window", json, nullable=False),
        sa.ForeignKeyConstraint(["job_id", "incarnation"], ["incarnation.job_id", "incarnation.incarnation"]),
        sa.PrimaryKeyConstraint("job_id", "incarnation", "worker_id"),
    )
    op.add_column("incarnation", sa.Column("sampling", json, nullable=False, server_default="{}"))
    op.add_column("candidate", sa.Column("at", sa.Float(precision=53), nullable=True))
    op.add_column("candidate", sa.Column("size_bytes", sa.BigInteger(), nullable=True))
    for name, table, column in _INDEXES:
        op.create_index(name, table, [column])


def downgrade() -> None:
    """Undo."""
    for name, table, _ in _INDEXES:
        op.drop_index(name, table)
    op.drop_column("candidate", "size_bytes")
    op.drop_column("candidate", "at")
    op.drop_column("incarnation", "sampling")
    op.drop_table("worker_times")
    op.drop_table("sample")
