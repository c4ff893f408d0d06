"""`taskbroker client`: keys for MCP clients without OAuth."""

import uuid
from typing import Annotated

import typer

from app.auth.keys import key_hash, new_client_key
from app.broker.context import Broker
from app.cli.runtime import AsJson, print_members, print_rows, run
from app.db import clients
from app.domain.clients import Client
from app.domain.clock import iso
from app.errors import NotFound, Refused
from app.settings import Settings

app = typer.Typer(help="Keys for MCP clients without OAuth.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="The client's name.")]


@app.command()
def add(name: Name, as_json: AsJson = False) -> None:
    """Make a key for an MCP client. It is shown now and never again.

    Example: `taskbroker client add desktop --json`
    """
    if not 1 <= len(name) <= 255 or not name.isprintable():
        raise Refused("A name has 1 to 255 printable characters.")
    key = new_client_key()

    async def action(broker: Broker, _: Settings) -> None:
        async with broker.db.transaction() as connection:
            await clients.add(connection, uuid.uuid4(), name, key_hash(key))

    run(action)
    print_members({"name": name, "apiKey": key}, as_json=as_json)


@app.command("list")
def list_clients(as_json: AsJson = False) -> None:
    """List the clients.

    Example: `taskbroker client list`
    """

    async def action(broker: Broker, _: Settings) -> list[Client]:
        async with broker.db.transaction() as connection:
            return await clients.all_of_them(connection)

    rows = [
        {
            "name": client.name,
            "valid": client.revoked_at is None,
            "createdAt": iso(client.created_at),
        }
        for client in run(action)
    ]
    print_rows(rows, as_json=as_json, nothing="No clients yet: `taskbroker client add NAME`.")


@app.command()
def revoke(name: Name) -> None:
    """End a client's key. Its tasks can be reached by nobody from then on.

    Example: `taskbroker client revoke desktop`
    """

    async def action(broker: Broker, _: Settings) -> bool:
        async with broker.db.transaction() as connection:
            return await clients.revoke(connection, name, broker.clock())

    if not run(action):
        raise NotFound(f"There is no client {name} with a valid key.")
    print(f"The key of {name} is revoked; servers notice within seconds.")
