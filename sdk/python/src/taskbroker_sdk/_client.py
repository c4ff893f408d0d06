"""What both clients are, apart from their I/O."""

import os
import time
from collections.abc import Mapping
from typing import Any, Self

import httpx

from taskbroker_sdk._account import Account
from taskbroker_sdk._errors import closed
from taskbroker_sdk._talks import Talks
from taskbroker_sdk._wire import Request

LAST_ROUND = 10.0
"""Seconds after the grace in which `close` lets ends be reported: as long as an attempt takes."""
TOO_LATE = "the broker did not answer before the client was closed"
LONG_POLL = 25
"""Seconds that a broker may hold an answer back until there are signals."""


def timeout_for(request: Request, usual: httpx.Timeout) -> httpx.Timeout:
    """How long an attempt may take: the client's own times, and the wait that was asked for."""
    if not request.wait or usual.read is None:
        return usual
    return httpx.Timeout(
        connect=usual.connect,
        read=usual.read + request.wait,
        write=usual.write,
        pool=usual.pool,
    )


class Client:
    """A backend's account, and how it behaves. Times are in seconds."""

    def __init__(
        self,
        url: str,
        backend: str,
        api_key: str,
        webhook_secret: str | None = None,
        *,
        attempts: int = 8,
        heartbeat: float = 2.0,
        grace: float = 5.0,
    ) -> None:
        self._account = Account(url, backend, api_key, webhook_secret)
        self._talks = Talks(backend, attempts, heartbeat)
        self._grace = grace
        self._closed = False

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ, **options: Any) -> Self:
        """Reads BROKER_URL, BROKER_BACKEND, BROKER_API_KEY, and BROKER_WEBHOOK_SECRET if set.

        The options are those of the constructor. ValueError names what is missing.
        """
        account = Account.from_env(environ)
        return cls(account.url, account.backend, account.api_key, account.webhook_secret, **options)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._account.url!r}, {self._account.backend!r})"

    @property
    def _secret(self) -> str:
        """What the broker signs with. ValueError if the client does not have it."""
        if self._account.webhook_secret is None:
            raise ValueError(
                "webhook_secret is not set (BROKER_WEBHOOK_SECRET): no signal can be verified"
            )
        return self._account.webhook_secret

    def _end_of_closing(self) -> float:
        """When `close` returns, whatever is left, by the monotonic clock."""
        return time.monotonic() + self._grace + LAST_ROUND

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise closed()
