"""The tables. CHECK constraints restate the state machine of `domain/tasks.py`.

Everything that is looked up has an index, everything that is swept a partial one. No index
covers a column that a plain progress report changes, so that those updates stay HOT (those of
tasks with a stall or cancel date to move do not).
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    ForeignKey,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    false,
    func,
    text,
)
from sqlalchemy.dialects.postgresql import UUID

metadata = MetaData(
    naming_convention={
        "pk": "%(table_name)s_pkey",
        "fk": "%(table_name)s_%(column_0_name)s_fkey",
        "uq": "%(table_name)s_%(column_0_N_name)s_key",
        "ck": "%(table_name)s_%(constraint_name)s_check",
        "ix": "%(table_name)s_%(column_0_N_name)s_idx",
    }
)

Moment = DateTime(timezone=True)

backends = Table(
    "backends",
    metadata,
    Column("id", Integer, Identity(always=True), primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("mcp_url", Text),
    Column("callback_url", Text),
    Column("allow_anonymous", Boolean, nullable=False, server_default=false()),
    Column("forward_unknown_tasks", Boolean, nullable=False, server_default=false()),
    Column("default_ttl_ms", BigInteger),
    Column("max_ttl_ms", BigInteger),
    Column("poll_interval_ms", Integer),
    Column("disabled_at", Moment),
    Column("callback_gone_at", Moment),
    Column("callback_rests_until", Moment),
    Column("created_at", Moment, nullable=False, server_default=func.now()),
    CheckConstraint("name ~ '^[a-z0-9][a-z0-9-]{0,62}$'", name="name"),
    CheckConstraint("default_ttl_ms >= 1 AND max_ttl_ms >= 1", name="ttl"),
    CheckConstraint("poll_interval_ms >= 1", name="poll_interval"),
    CheckConstraint(
        "callback_gone_at IS NULL OR callback_url IS NOT NULL", name="gone_callback_was_there"
    ),
)

backend_keys = Table(
    "backend_keys",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("backend_id", ForeignKey(backends.c.id, ondelete="CASCADE"), nullable=False, index=True),
    Column("key_hash", LargeBinary, nullable=False, unique=True),
    Column("created_at", Moment, nullable=False, server_default=func.now()),
    Column("expires_at", Moment),
    CheckConstraint("octet_length(key_hash) = 32", name="key_hash"),
)

webhook_secrets = Table(
    "webhook_secrets",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("backend_id", ForeignKey(backends.c.id, ondelete="CASCADE"), nullable=False, index=True),
    Column("ciphertext", LargeBinary, nullable=False),
    Column("created_at", Moment, nullable=False, server_default=func.now()),
    Column("expires_at", Moment),
)

clients = Table(
    "clients",
    metadata,
    Column("id", UUID, primary_key=True),
    Column("name", Text, nullable=False),
    Column("key_hash", LargeBinary, nullable=False, unique=True),
    Column("created_at", Moment, nullable=False, server_default=func.now()),
    Column("revoked_at", Moment),
    CheckConstraint("octet_length(key_hash) = 32", name="key_hash"),
    # A name that was revoked may be given to a new client.
    Index("clients_name_key", "name", unique=True, postgresql_where=text("revoked_at IS NULL")),
)

LIVE = "status IN ('working', 'input_required')"
EXPIRING = f"expires_at IS NOT NULL AND expired_at IS NULL AND {LIVE}"

tasks = Table(
    "tasks",
    metadata,
    # The order of these columns is the order of the fields of domain.tasks.Task.
    Column("task_ref", UUID, primary_key=True),
    Column("backend_id", ForeignKey(backends.c.id), nullable=False),
    Column("owner", LargeBinary, nullable=False),
    Column("key_id", SmallInteger, nullable=False),
    Column("external_id", Text),
    Column("tool", Text),
    Column("status", Text, nullable=False),
    Column("status_message", Text),
    Column("result", Text),
    Column("result_typed", Boolean, nullable=False, server_default=false()),
    Column("result_is_error", Boolean, nullable=False, server_default=false()),
    Column("error", Text),
    Column("created_at", Moment, nullable=False),
    Column("updated_at", Moment, nullable=False),
    Column("ttl_ms", BigInteger),
    Column("expires_at", Moment),
    Column("poll_interval_ms", Integer),
    Column("reported_at", Moment),
    Column("cancel_requested_at", Moment),
    Column("cancel_due_at", Moment),
    Column("stall_after_ms", BigInteger),
    Column("stall_due_at", Moment),
    Column("expired_at", Moment),
    Column("asked", Boolean, nullable=False, server_default=false()),
    CheckConstraint(
        "status IN ('working', 'input_required', 'completed', 'failed', 'cancelled')",
        name="status",
    ),
    CheckConstraint("(status = 'completed') = (result IS NOT NULL)", name="completed_has_result"),
    CheckConstraint("(status = 'failed') = (error IS NOT NULL)", name="failed_has_error"),
    CheckConstraint("status <> 'input_required' OR asked", name="input_required_was_asked"),
    CheckConstraint(
        f"{LIVE} OR (cancel_due_at IS NULL AND stall_due_at IS NULL)",
        name="terminal_waits_for_nothing",
    ),
    CheckConstraint(
        "cancel_due_at IS NULL OR cancel_requested_at IS NOT NULL", name="cancel_was_requested"
    ),
    CheckConstraint("(ttl_ms IS NULL) = (expires_at IS NULL)", name="ttl_gives_expiry"),
    CheckConstraint(
        "expired_at IS NULL OR (cancel_due_at IS NULL AND stall_due_at IS NULL)",
        name="expired_waits_for_nothing",
    ),
    CheckConstraint("ttl_ms >= 1", name="ttl"),
    CheckConstraint("poll_interval_ms >= 1", name="poll_interval"),
    CheckConstraint("stall_after_ms >= 1", name="stall_after"),
    CheckConstraint("updated_at >= created_at", name="times_ascend"),
    CheckConstraint("octet_length(owner) = 32", name="owner"),
    CheckConstraint("length(external_id) BETWEEN 1 AND 255", name="external_id"),
    Index(
        "tasks_external_id_key",
        "backend_id",
        "external_id",
        unique=True,
        postgresql_where=text("external_id IS NOT NULL"),
    ),
    Index(None, "backend_id", "task_ref"),
    Index(None, "owner", "task_ref"),
    Index("tasks_live_idx", "backend_id", "task_ref", postgresql_where=text(LIVE)),
    Index("tasks_expires_at_idx", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
    Index("tasks_expiring_idx", "expires_at", postgresql_where=text(EXPIRING)),
    Index(
        "tasks_cancel_due_at_idx",
        "cancel_due_at",
        postgresql_where=text("cancel_due_at IS NOT NULL"),
    ),
    Index(
        "tasks_stall_due_at_idx", "stall_due_at", postgresql_where=text("stall_due_at IS NOT NULL")
    ),
    postgresql_with={"fillfactor": "70"},
)

input_requests = Table(
    "input_requests",
    metadata,
    Column("task_ref", ForeignKey(tasks.c.task_ref, ondelete="CASCADE"), primary_key=True),
    Column("key", Text, primary_key=True),
    Column("position", Integer, nullable=False),
    Column("request", Text, nullable=False),
    Column("response", Text),
    Column("superseded", Boolean, nullable=False, server_default=false()),
    CheckConstraint("NOT (superseded AND response IS NOT NULL)", name="one_end"),
)

events_seen = Table(
    "events_seen",
    metadata,
    Column("backend_id", ForeignKey(backends.c.id, ondelete="CASCADE"), primary_key=True),
    Column("webhook_id", Text, primary_key=True),
    Column("seen_at", Moment, nullable=False, index=True),
)

task_history = Table(
    "task_history",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column(
        "task_ref", ForeignKey(tasks.c.task_ref, ondelete="CASCADE"), nullable=False, index=True
    ),
    Column("at", Moment, nullable=False),
    Column("what", Text, nullable=False),
    Column("from_status", Text),
    Column("to_status", Text, nullable=False),
    Column("by", Text, nullable=False),
)

PENDING = "status = 'pending'"

# What backends must learn. A signal outlives its task: a purged one may still have to be told.
signals = Table(
    "signals",
    metadata,
    Column("id", BigInteger, Identity(always=True), primary_key=True),
    Column("backend_id", ForeignKey(backends.c.id, ondelete="CASCADE"), nullable=False),
    Column("task_ref", UUID, nullable=False),
    Column("type", Text, nullable=False),
    Column("webhook_id", UUID, nullable=False, server_default=func.gen_random_uuid()),
    Column("body", Text, nullable=False),
    Column("created_at", Moment, nullable=False, index=True),
    Column("status", Text, nullable=False, server_default="pending"),
    # When to send it next. A worker that takes it moves this ahead by its lease.
    Column("due_at", Moment),
    Column("attempts", Integer, nullable=False, server_default=text("0")),
    Column("attempted_at", Moment),
    Column("outcome", Text),
    Column("ended_at", Moment),
    CheckConstraint(
        "type IN ('task.cancel_requested', 'task.input_received', 'task.expired', 'task.stalled')",
        name="type",
    ),
    CheckConstraint("status IN ('pending', 'delivered', 'seen', 'dead')", name="status"),
    CheckConstraint(f"({PENDING}) = (due_at IS NOT NULL)", name="pending_is_due"),
    CheckConstraint(f"({PENDING}) = (ended_at IS NULL)", name="pending_has_no_end"),
    CheckConstraint("attempts >= 0", name="attempts"),
    Index("signals_due_idx", "backend_id", "due_at", "id", postgresql_where=text(PENDING)),
    Index("signals_pending_idx", "backend_id", "id", postgresql_where=text(PENDING)),
    Index("signals_pending_of_task_idx", "task_ref", "id", postgresql_where=text(PENDING)),
    Index(None, "backend_id", "id"),
    Index(None, "task_ref", "id"),
    Index("signals_dead_idx", "id", postgresql_where=text("status = 'dead'")),
)
