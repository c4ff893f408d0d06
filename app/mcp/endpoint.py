"""`POST /mcp`: the tasks of every backend, as a plain ASGI callable."""

import structlog

from app.asgi import (
    Answer,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    abort,
    client_gone,
    headers_of,
    read_body,
    send_answer,
    text_header,
    while_connected,
)
from app.auth.callers import Callers
from app.broker.context import Broker, Caller
from app.domain.owners import ANONYMOUS
from app.errors import BrokerError
from app.mcp import jsonrpc
from app.mcp.answering import Answering
from app.mcp.door import INTERNAL, Doorkeeper, Visitor, refusal, turned_away, unfit
from app.mcp.peek import peek
from app.mcp.resources import ProtectedResources
from app.mcp.streams import Held, Holding

log = structlog.get_logger(__name__)


class McpEndpoint:
    def __init__(
        self,
        broker: Broker,
        callers: Callers,
        doorkeeper: Doorkeeper,
        answering: Answering,
        holding: Holding,
        resources: ProtectedResources,
        *,
        max_body_bytes: int,
    ) -> None:
        self._keyring = broker.keyring
        self._callers = callers
        self._doorkeeper = doorkeeper
        self._answering = answering
        self._holding = holding
        self._metadata_url = resources.metadata_url(None)
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer = await self._answer(scope, receive)
            if isinstance(answer, Held):
                await while_connected(client_gone(receive), self._holding.give(answer, send))
                return
        except ClientGone:
            await abort(scope, receive)
            return
        await send_answer(send, answer)

    async def _answer(self, scope: Scope, receive: Receive) -> Answer | Held:
        headers: Headers = {}
        body = b""
        try:
            headers = headers_of(scope)
            refused = self._refuse(scope["method"], headers)
            if refused is not None:
                return refused
            body = await read_body(headers, receive, self._max_body_bytes)
            owner, scopes = await self._callers.identity(text_header(headers, b"authorization"))
        except BrokerError as error:
            seen = peek(body, complete=True)
            rpc_id = seen.id if seen.method is not None else None
            return turned_away(error, headers, rpc_id, self._metadata_url)
        except ClientGone:
            raise
        except Exception:
            log.exception("mcp request failed before its message was read")
            return Answer(500, jsonrpc.error_body(None, INTERNAL))
        caller = Caller(self._keyring.fingerprints(owner), anonymous=owner == ANONYMOUS)
        return await self._answering(body, headers, Visitor(caller, scopes, self._metadata_url))

    def _refuse(self, method: str, headers: Headers) -> Answer | None:
        """The answer to a request that is turned away before its body is read."""
        why = self._doorkeeper.refuses(headers)
        if why is not None:
            return refusal(403, why)
        if method != "POST":
            return refusal(405, "Send each message as a POST of its own", (b"allow", b"POST"))
        return unfit(headers)
