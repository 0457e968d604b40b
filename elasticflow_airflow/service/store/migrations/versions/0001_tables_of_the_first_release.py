"""Tables of the first release."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Apply."""
    op.create_table(
        "event",
        sa.Column("event_id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=120), nullable=True),
        sa.Column("incarnation", sa.Integer(), nullable=True),
        sa.Column("at", sa.Float(precision=53), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(none_as_null=True), nullable=False),
        sa.PrimaryKeyConstraint("event_id"),
        sqlite_autoincrement=True,
    )
    with op.batch_alter_table("event", schema=None) as batch_op:
        batch_op.create_index("ix_event_job", ["job_id", "event_id"], unique=False)

    op.create_table(
        "history",
        sa.Column("recurring_key", sa.Text(), nullable=False),
        sa.Column("signature", sa.Text(), nullable=False),
        sa.Column("speeds", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("complete", sa.Boolean(), nullable=False),
        sa.Column("costs", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("total_steps", sa.Integer(), nullable=True),
        sa.Column("runs", sa.Integer(), nullable=False),
        sa.Column("updated_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("recurring_key", "signature"),
    )
    op.create_table(
        "job",
        sa.Column("job_id", sa.String(length=120), nullable=False),
        sa.Column("identity", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("recurring_key", sa.Text(), nullable=False),
        sa.Column("dag_id", sa.Text(), nullable=False),
        sa.Column("claim", sa.Integer(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.PrimaryKeyConstraint("job_id"),
    )
    with op.batch_alter_table("job", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_job_dag_id"), ["dag_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_job_recurring_key"), ["recurring_key"], unique=False)

    op.create_table(
        "amendment",
        sa.Column("amendment_id", sa.Integer(), autoincrement=True, nullable=False),
        sa.Column("job_id", sa.String(length=120), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("deadline_at", sa.Float(precision=53), nullable=True),
        sa.Column("value", sa.Float(precision=53), nullable=True),
        sa.Column("best_effort", sa.Boolean(), nullable=False),
        sa.Column("answer", sa.JSON(none_as_null=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["job.job_id"],
        ),
        sa.PrimaryKeyConstraint("amendment_id"),
    )
    with op.batch_alter_table("amendment", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_amendment_job_id"), ["job_id"], unique=False)

    op.create_table(
        "incarnation",
        sa.Column("job_id", sa.String(length=120), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("submission", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("secret_env", sa.LargeBinary(), nullable=True),
        sa.Column("equality_key", sa.String(length=64), nullable=False),
        sa.Column("submitted_at", sa.Float(precision=53), nullable=False),
        sa.Column("resume_from", sa.Integer(), nullable=True),
        sa.Column("init_from_path", sa.Text(), nullable=True),
        sa.Column("lease_s", sa.Float(precision=53), nullable=False),
        sa.Column("orphan_s", sa.Float(precision=53), nullable=False),
        sa.Column("renewals", sa.Integer(), nullable=False),
        sa.Column("cancel_reason", sa.Text(), nullable=True),
        sa.Column("acknowledged", sa.Boolean(), nullable=False),
        sa.Column("introduced", sa.Boolean(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("terminal", sa.Boolean(), nullable=False),
        sa.Column("drained", sa.Boolean(), nullable=False),
        sa.Column("state_reason", sa.Text(), nullable=False),
        sa.Column("verdict", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("deadline_at", sa.Float(precision=53), nullable=True),
        sa.Column("best_effort", sa.Boolean(), nullable=False),
        sa.Column("value", sa.Float(precision=53), nullable=False),
        sa.Column("scheduler_state", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("ending", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("parked", sa.Boolean(), nullable=False),
        sa.Column("lease_expires_at", sa.Float(precision=53), nullable=True),
        sa.Column("desired_generation", sa.Integer(), nullable=True),
        sa.Column("cleared_generation", sa.Integer(), nullable=False),
        sa.Column("micro_batch_size", sa.Integer(), nullable=True),
        sa.Column("signature", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("total_steps", sa.Integer(), nullable=True),
        sa.Column("loss", sa.Float(precision=53), nullable=True),
        sa.Column("steps_per_s", sa.Float(precision=53), nullable=True),
        sa.Column("speeds", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("costs", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("metrics", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("last_step_at", sa.Float(precision=53), nullable=True),
        sa.Column("ever_reported", sa.Boolean(), nullable=False),
        sa.Column("projected_finish_at", sa.Float(precision=53), nullable=True),
        sa.Column("at_risk", sa.Boolean(), nullable=False),
        sa.Column("deadline_passed", sa.Boolean(), nullable=False),
        sa.Column("restarts", sa.Integer(), nullable=False),
        sa.Column("losses", sa.Integer(), nullable=False),
        sa.Column("hangs", sa.Integer(), nullable=False),
        sa.Column("restart_step", sa.Integer(), nullable=False),
        sa.Column("promoted", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("result", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.Column("finished_at", sa.Float(precision=53), nullable=True),
        sa.Column("last_event_id", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id"],
            ["job.job_id"],
        ),
        sa.PrimaryKeyConstraint("job_id", "incarnation"),
    )
    with op.batch_alter_table("incarnation", schema=None) as batch_op:
        batch_op.create_index("ix_incarnation_submitted", ["submitted_at"], unique=False)
        batch_op.create_index("ix_incarnation_terminal", ["terminal"], unique=False)

    op.create_table(
        "candidate",
        sa.Column("job_id", sa.String(length=120), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("path", sa.String(length=200), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.ForeignKeyConstraint(
            ["job_id", "incarnation"],
            ["incarnation.job_id", "incarnation.incarnation"],
        ),
        sa.PrimaryKeyConstraint("job_id", "incarnation", "path"),
    )
    op.create_table(
        "generation",
        sa.Column("job_id", sa.String(length=120), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("incarnation", sa.Integer(), nullable=False),
        sa.Column("placement", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("workers", sa.Integer(), nullable=False),
        sa.Column("purpose", sa.String(length=16), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(precision=53), nullable=False),
        sa.Column("fresh_start", sa.Boolean(), nullable=False),
        sa.Column("desired", sa.String(length=8), nullable=False),
        sa.Column("stop_cause", sa.Text(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("outcome", sa.String(length=16), nullable=True),
        sa.Column("judged", sa.Boolean(), nullable=False),
        sa.Column("handled", sa.Boolean(), nullable=False),
        sa.Column("holding_at", sa.Float(precision=53), nullable=True),
        sa.Column("running_at", sa.Float(precision=53), nullable=True),
        sa.Column("ended_at", sa.Float(precision=53), nullable=True),
        sa.Column("first_step", sa.Integer(), nullable=True),
        sa.Column("last_step", sa.Integer(), nullable=True),
        sa.Column("last_step_at", sa.Float(precision=53), nullable=True),
        sa.Column("window", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("folded", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("notes", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("log_names", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("failure", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_id", "incarnation"],
            ["incarnation.job_id", "incarnation.incarnation"],
        ),
        sa.PrimaryKeyConstraint("job_id", "generation"),
    )
    with op.batch_alter_table("generation", schema=None) as batch_op:
        batch_op.create_index("ix_generation_state", ["state"], unique=False)


def downgrade() -> None:
    """Undo."""
    with op.batch_alter_table("generation", schema=None) as batch_op:
        batch_op.drop_index("ix_generation_state")

    op.drop_table("generation")
    op.drop_table("candidate")
    with op.batch_alter_table("incarnation", schema=None) as batch_op:
        batch_op.drop_index("ix_incarnation_terminal")
        batch_op.drop_index("ix_incarnation_submitted")

    op.drop_table("incarnation")
    with op.batch_alter_table("amendment", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_amendment_job_id"))

    op.drop_table("amendment")
    with op.batch_alter_table("job", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_job_recurring_key"))
        batch_op.drop_index(batch_op.f("ix_job_dag_id"))

    op.drop_table("job")
    op.drop_table("history")
    with op.batch_alter_table("event", schema=None) as batch_op:
        batch_op.drop_index("ix_event_job")

    op.drop_table("event")
