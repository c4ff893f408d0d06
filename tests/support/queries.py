"""How many statements the service ran, by the database's own count."""

from collections.abc import Awaitable, Callable

import asyncpg

QueryCount = Callable[[], Awaitable[int]]

PRELOAD = {"shared_preload_libraries": "pg_stat_statements"}
_COUNT = """
    SELECT coalesce(sum(calls), 0)::int
    FROM pg_stat_statements JOIN pg_database ON pg_database.oid = dbid
    WHERE datname = $1 AND query LIKE '%tasks%' AND query NOT LIKE '%SKIP LOCKED%'
"""


async def count_queries(server_url: str, database: str) -> int:
    """The statements about tasks that a database has run; what the sweeper does is left out."""
    connection = await asyncpg.connect(server_url)
    try:
        await connection.execute("CREATE EXTENSION IF NOT EXISTS pg_stat_statements")
        count: int = await connection.fetchval(_COUNT, database)
        return count
    finally:
        await connection.close()
