"""Core statements for the hot paths: compiled once, run on driver connections."""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import ARRAY, Column, Table, bindparam, column, func
from sqlalchemy.dialects.postgresql.asyncpg import dialect as asyncpg_dialect
from sqlalchemy.sql.base import Executable
from sqlalchemy.sql.selectable import TableValuedAlias

from app.db.engine import Driver, storage_errors


class Statement:
    """A Core statement as SQL for the driver. Arguments are given by parameter name."""

    def __init__(self, statement: Executable) -> None:
        dialect = asyncpg_dialect(paramstyle="numeric_dollar")  # type: ignore[no-untyped-call]
        compiled = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
        self.sql = str(compiled)
        self.names: tuple[str, ...] = tuple(compiled.positiontup or ())

    async def fetch(self, connection: Driver, **arguments: Any) -> list[Any]:
        with storage_errors():
            return await connection.fetch(self.sql, *[arguments[name] for name in self.names])

    async def fetch_one(self, connection: Driver, **arguments: Any) -> Any:
        """The first row, or `None`."""
        with storage_errors():
            return await connection.fetchrow(self.sql, *[arguments[name] for name in self.names])


def rows_of(prefix: str, columns: Sequence[Column[Any]]) -> TableValuedAlias:
    """Parallel arrays as the rows of a table: a bound array `<prefix>_<column>` for each."""
    arrays = [bindparam(f"{prefix}_{c.name}", type_=ARRAY(c.type)) for c in columns]
    aliases = [column(c.name, c.type) for c in columns]
    return func.unnest(*arrays).table_valued(*aliases).render_derived(name=prefix)


def arrays_of(
    prefix: str, columns: Sequence[Column[Any]], rows: Sequence[Sequence[Any]]
) -> dict[str, list[Any]]:
    """The arguments for `rows_of`: these rows, turned into one array for each column."""
    values = zip(*rows, strict=True) if rows else ((),) * len(columns)
    return {f"{prefix}_{c.name}": list(array) for c, array in zip(columns, values, strict=True)}


def columns_of(table: Table, *names: str) -> list[Column[Any]]:
    return [table.c[name] for name in names]
