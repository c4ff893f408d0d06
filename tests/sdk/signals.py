"""The broker's side of signals: what it posts, and where it is polled."""

import asyncio
import json
import secrets as random
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

from app.asgi import Message, Receive, Scope, Send
from app.domain import signing
from taskbroker_sdk._wire import PROBLEMS
from tests.support.servers import respond

AT = "2026-11-30T09:00:00.000Z"
MOST = 100


def new_id() -> str:
    return f"msg_{random.token_hex(16)}"


def message(kind: str = "task.cancel_requested", /, **data: Any) -> dict[str, Any]:
    """A signal as the broker says it."""
    about = {"taskRef": "0193", "status": "working", **data}
    return {"type": kind, "timestamp": AT, "data": about}


@dataclass(frozen=True)
class Delivery:
    """One attempt to post a signal."""

    headers: Mapping[str, str]
    body: bytes


def delivery(
    said: dict[str, Any] | bytes,
    *secrets: str,
    webhook_id: str | None = None,
    timestamp: int | None = None,
) -> Delivery:
    """Signed with each of the backend's secrets, now unless said otherwise."""
    body = said if isinstance(said, bytes) else json.dumps(said).encode()
    webhook_id = webhook_id or new_id()
    timestamp = int(time.time()) if timestamp is None else timestamp
    keys = map(signing.decode_secret, secrets)
    headers = {
        "content-type": "application/json",
        "webhook-id": webhook_id,
        "webhook-timestamp": f"{timestamp}",
        "webhook-signature": " ".join(
            signing.sign(key, webhook_id, timestamp, body) for key in keys
        ),
    }
    return Delivery(headers, body)


@dataclass
class SignalQueue:
    """`GET /v1/signals`. The first requests meet the given statuses, refusals in a broker's words;
    0 is a page that is not the broker's.
    """

    key: str
    waiting: dict[str, dict[str, Any]] = field(default_factory=dict)
    acknowledged: list[str] = field(default_factory=list)
    fates: list[int] = field(default_factory=list)
    forgets: bool = False
    """Whether it loses acknowledgements."""
    polled: int = 0
    _given: dict[str, list[str]] = field(default_factory=dict)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def put(self, said: dict[str, Any]) -> str:
        webhook_id = new_id()
        self.waiting[webhook_id] = said
        self._news.set()
        return webhook_id

    def end(self) -> None:
        """Answers whoever still waits: a thread cannot be stopped from waiting."""
        self._news.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        assert (scope["method"], scope["path"]) == ("GET", "/v1/signals")
        assert (b"authorization", f"Bearer {self.key}".encode()) in scope["headers"]
        self.polled += 1
        query = dict(parse_qsl(scope["query_string"].decode(), strict_parsing=True))
        if self.fates:
            await self._meet(self.fates.pop(0), send)
            return
        self._acknowledge(query.get("after"))
        gone = asyncio.create_task(_gone(receive))
        await self._wait(float(query["wait"]), gone)
        if not gone.done():
            gone.cancel()
            await respond(send, json.dumps(self._batch()).encode())

    async def _meet(self, fate: int, send: Send) -> None:
        if fate == 0:
            await respond(send, b"<h1>not the broker</h1>")
        else:
            problem = {"type": f"{PROBLEMS}refused", "title": f"No ({fate})"}
            await respond(send, json.dumps(problem).encode(), status=fate)

    def _acknowledge(self, cursor: str | None) -> None:
        if cursor is not None and not self.forgets:
            for webhook_id in self._given.pop(cursor):
                del self.waiting[webhook_id]
                self.acknowledged.append(webhook_id)

    async def _wait(self, seconds: float, gone: "asyncio.Task[None]") -> None:
        if not self.waiting:
            self._news.clear()
            news = asyncio.create_task(self._news.wait())
            await asyncio.wait({news, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            news.cancel()

    def _batch(self) -> dict[str, Any]:
        some = list(self.waiting.items())[:MOST]
        cursor = random.token_urlsafe(8)
        self._given[cursor] = [webhook_id for webhook_id, _ in some]
        signals = [{"webhookId": webhook_id, **said} for webhook_id, said in some]
        return {"signals": signals, "cursor": cursor}


async def _gone(receive: Receive) -> None:
    said: Message = {}
    while said.get("type") != "http.disconnect":
        said = await receive()
