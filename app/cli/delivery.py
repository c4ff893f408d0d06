"""`taskbroker delivery`: what is on its way to tool servers, and what did not get there."""

from typing import Annotated, Any
from uuid import UUID

import typer

from app.broker.context import Broker
from app.cli.backend import named
from app.cli.runtime import AsJson, note, print_members, print_rows, run
from app.db import signals
from app.db.signals import Delivery, DeliveryFilter
from app.domain.clock import iso
from app.domain.signals import SignalStatus
from app.errors import Refused
from app.settings import Settings

app = typer.Typer(help="Signals on their way to tool servers.", no_args_is_help=True)


@app.command("list")
def list_deliveries(
    backend: Annotated[str | None, typer.Option(help="Only those for this backend.")] = None,
    status: Annotated[
        SignalStatus | None, typer.Option(help="Only those with this status.")
    ] = None,
    task: Annotated[UUID | None, typer.Option(help="Only those about this task.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """List signals of the last seven days, newest first.

    `pending`: on its way, or to be fetched; `delivered`: the callback took it; `seen`: the backend
    got it with a reply, or fetched it; `dead`: every attempt failed.

    Example: `taskbroker delivery list --status dead`
    """

    async def action(broker: Broker, _: Settings) -> list[Delivery]:
        async with broker.db.transaction() as connection:
            backend_id = None if backend is None else (await named(connection, backend)).id
            wanted = DeliveryFilter(backend_id, status, task, limit)
            return await signals.listing(connection, wanted)

    rows = [_row(delivery) for delivery in run(action)]
    print_rows(rows, as_json=as_json, nothing="No such deliveries.")


@app.command()
def redeliver(
    deliveries: Annotated[
        list[int] | None,
        typer.Argument(min=1, max=2**63 - 1, help="Which ones, by the id that `list` shows."),
    ] = None,
    backend: Annotated[
        str | None, typer.Option(help="All of this backend that are dead or have failed so far.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send signals now, with their first webhook-id, and attempts as for new ones.

    Also those that wait for their next attempt. Ends with 1 if there is nothing to send.

    Example: `taskbroker delivery redeliver --backend image-tools`
    """
    if bool(deliveries) == (backend is not None):
        raise Refused("Name deliveries by their ids, or a backend with --backend.")

    async def action(broker: Broker, _: Settings) -> list[int]:
        async with broker.db.transaction() as connection:
            backend_id = None if backend is None else (await named(connection, backend)).id
            return await signals.send_again(
                connection, broker.clock(), ids=deliveries or None, backend_id=backend_id
            )

    again = run(action)
    if as_json:
        print_members({"redelivered": again}, as_json=True)
    elif again:
        print(f"Pending again: {', '.join(map(str, again))}.")
    if left_out := sorted(set(deliveries or ()) - set(again)):
        note(f"There are no such deliveries: {', '.join(map(str, left_out))}.")
    if not again:
        note("There is nothing to send again.")
        raise typer.Exit(1)


def _row(delivery: Delivery) -> dict[str, Any]:
    return {
        "id": delivery.id,
        "backend": delivery.backend,
        "taskRef": str(delivery.task_ref),
        "type": delivery.type,
        "status": str(delivery.status),
        "createdAt": iso(delivery.created_at),
        "attempts": delivery.attempts,
        "lastAttemptAt": None if delivery.attempted_at is None else iso(delivery.attempted_at),
        "lastOutcome": delivery.outcome,
        "nextAttemptAt": None if delivery.due_at is None else iso(delivery.due_at),
        "endedAt": None if delivery.ended_at is None else iso(delivery.ended_at),
    }
