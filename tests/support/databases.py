"""Databases for tests: one migrated template, and a fresh copy of it for whoever asks."""

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from app.db.migrations import migrate

_TEMPLATE = "migrated"


class Databases:
    """The databases of one Postgres server."""

    def __init__(self, server_url: str) -> None:
        self._server_url = server_url
        self._numbers = itertools.count(1)

    def url(self, name: str) -> str:
        return urlunsplit(urlsplit(self._server_url)._replace(path=f"/{name}"))

    async def prepare(self) -> None:
        """Makes the template."""
        await self._run(f"CREATE DATABASE {_TEMPLATE}")
        await migrate(self.url(_TEMPLATE))

    @asynccontextmanager
    async def fresh(self, template: str = _TEMPLATE) -> AsyncIterator[str]:
        """The URL of a new copy of the template, dropped afterwards."""
        name = f"test_{next(self._numbers)}"
        await self._run(f"CREATE DATABASE {name} TEMPLATE {template}")
        try:
            yield self.url(name)
        finally:
            await self._run(f"DROP DATABASE {name} WITH (FORCE)")

    async def _run(self, statement: str) -> None:
        connection = await asyncpg.connect(self._server_url)
        try:
            await connection.execute(statement)
        finally:
            await connection.close()
