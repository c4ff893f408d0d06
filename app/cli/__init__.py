"""The command line: `taskbroker`. Exit code 0 is done, 1 refused or failed, 2 wrong usage."""

import sys
from typing import Annotated

import typer

from app import __version__
from app.cli import backend, client, delivery, doctor, operate, serve, task
from app.db.data_dir import DataDirInUse
from app.db.embedded import EmbeddedPostgresError
from app.errors import BrokerError
from app.settings import SettingsError

app = typer.Typer(
    name="taskbroker",
    help="A durable home for MCP tasks.",
    no_args_is_help=True,
    invoke_without_command=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
app.command("serve")(serve.serve)
app.command("migrate")(operate.migrate)
app.command("sweep")(operate.sweep)
app.command("doctor")(doctor.doctor)
app.add_typer(backend.app, name="backend")
app.add_typer(client.app, name="client")
app.add_typer(task.app, name="task")
app.add_typer(delivery.app, name="delivery")
app.add_typer(operate.keys, name="keys")


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """A durable home for MCP tasks."""
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    try:
        app()
    except (BrokerError, SettingsError, EmbeddedPostgresError, DataDirInUse, OSError) as error:
        details = "".join(f"\n  {f.pointer}: {f.detail}" for f in getattr(error, "faults", ()))
        print(f"taskbroker: {error}{details}", file=sys.stderr)
        sys.exit(1)
