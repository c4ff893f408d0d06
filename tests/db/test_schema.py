"""The schema: its migrations, what its constraints refuse, and the plans of the hot statements."""

import json
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
from alembic import command
from sqlalchemy import Connection
from sqlalchemy.dialects import postgresql

from app.db import decisions, migrations, signals, sweeping, tasks
from app.db.engine import Driver, create_engine
from app.db.statements import Statement
from app.domain.clock import utc_now
from app.domain.tasks import Status
from tests.support.databases import Databases

TASK = """
    INSERT INTO tasks (task_ref, backend_id, owner, key_id, status, created_at, updated_at,
                       ttl_ms, expires_at)
    VALUES (gen_random_uuid(), 1, decode(repeat('00', 32), 'hex'), 0, 'working', now(), now(),
            1000, now())
"""


@pytest.fixture
async def connection(database_url: str) -> AsyncIterator[Driver]:
    connection = await asyncpg.connect(database_url)
    await connection.execute(
        "INSERT INTO backends (name) SELECT 'tools-' || n FROM generate_series(1, 20) n"
    )
    yield connection
    await connection.close()


async def test_the_migrations_lead_to_the_schema_that_the_program_has(database_url: str) -> None:
    def check(connection: Connection) -> None:
        command.check(migrations.config(connection))  # raises when they differ

    engine = create_engine(database_url)
    async with engine.connect() as connection:
        await connection.run_sync(check)
    await engine.dispose()


async def test_migrations_go_down_and_up_again(databases: Databases) -> None:
    async with databases.fresh() as url:
        assert await migrations.migrate(url, "base") == (migrations.head(), None)
        assert await migrations.migrate(url) == (None, migrations.head())
        assert await migrations.migrate(url) == (migrations.head(), migrations.head())


@pytest.mark.parametrize(
    ("change", "constraint"),
    [
        ("status = 'paused'", "tasks_status_check"),
        ("status = 'completed'", "tasks_completed_has_result_check"),
        ("result = '{}'", "tasks_completed_has_result_check"),
        ("status = 'failed'", "tasks_failed_has_error_check"),
        ("error = '{}'", "tasks_failed_has_error_check"),
        ("status = 'input_required'", "tasks_input_required_was_asked_check"),
        ("status = 'cancelled', stall_due_at = now()", "tasks_terminal_waits_for_nothing_check"),
        ("cancel_due_at = now()", "tasks_cancel_was_requested_check"),
        ("ttl_ms = NULL", "tasks_ttl_gives_expiry_check"),
        ("ttl_ms = 0", "tasks_ttl_check"),
        ("poll_interval_ms = 0", "tasks_poll_interval_check"),
        ("owner = ''", "tasks_owner_check"),
        ("updated_at = created_at - interval '1 second'", "tasks_times_ascend_check"),
        ("external_id = ''", "tasks_external_id_check"),
        (
            "expired_at = now(), stall_due_at = now()",
            "tasks_expired_waits_for_nothing_check",
        ),
    ],
)
async def test_no_statement_can_store_an_impossible_task(
    connection: Driver, change: str, constraint: str
) -> None:
    await connection.execute(TASK)
    with pytest.raises(asyncpg.CheckViolationError) as refusal:
        await connection.execute(f"UPDATE tasks SET {change}")  # noqa: S608 - from the table above
    assert refusal.value.constraint_name == constraint


# --- plans ------------------------------------------------------------------------------------

FILL = """
    INSERT INTO tasks (task_ref, backend_id, owner, key_id, external_id, status, result, created_at,
                       updated_at, ttl_ms, expires_at, cancel_requested_at, cancel_due_at,
                       stall_due_at)
    SELECT md5(n::text)::uuid, 1 + (n / 50) % 20, decode(repeat('00', 32), 'hex'), 0, 'job-' || n,
           CASE WHEN n % 50 = 0 THEN 'working' ELSE 'completed' END,
           CASE WHEN n % 50 = 0 THEN NULL ELSE '{}' END,
           now(), now(), 1000, now() + n * interval '1 second',
           CASE WHEN n % 500 = 0 THEN now() END, CASE WHEN n % 500 = 0 THEN now() END,
           CASE WHEN n % 100 = 0 THEN now() END
    FROM generate_series(1, 50000) n
"""


@pytest.fixture
async def filled(
    connection: Driver,
) -> Driver:
    await connection.execute(FILL)
    await connection.execute(
        "INSERT INTO input_requests (task_ref, key, position, request)"
        " SELECT task_ref, 'q', 0, '{}' FROM tasks"
    )
    await connection.execute(
        "INSERT INTO events_seen SELECT 1, 'msg-' || n, now() FROM generate_series(1, 50000) n"
    )
    await connection.execute(
        "INSERT INTO signals (backend_id, task_ref, type, body, created_at, status, due_at,"
        " ended_at) SELECT backend_id, task_ref, 'task.expired', '{}', now(),"
        " CASE WHEN n % 5 = 0 THEN 'pending' ELSE 'delivered' END,"
        " CASE WHEN n % 5 = 0 THEN now() END, CASE WHEN n % 5 <> 0 THEN now() END"
        " FROM (SELECT *, row_number() OVER () AS n FROM tasks) numbered"
    )
    await connection.execute("ANALYZE")
    return connection


