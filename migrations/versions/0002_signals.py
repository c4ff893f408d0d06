"""Signals to tool servers, and the moment at which the expiry of a live task was noticed"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

LIVE = "status IN ('working', 'input_required')"
PENDING = "status = 'pending'"


def upgrade() -> None:
    op.add_column("backends", sa.Column("callback_gone_at", sa.DateTime(timezone=True)))
    op.add_column("backends", sa.Column("callback_rests_until", sa.DateTime(timezone=True)))
    op.create_check_constraint(
        op.f("backends_gone_callback_was_there_check"),
        "backends",
        "callback_gone_at IS NULL OR callback_url IS NOT NULL",
    )
    op.add_column("tasks", sa.Column("expired_at", sa.DateTime(timezone=True)))
    op.create_check_constraint(
        op.f("tasks_expired_waits_for_nothing_check"),
        "tasks",
        "expired_at IS NULL OR (cancel_due_at IS NULL AND stall_due_at IS NULL)",
    )
    op.create_index(
        "tasks_expiring_idx",
        "tasks",
        ["expires_at"],
        postgresql_where=sa.text(f"expires_at IS NOT NULL AND expired_at IS NULL AND {LIVE}"),
    )
    op.create_table(
        "signals",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("backend_id", sa.Integer(), nullable=False),
        sa.Column("task_ref", sa.UUID(), nullable=False),
        sa.Column("type", sa.Text(), nullable=False),
        sa.Column(
            "webhook_id", sa.UUID(), server_default=sa.text("gen_random_uuid()"), nullable=False
        ),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("status", sa.Text(), server_default="pending", nullable=False),
        sa.Column("due_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("attempts", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("attempted_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("ended_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint(
            "type IN ('task.cancel_requested', 'task.input_received', 'task.expired', "
            "'task.stalled')",
            name=op.f("signals_type_check"),
        ),
        sa.CheckConstraint(
            "status IN ('pending', 'delivered', 'seen', 'dead')", name=op.f("signals_status_check")
        ),
        sa.CheckConstraint(
            f"({PENDING}) = (due_at IS NOT NULL)", name=op.f("signals_pending_is_due_check")
        ),
        sa.CheckConstraint(
            f"({PENDING}) = (ended_at IS NULL)", name=op.f("signals_pending_has_no_end_check")
        ),
        sa.CheckConstraint("attempts >= 0", name=op.f("signals_attempts_check")),
        sa.ForeignKeyConstraint(
            ["backend_id"],
            ["backends.id"],
            name=op.f("signals_backend_id_fkey"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("signals_pkey")),
    )
    op.create_index(op.f("signals_created_at_idx"), "signals", ["created_at"])
    op.create_index(op.f("signals_backend_id_id_idx"), "signals", ["backend_id", "id"])
    op.create_index(op.f("signals_task_ref_id_idx"), "signals", ["task_ref", "id"])
    for name, columns in (
        ("signals_due_idx", ["backend_id", "due_at", "id"]),
        ("signals_pending_idx", ["backend_id", "id"]),
        ("signals_pending_of_task_idx", ["task_ref", "id"]),
    ):
        op.create_index(name, "signals", columns, postgresql_where=sa.text(PENDING))
    op.create_index(
        "signals_dead_idx", "signals", ["id"], postgresql_where=sa.text("status = 'dead'")
    )


def downgrade() -> None:
    op.drop_table("signals")
    op.drop_index("tasks_expiring_idx", "tasks")
    op.drop_constraint(op.f("tasks_expired_waits_for_nothing_check"), "tasks")
    op.drop_column("tasks", "expired_at")
    op.drop_constraint(op.f("backends_gone_callback_was_there_check"), "backends")
    op.drop_column("backends", "callback_gone_at")
    op.drop_column("backends", "callback_rests_until")
