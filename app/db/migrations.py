"""The schema's revisions, applied by Alembic."""

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

import migrations
from app.db.engine import create_engine, storage_errors

_LOCK = 0x7461736B62726F6B  # one number for "a migration of the task broker runs"


def config(connection: Connection | None = None) -> Config:
    """Alembic's configuration; `connection` is the one to migrate on."""
    settings = Config(attributes={"connection": connection})
    settings.set_main_option("script_location", str(Path(migrations.__file__).parent))
    return settings


def head() -> str:
    """The newest revision that this program knows."""
    revision = ScriptDirectory.from_config(config()).get_current_head()
    assert revision is not None  # there is always a first one
    return revision


async def migrate(database_url: str, revision: str = "head") -> tuple[str | None, str | None]:
    """Brings the schema to a revision; the revisions before and after.

    Any number of replicas may call this at once: they take turns on an advisory lock.
    """
    engine = create_engine(database_url, pool_size=1, statement_timeout=None)
    try:
        with storage_errors():
            async with engine.connect() as connection:
                return await connection.run_sync(_migrate, revision)
    finally:
        await engine.dispose()


def _migrate(connection: Connection, revision: str) -> tuple[str | None, str | None]:
    connection.execute(text("SET lock_timeout = 0"))
    connection.execute(text("SELECT pg_advisory_lock(:lock)"), {"lock": _LOCK})
    connection.commit()
    try:
        before = _revision(connection)
        if revision == "base" or (before is not None and revision not in ("head", before)):
            command.downgrade(config(connection), revision)
        else:
            command.upgrade(config(connection), revision)
        connection.commit()
        return before, _revision(connection)
    finally:
        connection.execute(text("SELECT pg_advisory_unlock(:lock)"), {"lock": _LOCK})
        connection.commit()


def _revision(connection: Connection) -> str | None:
    revision = MigrationContext.configure(connection).get_current_revision()
    connection.commit()
    return revision
