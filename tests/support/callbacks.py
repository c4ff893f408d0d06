"""The callback endpoint of a tool server: notes what arrives, and answers as the test says."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from app.asgi import Receive, Scope, Send
from app.domain import signing
from app.domain.clock import Clock
from tests.support.servers import Behaviour, Received, answer_with, read_all, serving

OK = answer_with(b"", status=200)


@dataclass(frozen=True)
class Delivered:
    """One attempt, as it arrived; its signature was verified."""

    webhook_id: str
    timestamp: int
    body: bytes

    @property
    def type(self) -> str:
        return str(json.loads(self.body)["type"])

    @property
    def data(self) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.body)["data"]
        return data


class Callback:
    """Takes signals. `answers` are used up one by one; then each is answered with `otherwise`."""

    def __init__(self, clock: Clock) -> None:
        self.url = ""
        self.secrets: list[str] = []
        self.answers: list[Behaviour] = []
        self.otherwise: Behaviour = OK
        self.attempts: list[Delivered] = []
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"]]
        request = Received(scope["method"], scope["path"], scope["query_string"], headers)

        async def already_read() -> Any:
            return {"type": "http.request", "body": request.body, "more_body": False}

        await read_all(request, receive)
        self.attempts.append(self._verified(request))
        behave = self.answers.pop(0) if self.answers else self.otherwise
        request.body = b""
        await behave(request, already_read, send)

    def _verified(self, request: Received) -> Delivered:
        name, sent_at, signatures = (
            (request.header(f"webhook-{part}") or "").encode()
            for part in ("id", "timestamp", "signature")
        )
        keys = [signing.decode_secret(text) for text in self.secrets]
        assert request.method == "POST"
        assert request.header("content-type") == "application/json"
        assert signing.timely(sent_at.decode(), self._clock())
        assert signing.verify(keys, name, sent_at, signatures, request.body), "not signed by us"
        return Delivered(name.decode(), int(sent_at), request.body)

    def types(self) -> list[str]:
        return [attempt.type for attempt in self.attempts]

    def about(self, ref: str) -> Sequence[Delivered]:
        return [attempt for attempt in self.attempts if attempt.data["taskRef"] == ref]


@asynccontextmanager
async def running_callback(clock: Clock) -> AsyncIterator[Callback]:
    callback = Callback(clock)
    async with serving(callback) as url:
        callback.url = f"{url}/signals"
        yield callback
