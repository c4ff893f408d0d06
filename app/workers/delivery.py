"""The delivery worker: signals that are due go to the callbacks of their backends.

Claim, commit, send, record: no transaction is open while the network is waited for. A worker that
dies leaves a lease behind; when it has run out, another one sends the signal again.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta

import structlog

from app import __version__
from app.auth.signers import Signers
from app.broker.context import Broker
from app.db import backends, signals
from app.db.changes import Watch
from app.db.engine import Driver
from app.db.signals import Attempt, Claimed
from app.domain.clock import after
from app.domain.signals import SignalStatus, next_attempt, retry_after
from app.errors import BrokerError, StorageUnavailable
from app.telemetry import Metrics
from app.workers.callbacks import Callbacks, Kind, Outcome

EACH = 8
"""How many signals go to one backend at a time, from one process."""
ROOM = 500
"""How many signals a process sends at a time; with half of them taken, one to each backend."""
ROOM_BYTES = 32 * 1024 * 1024
SPACING_SECONDS = 0.003
"""Between two looks for signals, so that a rush shares them."""
LEASE = timedelta(seconds=30)
"""How long a claimed signal is left to its worker: twice the time of an attempt."""
RECORD_ATTEMPTS = 10
RECORD_PAUSE_SECONDS = 1.0
LOOK_SECONDS = 1.0
"""How often to look for signals that have become due."""
DRAIN_SECONDS = 5.0
PAUSE_SECONDS = 5.0
"""How long to leave a database alone that has just failed."""
_NO_SECRET = "it has no webhook secret that can be used: `taskbroker backend rotate-secret NAME`"  # noqa: S105 - a sentence
_SLOW = (Kind.TIMEOUT, Kind.UNREACHABLE)
_HEADERS = {"content-type": "application/json", "user-agent": f"taskbroker/{__version__}"}

log = structlog.get_logger(__name__)


class DeliveryWorker:
    """Sends signals until it is told to end."""

    def __init__(
        self, broker: Broker, signers: Signers, callbacks: Callbacks, metrics: Metrics
    ) -> None:
        self._broker = broker
        self._signers = signers
        self._callbacks = callbacks
        self._metrics = metrics
        self._sending: dict[asyncio.Task[None], Claimed] = {}
        self._slow: set[int] = set()
        """Backends that let us wait: they get one signal at a time until one arrives."""

    async def run(self) -> None:
        """Claims and sends until it is cancelled; a database that is away is waited for."""
        with self._broker.db.news.watching_all() as news:
            while True:
                try:
                    async with self._broker.db.own_connection() as connection:
                        while not connection.is_closed():
                            for claimed in await self._claim(connection):
                                self._send(claimed, news)
                            await asyncio.sleep(SPACING_SECONDS)
                            await news.changes(LOOK_SECONDS)
                except BrokerError as error:
                    log.warning("deliveries wait for the database", reason=error.detail)
                except Exception:
                    log.exception("deliveries failed")
                await asyncio.sleep(PAUSE_SECONDS)

    async def close(self) -> None:
        """Lets what is being sent arrive, for a while, and gives the rest back."""
        if self._sending:
            await asyncio.wait(self._sending, timeout=DRAIN_SECONDS)
        unfinished = dict(self._sending)
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
        if unfinished:
            ids = [claimed.id for claimed in unfinished.values()]
            try:
                async with self._broker.db.own_connection() as connection:
                    await signals.release(connection, ids, self._broker.clock())
            except BrokerError as error:  # then their leases run out
                log.warning("deliveries were not given back", reason=error.detail)
        await self._callbacks.close()

    async def _claim(self, connection: Driver) -> list[Claimed]:
        now = self._broker.clock()
        room = ROOM - len(self._sending)
        size = ROOM_BYTES - sum(len(claimed.body) for claimed in self._sending.values())
        if room <= 0 or size <= 0:
            return []
        each = EACH if room > ROOM // 2 else 1
        return await signals.claim(
            connection, now, now + LEASE, each=each, free=self._free(each), room=room, size=size
        )

    def _free(self, each: int) -> Mapping[int, int]:
        """How many more signals each backend may get now, where that is not `each`."""
        free = dict.fromkeys(self._slow, 1)
        for id_, busy in Counter(claimed.backend_id for claimed in self._sending.values()).items():
            free[id_] = max(0, free.get(id_, each) - busy)
        return free

    def _send(self, claimed: Claimed, news: Watch[int]) -> None:
        def done(task: asyncio.Task[None]) -> None:
            del self._sending[task]
            news.wake()  # there is room for another one

        task = asyncio.create_task(self._deliver(claimed))
        self._sending[task] = claimed
        task.add_done_callback(done)

    async def _deliver(self, claimed: Claimed) -> None:
        try:
            outcome = await self._attempt(claimed)
            await self._insist(claimed, outcome)
        except BrokerError as error:  # its lease runs out, and it is sent again
            log.warning("a delivery was not recorded", reason=error.detail, **_who(claimed))

    async def _insist(self, claimed: Claimed, outcome: Outcome) -> None:
        """Records what became of an attempt, although the database may be away for a while."""
        for _ in range(RECORD_ATTEMPTS - 1):
            try:
                await self._record(claimed, outcome)
            except StorageUnavailable:
                await asyncio.sleep(RECORD_PAUSE_SECONDS)
            else:
                return
        await self._record(claimed, outcome)

    async def _attempt(self, claimed: Claimed) -> Outcome:
        body = claimed.body.encode()
        try:
            signed = await self._signers.headers(
                claimed.backend_id, claimed.webhook_id, self._broker.clock(), body
            )
            if signed is None:
                return Outcome(Kind.FORBIDDEN, detail=_NO_SECRET)
            return await self._callbacks.post(claimed.url, _HEADERS | signed, body)
        except BrokerError:
            raise
        except Exception:  # a fault of ours is an attempt as well, or it would never end
            log.exception("a delivery failed", **_who(claimed))
            return Outcome(Kind.FAULT)

    async def _record(self, claimed: Claimed, outcome: Outcome) -> None:
        now = self._broker.clock()
        wait = None if outcome.retry_after is None else retry_after(outcome.retry_after, now)
        attempt = self._judge(claimed, outcome, now, wait)
        if outcome.kind in _SLOW:
            self._slow.add(claimed.backend_id)
        elif outcome.kind is Kind.DELIVERED:
            self._slow.discard(claimed.backend_id)
        if outcome.kind is Kind.GONE or wait is not None:
            whose = (claimed.backend_id, claimed.url)
            async with self._broker.db.transaction() as connection:
                if wait is None:
                    await backends.set_callback_gone(connection, *whose, now)
                else:
                    await backends.let_callback_rest(connection, *whose, after(now, wait))
        if await self._broker.db.record(attempt):
            self._tell(claimed, outcome, attempt)

    def _judge(
        self, claimed: Claimed, outcome: Outcome, now: datetime, wait: int | None
    ) -> Attempt:
        made = claimed.attempts + 1
        if outcome.kind is Kind.DELIVERED:
            status, due_at = SignalStatus.DELIVERED, None
        else:
            chance = random.random()  # noqa: S311 - no secret
            due_at = next_attempt(made, now, chance, wait)
            if outcome.kind is Kind.GONE and due_at is None:
                due_at = now  # it is kept for when the operator enables the callback again
            status = SignalStatus.DEAD if due_at is None else SignalStatus.PENDING
        ended_at = now if due_at is None else None
        return Attempt(claimed.id, made, now, _exactly(outcome), status, due_at, ended_at)

    def _tell(self, claimed: Claimed, outcome: Outcome, attempt: Attempt) -> None:
        self._metrics.deliveries.labels(claimed.backend, _roughly(outcome)).inc()
        if outcome.kind is Kind.DELIVERED:
            seconds = (attempt.attempted_at - claimed.created_at).total_seconds()
            self._metrics.delivery_seconds.labels(claimed.backend).observe(seconds)
            return
        what = {"outcome": attempt.outcome, "mend": outcome.detail, "attempt": attempt.attempts}
        if outcome.kind is Kind.GONE:
            log.error("a callback wants no more signals (410)", **_who(claimed))
        elif attempt.status is SignalStatus.DEAD:
            log.error("a signal could not be delivered", **what, **_who(claimed))
        else:
            log.warning("a delivery failed", **what, **_who(claimed))


def _exactly(outcome: Outcome) -> str:
    return outcome.kind if outcome.status is None else f"{outcome.kind} {outcome.status}"


def _roughly(outcome: Outcome) -> str:
    """As a label: one for each hundred of statuses."""
    if outcome.kind is Kind.STATUS and outcome.status is not None:
        return f"{outcome.status // 100}xx"
    return outcome.kind


def _who(claimed: Claimed) -> dict[str, object]:
    return {
        "backend": claimed.backend,
        "task_ref": str(claimed.task_ref),
        "signal": claimed.type,
        "delivery": claimed.id,
    }
