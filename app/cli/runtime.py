"""What every command needs: the settings, a database, and a way to print."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Column, Table

from app.broker.context import Broker
from app.db import health, migrations
from app.db.data_dir import DataDir, DataDirInUse
from app.db.embedded import EmbeddedPostgres
from app.db.migrations import migrate
from app.main import create_broker
from app.settings import Settings, SettingsError, load_settings
from app.telemetry import set_up_logs

WAIT_SECONDS = 60.0
T = TypeVar("T")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@contextmanager
def database() -> Iterator[Settings]:
    """Settings that name a database and keys: the external database, that of the running server,
    or the embedded one, started for as long as the block lasts.
    """
    settings = read_settings("warning")
    if settings.database_url is not None:
        yield with_keys(settings)
        return
    folder = DataDir(settings.data_dir)
    url = folder.running(WAIT_SECONDS)
    if url is not None:
        yield embedded_settings(settings, folder, url)
        return
    if not (settings.data_dir / "postgres").exists():
        note(f"Making a new, empty database in {settings.data_dir.absolute()}.")
    with folder.claim("command", WAIT_SECONDS), embedded_postgres(settings) as postgres:
        asyncio.run(migrate(postgres.url))
        yield embedded_settings(settings, folder, postgres.url)


def read_settings(log_level: str | None = None) -> Settings:
    """The settings, with logs set up as they say (a command is quieter than the server)."""
    settings = load_settings()
    level = log_level if log_level and settings.log_level == "info" else settings.log_level
    set_up_logs(level, settings.log_format if log_level is None else "console")
    return settings


def with_keys(settings: Settings) -> Settings:
    """The settings of an external database, which must bring their own keys."""
    if not settings.secret_keys:
        raise SettingsError(
            "TASKBROKER_SECRET_KEYS must be set with an external database; "
            "`taskbroker keys new` prints a good key, the same for every replica"
        )
    return settings


def embedded_settings(settings: Settings, folder: DataDir, url: str) -> Settings:
    """The settings on the embedded database, with keys of the data folder unless they are set."""
    keys = settings.secret_keys or tuple(folder.secret_keys().replace(",", " ").split())
    return settings.model_copy(update={"database_url": url, "secret_keys": keys})


def embedded_postgres(settings: Settings) -> EmbeddedPostgres:
    return EmbeddedPostgres(settings.data_dir, binaries=settings.postgres_bin)


def run(action: Callable[[Broker, Settings], Awaitable[T]], *, on_any_schema: bool = False) -> T:
    """Runs one action against the database, which must be at this version's schema."""

    async def with_broker(settings: Settings) -> T:
        broker = create_broker(settings)
        try:
            if not on_any_schema:
                await _check_schema(broker)
            return await action(broker, settings)
        finally:
            await broker.db.close()

    for last_try in (False, True):
        try:
            with database() as settings:
                return asyncio.run(with_broker(settings))
        except DataDirInUse:
            if last_try:  # a server that started between the look and the claim is there now
                raise
    raise AssertionError("unreachable")


async def _check_schema(broker: Broker) -> None:
    revision, head = await health.revision(broker.db), migrations.head()
    if revision != head:
        raise SettingsError(
            f"the database's schema is at {revision}, this program needs {head}: "
            "run `taskbroker migrate`"
        )


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_rows(
    rows: Sequence[Mapping[str, Any]], *, as_json: bool, nothing: str = "Nothing."
) -> None:
    """Rows as a table, or as a JSON array."""
    if as_json:
        print_json(list(rows))
    elif not rows:
        print(nothing)
    else:
        columns = [Column(name, no_wrap=True) for name in rows[0]]
        table = Table(*columns, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*("" if value is None else str(value) for value in row.values()))
        # What is piped on is not cut to the width of a terminal.
        Console(width=None if sys.stdout.isatty() else 10_000).print(table)


def print_members(members: Mapping[str, Any], *, as_json: bool) -> None:
    """One thing as `name  value` lines, or as a JSON object."""
    if as_json:
        print_json(dict(members))
        return
    width = max(map(len, members), default=0)
    for name, value in members.items():
        print(f"{name:<{width}}  {'' if value is None else value}")


def note(text: str) -> None:
    """Something to know, beside the data on standard output."""
    print(text, file=sys.stderr)
