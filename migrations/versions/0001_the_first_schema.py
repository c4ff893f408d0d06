"""The first schema"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "backends",
        sa.Column("id", sa.Integer(), sa.Identity(always=True), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("mcp_url", sa.Text(), nullable=True),
        sa.Column("callback_url", sa.Text(), nullable=True),
        sa.Column(
            "allow_anonymous",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
        ),
        sa.Column(
            "forward_unknown_tasks",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
        ),
        sa.Column("default_ttl_ms", sa.BigInteger(), nullable=True),
        sa.Column("max_ttl_ms", sa.BigInteger(), nullable=True),
        sa.Column("poll_interval_ms", sa.Integer(), nullable=True),
        sa.Column("disabled_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.CheckConstraint("name ~ '^[a-z0-9][a-z0-9-]{0,62}$'", name=op.f("backends_name_check")),
        sa.CheckConstraint(
            "default_ttl_ms >= 1 AND max_ttl_ms >= 1", name=op.f("backends_ttl_check")
        ),
        sa.CheckConstraint("poll_interval_ms >= 1", name=op.f("backends_poll_interval_check")),
        sa.PrimaryKeyConstraint("id", name=op.f("backends_pkey")),
        sa.UniqueConstraint("name", name=op.f("backends_name_key")),
    )
    op.create_table(
        "clients",
        sa.Column("id", sa.UUID(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("key_hash", sa.LargeBinary(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("octet_length(key_hash) = 32", name=op.f("clients_key_hash_check")),
        sa.PrimaryKeyConstraint("id", name=op.f("clients_pkey")),
        sa.UniqueConstraint("key_hash", name=op.f("clients_key_hash_key")),
    )
    op.create_index(
        "clients_name_key",
        "clients",
        ["name"],
        unique=True,
        postgresql_where=sa.text("revoked_at IS NULL"),
    )
    op.create_table(
        "backend_keys",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("backend_id", sa.Integer(), nullable=False),
        sa.Column("key_hash", sa.LargeBinary(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.CheckConstraint("octet_length(key_hash) = 32", name=op.f("backend_keys_key_hash_check")),
        sa.ForeignKeyConstraint(
            ["backend_id"],
            ["backends.id"],
            name=op.f("backend_keys_backend_id_fkey"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("backend_keys_pkey")),
        sa.UniqueConstraint("key_hash", name=op.f("backend_keys_key_hash_key")),
    )
    op.create_index(
        op.f("backend_keys_backend_id_idx"),
        "backend_keys",
        ["backend_id"],
        unique=False,
    )
    op.create_table(
        "events_seen",
        sa.Column("backend_id", sa.Integer(), nullable=False),
        sa.Column("webhook_id", sa.Text(), nullable=False),
        sa.Column("seen_at", sa.DateTime(timezone=True), nullable=False),
        sa.ForeignKeyConstraint(
            ["backend_id"],
            ["backends.id"],
            name=op.f("events_seen_backend_id_fkey"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("backend_id", "webhook_id", name=op.f("events_seen_pkey")),
    )
    op.create_index(op.f("events_seen_seen_at_idx"), "events_seen", ["seen_at"], unique=False)
    op.create_table(
        "tasks",
        sa.Column("task_ref", sa.UUID(), nullable=False),
        sa.Column("backend_id", sa.Integer(), nullable=False),
        sa.Column("owner", sa.LargeBinary(), nullable=False),
        sa.Column("key_id", sa.SmallInteger(), nullable=False),
        sa.Column("external_id", sa.Text(), nullable=True),
        sa.Column("tool", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("status_message", sa.Text(), nullable=True),
        sa.Column("result", sa.Text(), nullable=True),
        sa.Column(
            "result_typed",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
        ),
        sa.Column(
            "result_is_error",
            sa.Boolean(),
            server_default=sa.text("false"),
            nullable=False,
        ),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ttl_ms", sa.BigInteger(), nullable=True),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("poll_interval_ms", sa.Integer(), nullable=True),
        sa.Column("reported_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_requested_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("cancel_due_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("stall_after_ms", sa.BigInteger(), nullable=True),
        sa.Column("stall_due_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("asked", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.CheckConstraint(
            "(status = 'completed') = (result IS NOT NULL)",
            name=op.f("tasks_completed_has_result_check"),
        ),
        sa.CheckConstraint(
            "(status = 'failed') = (error IS NOT NULL)",
            name=op.f("tasks_failed_has_error_check"),
        ),
        sa.CheckConstraint(
            "status <> 'input_required' OR asked",
            name=op.f("tasks_input_required_was_asked_check"),
        ),
        sa.CheckConstraint(
            "status IN ('working', 'input_required')"
            " OR (cancel_due_at IS NULL AND stall_due_at IS NULL)",
            name=op.f("tasks_terminal_waits_for_nothing_check"),
        ),
        sa.CheckConstraint(
            "status IN ('working', 'input_required', 'completed', 'failed', 'cancelled')",
            name=op.f("tasks_status_check"),
        ),
        sa.CheckConstraint(
            "(ttl_ms IS NULL) = (expires_at IS NULL)",
            name=op.f("tasks_ttl_gives_expiry_check"),
        ),
        sa.CheckConstraint(
            "cancel_due_at IS NULL OR cancel_requested_at IS NOT NULL",
            name=op.f("tasks_cancel_was_requested_check"),
        ),
        sa.CheckConstraint(
            "length(external_id) BETWEEN 1 AND 255",
            name=op.f("tasks_external_id_check"),
        ),
        sa.CheckConstraint("octet_length(owner) = 32", name=op.f("tasks_owner_check")),
        sa.CheckConstraint("poll_interval_ms >= 1", name=op.f("tasks_poll_interval_check")),
        sa.CheckConstraint("stall_after_ms >= 1", name=op.f("tasks_stall_after_check")),
        sa.CheckConstraint("ttl_ms >= 1", name=op.f("tasks_ttl_check")),
        sa.CheckConstraint("updated_at >= created_at", name=op.f("tasks_times_ascend_check")),
        sa.ForeignKeyConstraint(
            ["backend_id"], ["backends.id"], name=op.f("tasks_backend_id_fkey")
        ),
        sa.PrimaryKeyConstraint("task_ref", name=op.f("tasks_pkey")),
        postgresql_with={"fillfactor": "70"},
    )
    op.create_index(op.f("tasks_owner_task_ref_idx"), "tasks", ["owner", "task_ref"], unique=False)
    op.create_index(
        op.f("tasks_backend_id_task_ref_idx"),
        "tasks",
        ["backend_id", "task_ref"],
        unique=False,
    )
    op.create_index(
        "tasks_cancel_due_at_idx",
        "tasks",
        ["cancel_due_at"],
        unique=False,
        postgresql_where=sa.text("cancel_due_at IS NOT NULL"),
    )
    op.create_index(
        "tasks_expires_at_idx",
        "tasks",
        ["expires_at"],
        unique=False,
        postgresql_where=sa.text("expires_at IS NOT NULL"),
    )
    op.create_index(
        "tasks_external_id_key",
        "tasks",
        ["backend_id", "external_id"],
        unique=True,
        postgresql_where=sa.text("external_id IS NOT NULL"),
    )
    op.create_index(
        "tasks_live_idx",
        "tasks",
        ["backend_id", "task_ref"],
        unique=False,
        postgresql_where=sa.text("status IN ('working', 'input_required')"),
    )
    op.create_index(
        "tasks_stall_due_at_idx",
        "tasks",
        ["stall_due_at"],
        unique=False,
        postgresql_where=sa.text("stall_due_at IS NOT NULL"),
    )
    op.create_table(
        "webhook_secrets",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("backend_id", sa.Integer(), nullable=False),
        sa.Column("ciphertext", sa.LargeBinary(), nullable=False),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
        ),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.ForeignKeyConstraint(
            ["backend_id"],
            ["backends.id"],
            name=op.f("webhook_secrets_backend_id_fkey"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("webhook_secrets_pkey")),
    )
    op.create_index(
        op.f("webhook_secrets_backend_id_idx"),
        "webhook_secrets",
        ["backend_id"],
        unique=False,
    )
    op.create_table(
        "input_requests",
        sa.Column("task_ref", sa.UUID(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("request", sa.Text(), nullable=False),
        sa.Column("response", sa.Text(), nullable=True),
        sa.Column("superseded", sa.Boolean(), server_default=sa.text("false"), nullable=False),
        sa.CheckConstraint(
            "NOT (superseded AND response IS NOT NULL)",
            name=op.f("input_requests_one_end_check"),
        ),
        sa.ForeignKeyConstraint(
            ["task_ref"],
            ["tasks.task_ref"],
            name=op.f("input_requests_task_ref_fkey"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("task_ref", "key", name=op.f("input_requests_pkey")),
    )
    op.create_table(
        "task_history",
        sa.Column("id", sa.BigInteger(), sa.Identity(always=True), nullable=False),
        sa.Column("task_ref", sa.UUID(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("what", sa.Text(), nullable=False),
        sa.Column("from_status", sa.Text(), nullable=True),
        sa.Column("to_status", sa.Text(), nullable=False),
        sa.Column("by", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["task_ref"],
            ["tasks.task_ref"],
            name=op.f("task_history_task_ref_fkey"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("task_history_pkey")),
    )
    op.create_index(op.f("task_history_task_ref_idx"), "task_history", ["task_ref"], unique=False)


def downgrade() -> None:
    for table in (
        "task_history",
        "events_seen",
        "input_requests",
        "tasks",
        "clients",
        "webhook_secrets",
        "backend_keys",
        "backends",
    ):
        op.drop_table(table)
