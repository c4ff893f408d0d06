"""Connections to Postgres, and what happens when there is none."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

import asyncpg
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from app.errors import BrokerError, StorageUnavailable

if TYPE_CHECKING:  # generic in its stubs only
    Driver: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    Driver = asyncpg.Connection

CONNECT_TIMEOUT = 5.0
STATEMENT_TIMEOUT = 15.0
_UNREACHABLE = (
    OSError,
    TimeoutError,
    asyncpg.InterfaceError,
    asyncpg.PostgresConnectionError,
    asyncpg.CannotConnectNowError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.TooManyConnectionsError,
    asyncpg.InternalClientError,
    asyncpg.ReadOnlySQLTransactionError,
)


class StorageFault(BrokerError):
    """The database refused a statement."""


class UniqueViolation(StorageFault):
    """A row with this key exists. `detail` names the constraint."""


async def connect(database_url: str) -> Driver:
    """A driver connection; the URL is in libpq style. Raises StorageUnavailable."""
    with storage_errors():
        return await asyncpg.connect(
            database_url,
            timeout=CONNECT_TIMEOUT,
            command_timeout=STATEMENT_TIMEOUT,
            server_settings={"application_name": "taskbroker", "jit": "off", "timezone": "UTC"},
        )


def create_engine(database_url: str, pool_size: int = 5) -> AsyncEngine:
    """The pool for everything but the hot statements. Never puts parameters into an error."""

    async def creator() -> Driver:
        return await connect(database_url)

    return create_async_engine(
        "postgresql+asyncpg://",
        async_creator=creator,
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_timeout=CONNECT_TIMEOUT,
        pool_pre_ping=True,
        hide_parameters=True,
    )


@asynccontextmanager
async def transaction(engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
    """One transaction, committed at the end of the block."""
    with storage_errors():
        async with engine.begin() as connection:
            yield connection


@contextmanager
def storage_errors() -> Iterator[None]:
    """Driver errors become the broker's own.

    The driver's text may quote a row, so it is left behind; the SQLSTATE and the names of the
    constraint or column say enough.
    """
    try:
        yield
    except BrokerError:
        raise
    except DBAPIError as error:
        cause = error.orig.__cause__ if error.orig is not None else None
        if isinstance(error, IntegrityError) and isinstance(cause, asyncpg.UniqueViolationError):
            raise UniqueViolation(str(cause.constraint_name)) from None
        if error.connection_invalidated or isinstance(cause, _UNREACHABLE):
            raise StorageUnavailable from None
        raise StorageFault(_describe(cause or error)) from None
    except asyncpg.UniqueViolationError as error:
        raise UniqueViolation(str(error.constraint_name)) from None
    except _UNREACHABLE:
        raise StorageUnavailable from None
    except asyncpg.PostgresError as error:
        raise StorageFault(_describe(error)) from None


def _describe(error: BaseException) -> str:
    state = getattr(error, "sqlstate", None)
    where = getattr(error, "constraint_name", None) or getattr(error, "column_name", None)
    return f"{type(error).__name__} (SQLSTATE {state}, {where or 'no constraint'})"


async def close(connection: Driver) -> None:
    """Closes for good, and does not wait for a server that is gone."""
    try:
        await connection.close(timeout=1.0)
    except (TimeoutError, OSError, asyncpg.InterfaceError, asyncpg.PostgresError):
        connection.terminate()
