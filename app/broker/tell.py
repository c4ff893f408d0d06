"""Tell: a backend learns what it must, other than by a delivery to its callback."""

from collections.abc import Sequence

from app.broker.context import Broker
from app.broker.report import Reported
from app.db import signals
from app.db.signals import Outstanding
from app.domain.backends import Backend
from app.errors import StorageUnavailable


async def acknowledge(broker: Broker, backend: Backend, ids: Sequence[int]) -> None:
    """Ends signals that a backend has fetched; others' stay as they are."""
    if ids:
        async with broker.db.transaction() as connection:
            await signals.acknowledge(connection, backend.id, ids, broker.clock())


async def news(broker: Broker, backend: Backend, *, wait: bool) -> list[Outstanding]:
    """The oldest signals that a backend has not got yet.

    With `wait` there is at least one: holds no connection while there is none, and outlives a
    database that is away. The caller sets an end to it.
    """
    with broker.db.news.watching([backend.id]) as watch:
        found = await broker.db.outstanding(backend.id)
        while wait and not found:
            await watch.changes()
            try:
                found = await broker.db.outstanding(backend.id)
            except StorageUnavailable:
                continue
    return found


async def settle(broker: Broker, reported: Reported) -> None:
    """Ends the signals whose news a backend got with the reply to its event."""
    if reported.newest_signal is not None:
        async with broker.db.transaction() as connection:
            await signals.settle(
                connection, reported.task.ref, reported.newest_signal, broker.clock()
            )
