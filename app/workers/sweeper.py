"""The sweeper: lets time pass for stored tasks, again and again."""

import asyncio
import random

import structlog

from app.broker.context import Broker
from app.broker.expire import Swept, sweep
from app.errors import BrokerError
from app.telemetry import Metrics

PAUSE_MS = 5_000
"""How long to leave a database alone that has just failed."""

log = structlog.get_logger(__name__)


async def run_sweeper(broker: Broker, metrics: Metrics, interval_ms: int) -> None:
    """Sweeps until it is cancelled; a database that is away is waited for."""
    while True:
        try:
            async with broker.db.own_connection() as connection:
                back_since = broker.clock()  # who knows for how long nobody could report
                while not connection.is_closed():
                    _count(await sweep(broker, connection, back_since), metrics)
                    await asyncio.sleep(_with_jitter(interval_ms))
        except BrokerError as error:
            log.warning("the sweeper waits for the database", reason=error.detail)
        except Exception:
            log.exception("sweep failed")
        await asyncio.sleep(_with_jitter(max(interval_ms, PAUSE_MS)))


def _with_jitter(interval_ms: int) -> float:
    # Replicas that started together should not sweep together.
    return interval_ms / 1000 * random.uniform(0.8, 1.2)  # noqa: S311 - no secret


def _count(swept: Swept, metrics: Metrics) -> None:
    for what, count in swept.as_dict().items():
        if count:
            metrics.swept.labels(what).inc(count)
            log.info("swept", what=what, count=count)
