"""The tool server's end of `callbackUrl`: takes the signals that a broker posts to it.

`SignalReceiver` is for threads and functions, `AsyncSignalReceiver` for asyncio; they do the same.
"""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from concurrent.futures import Future
from inspect import isawaitable, iscoroutinefunction
from typing import Any, NamedTuple, TypeAlias

from taskbroker_sdk._errors import CancelRequested
from taskbroker_sdk._signals import Memory, Signal, log
from taskbroker_sdk._signing import Headers, genuine_id, signing_keys

MAX_BODY = 2 * 1024 * 1024
BODY_SECONDS = 15.0
"""As long as a broker waits for an answer."""

FAILURE = "signal %s of task %s could not be handled"

SignalHandler: TypeAlias = Callable[[Signal], object]
"""What becomes of a signal. If it raises, the broker will send the signal again."""

_Scope: TypeAlias = MutableMapping[str, Any]
_Message: TypeAlias = MutableMapping[str, Any]
_Receive: TypeAlias = Callable[[], Awaitable[_Message]]
_Send: TypeAlias = Callable[[_Message], Awaitable[None]]


class SignalReply(NamedTuple):
    """What to answer: in Flask, a view may return it as it is."""

    text: str
    status: int


TAKEN = SignalReply("", 204)
MALFORMED = SignalReply("The body is no signal.\n", 400)
UNAUTHENTIC = SignalReply("The signature is missing, wrong or too old.\n", 401)
NOT_POSTED = SignalReply("Signals are posted.\n", 405)
TOO_SLOW = SignalReply("The body did not come in time.\n", 408)
TOO_LARGE = SignalReply("The body is too large.\n", 413)
FAILED = SignalReply("The signal could not be handled; send it again.\n", 500)


class _Receiver:
    """What both receivers are, apart from when they wait."""

    def __init__(
        self, secrets: str | Iterable[str], handler: SignalHandler, *, max_body: int = MAX_BODY
    ) -> None:
        self._keys = signing_keys(secrets)
        self._handler = handler
        self._max_body = max_body
        self._handled = Memory()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}>"

    def _opened(self, headers: Headers, body: bytes) -> Signal | SignalReply:
        """The signal inside a request, or the answer where there is nothing to handle."""
        if len(body) > self._max_body:
            return TOO_LARGE
        webhook_id = genuine_id(self._keys, headers, body, time.time())
        if webhook_id is None:
            return UNAUTHENTIC
        try:
            return Signal.of(webhook_id, json.loads(body)) or TAKEN
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return MALFORMED


class SignalReceiver(_Receiver):
    """Checks what was posted, and hands each signal to `handler` once, until that has succeeded.

    `secrets` is the webhook secret of the backend, or several. `receive` may be called from any
    thread.
    """

    def __init__(
        self, secrets: str | Iterable[str], handler: SignalHandler, *, max_body: int = MAX_BODY
    ) -> None:
        if iscoroutinefunction(handler):
            raise TypeError("the handler is a coroutine function: use AsyncSignalReceiver")
        super().__init__(secrets, handler, max_body=max_body)
        self._under_way: dict[str, Future[SignalReply]] = {}
        self._lock = threading.Lock()

    def receive(self, headers: Headers, body: bytes) -> SignalReply:
        """What to answer to a POST request, after its signal has been handled.

        A signal that comes again while it is handled waits for the same outcome.
        """
        signal = self._opened(headers, body)
        if isinstance(signal, SignalReply):
            return signal
        with self._lock:
            if signal in self._handled:
                return TAKEN
            earlier = self._under_way.get(signal.id)
            outcome = self._under_way.setdefault(signal.id, Future())
        if earlier is None:
            self._handle(signal, outcome)
        return outcome.result()

    def _handle(self, signal: Signal, outcome: "Future[SignalReply]") -> None:
        reply = FAILED
        try:
            self._handler(signal)
            reply = TAKEN
        except (Exception, CancelRequested):  # noqa: BLE001 - whatever it was, it comes again
            log.exception(FAILURE, signal.type, signal.task_ref)
        finally:
            with self._lock:
                if reply is TAKEN:
                    self._handled.add(signal)
                del self._under_way[signal.id]
            outcome.set_result(reply)


class AsyncSignalReceiver(_Receiver):
    """The same for asyncio, and an ASGI application: mount it, or give it a route.

    `handler` may be a function or a coroutine function.
    """

    def __init__(
        self, secrets: str | Iterable[str], handler: SignalHandler, *, max_body: int = MAX_BODY
    ) -> None:
        super().__init__(secrets, handler, max_body=max_body)
        self._under_way: dict[str, asyncio.Future[SignalReply]] = {}

    async def receive(self, headers: Headers, body: bytes) -> SignalReply:
        """What to answer to a POST request, after its signal has been handled.

        A signal that comes again while it is handled waits for the same outcome.
        """
        signal = self._opened(headers, body)
        if isinstance(signal, SignalReply):
            return signal
        if signal in self._handled:
            return TAKEN
        outcome = self._under_way.get(signal.id)
        if outcome is None:
            outcome = self._under_way[signal.id] = asyncio.get_running_loop().create_future()
            await self._handle(signal, outcome)
        return await asyncio.shield(outcome)

    async def _handle(self, signal: Signal, outcome: "asyncio.Future[SignalReply]") -> None:
        reply = FAILED
        try:
            done = self._handler(signal)
            if isawaitable(done):
                await done
            reply = TAKEN
        except (Exception, CancelRequested):  # noqa: BLE001 - whatever it was, it comes again
            log.exception(FAILURE, signal.type, signal.task_ref)
        finally:
            if reply is TAKEN:
                self._handled.add(signal)
            del self._under_way[signal.id]
            outcome.set_result(reply)

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """The ASGI application. It answers at every path that leads to it."""
        if scope["type"] != "http":
            raise ValueError(f"signals come by HTTP, not by {scope['type']}")
        reply = await self._reply(scope, receive)
        if reply is not None:
            await _answer(send, reply)

    async def _reply(self, scope: _Scope, receive: _Receive) -> SignalReply | None:
        """None: nobody waits for an answer any more."""
        if scope["method"] != "POST":
            return NOT_POSTED
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read(receive, self._max_body)
        except TimeoutError:
            return TOO_SLOW
        return None if body is None else await self.receive(scope["headers"], body)


# --- ASGI --------------------------------------------------------------------------------------


async def _read(receive: _Receive, limit: int) -> bytes | None:
    """The body, or so much of it that it is over the limit; None if the sender has gone."""
    body = bytearray()
    more = True
    while more and len(body) <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return bytes(body)


async def _answer(send: _Send, reply: SignalReply) -> None:
    body = reply.text.encode()
    headers = [(b"content-type", b"text/plain"), (b"content-length", b"%d" % len(body))]
    if reply is TAKEN:
        headers = []
    elif reply is NOT_POSTED:
        headers.append((b"allow", b"POST"))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
