"""Questions about the database itself."""

import asyncio
from datetime import datetime

from sqlalchemy import text

from app.db.database import Database
from app.db.engine import storage_errors

_PROBE_CHANNEL = "taskbroker_probe"


async def revision(db: Database) -> str | None:
    """The schema's revision, `None` before the first migration."""
    async with db.transaction() as connection:
        if await connection.scalar(text("SELECT to_regclass('alembic_version')")) is None:
            return None
        found: str | None = await connection.scalar(text("SELECT version_num FROM alembic_version"))
        return found


async def server_version(db: Database) -> tuple[int, int]:
    """Major and minor version of the server."""
    async with db.transaction() as connection:
        number = int(await connection.scalar(text("SHOW server_version_num")) or 0)
    return number // 10_000, number % 10_000


async def clock(db: Database) -> datetime:
    """What time the server thinks it is."""
    async with db.transaction() as connection:
        now: datetime = (await connection.execute(text("SELECT clock_timestamp()"))).scalar_one()
        return now


async def notifications_arrive(db: Database, seconds: float) -> bool:
    """Whether a NOTIFY reaches a LISTEN; it does not through a pooler in transaction mode."""
    heard = asyncio.Event()
    async with db.own_connection() as listener, db.own_connection() as sender:
        with storage_errors():
            await listener.add_listener(_PROBE_CHANNEL, lambda *_: heard.set())
            await sender.execute(f"NOTIFY {_PROBE_CHANNEL}")
        try:
            await asyncio.wait_for(heard.wait(), seconds)
        except TimeoutError:
            return False
    return True