async def indexes_used(connection: Driver, sql: str, *arguments: Any) -> tuple[set[str], set[str]]:
    """The indexes in a statement's plan, and the tables that it reads from end to end."""
    plan = json.loads(await connection.fetchval(f"EXPLAIN (FORMAT JSON) {sql}", *arguments))
    nodes = [plan[0]["Plan"]]
    indexes, scanned = set(), set()
    while nodes:
        node = nodes.pop()
        nodes += node.get("Plans", [])
        if "Index Name" in node:
            indexes.add(node["Index Name"])
        if node["Node Type"] == "Seq Scan":
            scanned.add(node["Relation Name"])
    return indexes, scanned


def arguments_of(statement: Statement, **given: Any) -> list[Any]:
    return [given[name] for name in statement.names]


async def test_the_hot_statements_use_their_indexes(
    filled: Driver,
) -> None:
    refs = [row[0] for row in await filled.fetch("SELECT task_ref FROM tasks LIMIT 50")]
    now = utc_now()
    cases: list[tuple[Statement, dict[str, Any], set[str]]] = [
        (tasks.READ_ONE, {"ref": refs[0]}, {"tasks_pkey", "input_requests_pkey"}),
        (tasks.READ_MANY, {"refs": refs}, {"tasks_pkey", "input_requests_pkey"}),
        (decisions.LOCK, {"refs": refs}, {"tasks_pkey"}),
        (
            decisions.READ,
            {"refs": refs, "webhook_ids": ["msg-1"] * 50},
            {
                "tasks_pkey",
                "input_requests_pkey",
                "events_seen_pkey",
                "signals_pending_of_task_idx",
            },
        ),
        (
            sweeping.CANCEL_DUE,
            {"now": now, "limit": 500, "silent_since": now, "grace_ms": 1},
            {"tasks_cancel_due_at_idx"},
        ),
        (sweeping.EXPIRY_DUE, {"now": now, "limit": 500}, {"tasks_expiring_idx"}),
        (
            sweeping.STALL_DUE,
            {"now": now, "limit": 500, "silent_since": now},
            {"tasks_stall_due_at_idx"},
        ),
        (sweeping.PURGE, {"cutoff": now, "limit": 500}, {"tasks_expires_at_idx"}),
        (sweeping.FORGET_EVENTS, {"cutoff": now, "limit": 500}, {"events_seen_seen_at_idx"}),
        (sweeping.FORGET_SIGNALS, {"cutoff": now, "limit": 500}, {"signals_created_at_idx"}),
        (
            signals.OUTSTANDING,
            {"backends": [1, 2], "limit": 100, "bytes": 1_000_000},
            {"signals_pending_idx"},
        ),
        (
            signals.RECORD,
            {name: [] for name in signals.RECORD.names},
            {"signals_pkey"},
        ),
    ]
    for statement, given, expected in cases:
        used, scanned = await indexes_used(filled, statement.sql, *arguments_of(statement, **given))
        assert used >= expected, statement.sql
        assert not scanned, statement.sql


async def test_a_claim_looks_at_due_signals_only(filled: Driver) -> None:
    """The backends are few; a claim looks at each of them."""
    now = utc_now()
    given: dict[str, Any] = {
        "now": now,
        "lease_end": now,
        "ids": [1],
        "frees": [2],
        "each": 8,
        "room": 100,
        "bytes": 1_000_000,
    }
    used, scanned = await indexes_used(
        filled, signals.CLAIM.sql, *arguments_of(signals.CLAIM, **given)
    )
    assert used >= {"signals_due_idx", "signals_pending_of_task_idx"}
    assert scanned <= {"backends"}


async def test_a_write_finds_its_rows_by_key(filled: Driver) -> None:
    given: dict[str, Any] = {name: [] for name in decisions.WRITE.names}
    used, scanned = await indexes_used(
        filled, decisions.WRITE.sql, *arguments_of(decisions.WRITE, **given)
    )
    assert used >= {"tasks_pkey", "input_requests_pkey"}
    assert not scanned


async def test_the_listing_uses_its_indexes(filled: Driver) -> None:
    now = utc_now()
    for wanted, expected in (
        (tasks.Filter(now, backend_id=1), "tasks_backend_id_task_ref_idx"),
        (tasks.Filter(now, backend_id=1, status=Status.WORKING), "tasks_live_idx"),
        (tasks.Filter(now, owner=(b"o" * 32, b"x" * 32)), "tasks_owner_task_ref_idx"),
    ):
        statement = tasks.listing(wanted).compile(
            dialect=postgresql.dialect(),  # type: ignore[no-untyped-call]
            compile_kwargs={"literal_binds": True},
        )
        used, scanned = await indexes_used(filled, str(statement))
        assert expected in used
        assert not scanned


async def test_progress_is_stored_without_touching_an_index(connection: Driver) -> None:
    await connection.execute(TASK)
    async with connection.transaction():
        for n in range(10):
            await connection.execute(
                "UPDATE tasks SET status_message = $1, updated_at = now()", f'"{n}"'
            )
        counts = await connection.fetchrow(
            "SELECT pg_stat_get_xact_tuples_updated('tasks'::regclass),"
            " pg_stat_get_xact_tuples_hot_updated('tasks'::regclass)"
        )
    assert counts is not None
    assert tuple(counts) == (10, 10)
