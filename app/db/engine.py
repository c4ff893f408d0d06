"""Connections to Postgres, and what happens when there is none."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

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
STATEMENT_CACHE = 100
POOLER = (
    "A pooler refuses our session: connect past it, or set TASKBROKER_POOLER=transaction "
    "(docs/operations.md says what that costs)"
)
_READ_ONLY = "25006"
_POOLED_SETTINGS = {"application_name": "taskbroker", "timezone": "UTC"}
"""Those that a pooler in transaction mode sees to."""
_SERVER_SETTINGS = {
    **_POOLED_SETTINGS,
    "jit": "off",
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
    database_url: str,
    *,
    pooled: bool = False,
    statement_timeout: float | None = STATEMENT_TIMEOUT,
) -> Driver:
    """A driver connection; the URL is in libpq style, the timeout in seconds. A pooled one leaves
    nothing in its session, which is another's after each transaction.

    Raises StorageUnavailable, or StorageFault with the server's words when it refuses us.
    """
    try:
        return await asyncpg.connect(
            database_url,
            timeout=CONNECT_TIMEOUT,
            command_timeout=statement_timeout,
            server_settings=_POOLED_SETTINGS if pooled else _SERVER_SETTINGS,
            statement_cache_size=0 if pooled else STATEMENT_CACHE,
        )
    except asyncpg.ProtocolViolationError as error:  # what a pooler says, of itself or the server
        if "startup parameter" in str(error):
            raise StorageFault(POOLER) from None
        raise StorageUnavailable from None
    except _UNREACHABLE:
        raise StorageUnavailable from None
    except asyncpg.PostgresError as error:
        raise StorageFault(f"The database refuses the connection: {error.args[0]}") from None


def create_engine(
    database_url: str,
    pool_size: int = 5,
    *,
    pooled: bool = False,
    statement_timeout: float | None = STATEMENT_TIMEOUT,
) -> AsyncEngine:
    """The pool for everything but the hot statements. Never puts parameters into an error."""

    async def connected() -> Driver:
        return await connect(database_url, pooled=pooled, statement_timeout=statement_timeout)

    adapted: dict[str, Any] = {"async_creator_fn": connected}
    if pooled:  # `str`: their names are empty
        adapted |= {"prepared_statement_cache_size": 0, "prepared_statement_name_func": str}

    def creator() -> Any:
        dialect: Any = engine.dialect
        return dialect.dbapi.connect(**adapted)

    engine = create_async_engine(
        "postgresql+asyncpg://",
        creator=creator,
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
