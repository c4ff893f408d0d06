"""`taskbroker migrate`, `sweep`, `keys new`."""

import asyncio
import secrets
from base64 import urlsafe_b64encode

import typer

from app.broker.context import Broker
from app.broker.expire import Swept
from app.broker.expire import sweep as sweep_once
from app.cli.runtime import AsJson, database, print_members, run
from app.db import migrations
from app.domain.task_ids import KEY_BYTES
from app.settings import Settings, SettingsError

keys = typer.Typer(help="Secret keys of the service.", no_args_is_help=True)


def migrate() -> None:
    """Bring the database's schema to this version. Safe from several replicas at once.

    Example: `TASKBROKER_DATABASE_URL=postgresql://… taskbroker migrate`
    """
    with database() as settings:
        if settings.pooler == "transaction":
            raise SettingsError(
                "migrate needs a session: give it a TASKBROKER_DATABASE_URL that leads past the "
                "pooler, and no TASKBROKER_POOLER"
            )
        before, after = asyncio.run(migrations.migrate(str(settings.database_url)))
    print(f"The schema is at {after}." if before == after else f"Migrated {before} -> {after}.")


def sweep(as_json: AsJson = False) -> None:
    """Do one pass of what the server's sweeper does: end what is overdue, purge what has expired.

    Example: `taskbroker sweep --json`
    """

    async def action(broker: Broker, _: Settings) -> Swept:
        async with broker.db.own_connection() as connection:
            return await sweep_once(broker, connection)

    print_members(run(action).as_dict(), as_json=as_json)


@keys.command("new")
def new_key(as_json: AsJson = False) -> None:
    """Print a fresh key for TASKBROKER_SECRET_KEYS; docs/operations.md says how to rotate.

    Example: `export TASKBROKER_SECRET_KEYS=$(taskbroker keys new)`
    """
    key = urlsafe_b64encode(secrets.token_bytes(KEY_BYTES)).decode().rstrip("=")
    if as_json:
        print_members({"secretKey": key}, as_json=True)
    else:
        print(key)
