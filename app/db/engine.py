"""Connections to Postgres, and what happens when there is none."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

import asyncpg
from sqlalchemy import ExceptionContext, event
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from app.errors import BrokerError, StorageUnavailable

if TYPE_CHECKING:  # generic in its stubs only
    Driver: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    Driver = asyncpg.Connection

CONNECT_TIMEOUT = 5.0
STATEMENT_TIMEOUT = 15.0
_READ_ONLY = "25006"
_SERVER_SETTINGS = {
    "application_name": "taskbroker",
    "jit": "off",
    "timezone": "UTC",
    "lock_timeout": "3s",  # one row that somebody holds must not stop all the others for long
}
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
    asyncpg.UndefinedTableError,  # not migrated yet
    PoolTimeout,
)


class StorageFault(BrokerError):
    """The database refused a statement."""


class UniqueViolation(StorageFault):
    """A row with this key exists. `detail` names the constraint."""


class ForeignKeyViolation(StorageFault):
    """A row that this one belongs to is gone. `detail` names the constraint."""


class LockTimeout(StorageFault):
    """Somebody else has held a row for too long."""


async def connect(
    database_url: str, *, statement_timeout: float | None = STATEMENT_TIMEOUT
) -> Driver:
    """A driver connection; the URL is in libpq style, the timeout in seconds.

    Raises StorageUnavailable, or StorageFault with the server's words when it refuses us.
    """
    try:
        return await asyncpg.connect(
            database_url,
            timeout=CONNECT_TIMEOUT,
            command_timeout=statement_timeout,
            server_settings=_SERVER_SETTINGS,
        )
    except _UNREACHABLE:
        raise StorageUnavailable from None
    except asyncpg.PostgresError as error:
        raise StorageFault(f"The database refuses the connection: {error.args[0]}") from None


def create_engine(
    database_url: str, pool_size: int = 5, *, statement_timeout: float | None = STATEMENT_TIMEOUT
) -> AsyncEngine:
    """The pool for everything but the hot statements. Never puts parameters into an error."""

    async def creator() -> Driver:
        return await connect(database_url, statement_timeout=statement_timeout)

    engine = create_async_engine(
        "postgresql+asyncpg://",
        async_creator=creator,
        pool_size=pool_size,
        max_overflow=pool_size,
        pool_timeout=CONNECT_TIMEOUT,
        pool_pre_ping=True,
        hide_parameters=True,
    )
    event.listen(engine.sync_engine, "handle_error", _drop_demoted)
    return engine


def _drop_demoted(context: ExceptionContext) -> None:
    """A server that was made a standby is not the one to keep talking to."""
    if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY:
        context.is_disconnect = True


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
        raise _from_pool(error) from None
    except (asyncpg.PostgresError, *_UNREACHABLE) as error:
        raise _from_driver(error) from None


def _from_pool(error: DBAPIError) -> BrokerError:
    cause = None if error.orig is None else error.orig.__cause__
    if error.connection_invalidated:
        return StorageUnavailable()
    return StorageFault(_describe(error)) if cause is None else _from_driver(cause)


def _from_driver(error: BaseException) -> BrokerError:
    match error:
        case asyncpg.UniqueViolationError():
            return UniqueViolation(str(error.constraint_name))
        case asyncpg.ForeignKeyViolationError():
            return ForeignKeyViolation(str(error.constraint_name))
        case asyncpg.LockNotAvailableError():
            return LockTimeout()
        case ValueError():  # the driver could not encode an argument
            return StorageFault(type(error).__name__)
        case _ if isinstance(error, _UNREACHABLE):
            return StorageUnavailable()
        case _:
            return StorageFault(_describe(error))


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
