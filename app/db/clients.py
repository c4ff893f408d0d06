"""Keys of MCP clients that have no OAuth."""

from datetime import datetime
from uuid import UUID

from sqlalchemy import insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from app.db import schema
from app.db.engine import UniqueViolation, storage_errors
from app.domain.clients import Client
from app.errors import Conflict

C = schema.clients


_CLIENT = (C.c.id, C.c.name, C.c.created_at, C.c.revoked_at)


async def add(connection: AsyncConnection, id_: UUID, name: str, key_hash: bytes) -> None:
    """Registers a client. Raises Conflict when the name is taken."""
    try:
        with storage_errors():
            await connection.execute(insert(C).values(id=id_, name=name, key_hash=key_hash))
    except UniqueViolation:
        raise Conflict(f"There is a client {name} already.") from None


async def by_key(connection: AsyncConnection, key_hash: bytes) -> Client | None:
    """The client whose key, given as its SHA-256, is valid."""
    row = await connection.execute(
        select(*_CLIENT).where(C.c.key_hash == key_hash, C.c.revoked_at.is_(None))
    )
    found = row.first()
    return None if found is None else Client(*found)


async def all_of_them(connection: AsyncConnection) -> list[Client]:
    return [Client(*row) for row in await connection.execute(select(*_CLIENT).order_by(C.c.name))]


async def revoke(connection: AsyncConnection, name: str, at: datetime) -> bool:
    """Ends a client's key for good; False if there is no such client with a valid key."""
    done = await connection.execute(
        update(C).where(C.c.name == name, C.c.revoked_at.is_(None)).values(revoked_at=at)
    )
    return done.rowcount > 0
