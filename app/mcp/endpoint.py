"""`POST /mcp`: the tasks of every backend, as a plain ASGI callable."""

import structlog

from app.asgi import (
    Answer,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    headers_of,
    read_body,
    send_answer,
    text_header,
)
from app.auth.callers import Callers
from app.broker.context import Broker, Caller
from app.errors import BrokerError
from app.mcp import jsonrpc
from app.mcp.answering import Answering
from app.mcp.door import INTERNAL, Doorkeeper, refusal, turned_away, unfit
from app.mcp.peek import peek

log = structlog.get_logger(__name__)


class McpEndpoint:
    def __init__(
        self,
        broker: Broker,
        callers: Callers,
        doorkeeper: Doorkeeper,
        answering: Answering,
        *,
        max_body_bytes: int,
    ) -> None:
        self._keyring = broker.keyring
        self._callers = callers
        self._doorkeeper = doorkeeper
        self._answering = answering
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive)
        except ClientGone:
            return
        await send_answer(send, answer)

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        headers: Headers = {}
        body = b""
        try:
            headers = headers_of(scope)
            refused = self._refuse(scope["method"], headers)
            if refused is not None:
                return refused
            body = await read_body(headers, receive, self._max_body_bytes)
            owner = await self._callers.owner(text_header(headers, b"authorization"))
        except BrokerError as error:
            return turned_away(error, headers, peek(body, complete=True).id)
        except ClientGone:
            raise
        except Exception:
            log.exception("mcp request failed before its message was read")
            return Answer(500, jsonrpc.error_body(None, INTERNAL))
        return await self._answering(body, headers, Caller(self._keyring.fingerprints(owner)))

    def _refuse(self, method: str, headers: Headers) -> Answer | None:
        """The answer to a request that is turned away before its body is read."""
        why = self._doorkeeper.refuses(headers)
        if why is not None:
            return refusal(403, why)
        if method != "POST":
            return refusal(405, "Send each message as a POST of its own", (b"allow", b"POST"))
        return unfit(headers)
