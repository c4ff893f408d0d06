"""`/mcp/{backend}`: one URL for a tool server and its tasks.

`tasks/*` and subscriptions to tasks are answered here. Everything else is passed on to the tool
server, and its answer back, as they come; the tool server learns whose call it is from the
`Task-Owner` header.
"""

import asyncio
from typing import NamedTuple

import structlog

from app.asgi import (
    BODY_SECONDS,
    Answer,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    StreamedBody,
    abort,
    headers_of,
    send_answer,
    text_header,
    while_connected,
)
from app.auth.callers import Callers
from app.auth.handles import Handles
from app.auth.remembered import Remembered
from app.broker.context import Broker, Caller
from app.db import backends
from app.domain.backends import NAME, Backend
from app.domain.owners import ANONYMOUS
from app.errors import BrokerError, TooLarge, TooSlow
from app.mcp import forwarding, jsonrpc
from app.mcp.advertising import Advertising
from app.mcp.answering import Answering
from app.mcp.door import INTERNAL, Doorkeeper, Visitor, refusal, turned_away, unfit
from app.mcp.jsonrpc import RpcFailure
from app.mcp.legacy import CANCELLED, named_question, withdrawn_request
from app.mcp.peek import LOOKED_AT, message_id, peek, request_id
from app.mcp.relay import Outbound, Relay, bad_gateway
from app.mcp.resources import ProtectedResources
from app.mcp.streams import Held, Holding
from app.mcp.subjects import LISTEN, is_about_tasks, task_ids
from app.mcp.upstreams import BadGateway, Disabled, Loop
from app.views import modern

log = structlog.get_logger(__name__)

PREFIX = "/mcp/"
_ALLOWED = ("GET", "POST", "DELETE")


class _Route(NamedTuple):
    """Where a request goes that may come in."""

    backend: Backend
    request: Outbound


class Gateway:
    def __init__(
        self,
        broker: Broker,
        callers: Callers,
        doorkeeper: Doorkeeper,
        handles: Handles,
        answering: Answering,
        holding: Holding,
        relay: Relay,
        resources: ProtectedResources,
        *,
        advertising: Advertising,
        pseudonym: bytes,
        max_body_bytes: int,
    ) -> None:
        self._broker = broker
        self._callers = callers
        self._doorkeeper = doorkeeper
        self._handles = handles
        self._answering = answering
        self._holding = holding
        self._relay = relay
        self._resources = resources
        self._advertising = advertising
        self._pseudonym = pseudonym
        self._max_body_bytes = max_body_bytes
        self._backends = Remembered(self._find_backend)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = StreamedBody(receive)
        try:
            decided = await self._decide(scope, body)
            if isinstance(decided, Held):
                await while_connected(body.client_gone(), self._holding.give(decided, send))
                return
            if isinstance(decided, _Route):
                answer = await self._relay(decided.backend, decided.request, body, send)
            else:
                answer = decided
        except ClientGone:
            await abort(scope, receive)
            return
        if answer is not None:
            await send_answer(send, answer)

    async def _decide(self, scope: Scope, body: StreamedBody) -> Answer | Held | _Route:
        headers: Headers = {}
        try:
            headers = headers_of(scope)
            return self._refuse(scope["method"], headers) or await self._route(scope, headers, body)
        except BadGateway as error:
            return bad_gateway(error, request_id(body))
        except BrokerError as error:
            metadata_url = self._resources.metadata_url(_backend_name(scope))
            return turned_away(error, headers, request_id(body), metadata_url)
        except ClientGone:
            raise
        except Exception:
            log.exception("a request failed before it was passed on")
            return Answer(500, jsonrpc.error_body(None, INTERNAL))

    def _refuse(self, method: str, headers: Headers) -> Answer | None:
        why = self._doorkeeper.refuses(headers)
        if why is not None:
            return refusal(403, why)
        if method not in _ALLOWED:
            return refusal(405, "Use POST", (b"allow", ", ".join(_ALLOWED).encode()))
        return None

    async def _route(
        self, scope: Scope, headers: Headers, body: StreamedBody
    ) -> Answer | Held | _Route:
        backend = await self._behind(_backend_name(scope))
        if backend is None or backend.terms.mcp_url is None:
            return refusal(404, "No tool server with an mcp-url is registered under this name")
        if scope["method"] == "POST":
            await body.grow()  # so that also a refusal can carry the id of what it refuses
        authorization = text_header(headers, b"authorization")
        owner, scopes = await self._callers.identity(authorization, backend)
        caller = Caller(
            self._broker.keyring.fingerprints(owner), backend.id, anonymous=owner == ANONYMOUS
        )
        method = await self._method(headers, body) if scope["method"] == "POST" else ""
        if is_about_tasks(method) or await self._is_for_us(method, body, caller):
            refused = unfit(headers)
            if refused is not None:
                return refused
            await body.read(headers, self._max_body_bytes)
            if not is_about_tasks(method) or self._is_ours(method, body.head, backend):
                metadata_url = self._resources.metadata_url(backend.name)
                visitor = Visitor(caller, scopes, metadata_url)
                return await self._answering(body.head, headers, visitor)
        if backend.disabled_at is not None:
            raise Disabled
        if self._came_from_here(headers):
            raise Loop
        edit = self._advertising.edit_of(method, backend, caller)
        handle = self._handles.issue(owner, backend.name)
        request = Outbound(
            scope["method"],
            forwarding.upstream_url(backend.terms.mcp_url, scope["query_string"]),
            forwarding.request_headers(scope, handle, self._pseudonym, plain=edit is not None),
            edit,
            endless=scope["method"] == "GET" or method == LISTEN,
        )
        return _Route(backend, request)

    async def _is_for_us(self, method: str, body: StreamedBody, caller: Caller) -> bool:
        """Whether a message belongs to a request that is held here: the answer to a question
        that `tasks/result` has put, or the news that nobody waits for it any more.
        """
        if method != CANCELLED and (method or not self._answering.takes_answers):
            return False
        if message_id(body) is None:
            await body.grow(self._max_body_bytes + 1)  # it may be the last member
        if method == CANCELLED:
            return self._holds(body, caller)
        rpc_id = message_id(body)
        question = None if rpc_id is None else named_question(rpc_id)
        return question is not None and self._broker.keyring.may_have_minted(question[0])

    def _holds(self, body: StreamedBody, caller: Caller) -> bool:
        try:
            message = jsonrpc.parse(body.head)
        except RpcFailure:
            return False
        if not isinstance(message, jsonrpc.Notification):
            return False
        withdrawn = withdrawn_request(message)
        return withdrawn is not None and self._holding.holds(caller.owner[0], withdrawn)

    def _came_from_here(self, headers: Headers) -> bool:
        return self._pseudonym in headers.get(b"via", b"")

    async def _method(self, headers: Headers, body: StreamedBody) -> str:
        """The method of the message: from its header, or else from as little body as tells it.

        The header is believed in the era that has it: there whoever answers, the broker or the
        tool server, must compare it with the body.
        """
        named = text_header(headers, b"mcp-method")
        if named is not None and text_header(headers, b"mcp-protocol-version") == modern.VERSION:
            return named
        try:
            async with asyncio.timeout(BODY_SECONDS):
                for wanted in (1, LOOKED_AT, self._max_body_bytes + 1):
                    await body.grow(wanted)
                    seen = peek(body.head, complete=body.complete)
                    if seen.settled:
                        return seen.method or ""
        except TimeoutError:
            raise TooSlow("The method of the message did not come in time.") from None
        raise TooLarge("Name the method in the first part of a body this large.")

    def _is_ours(self, method: str, body: bytes, backend: Backend) -> bool:
        if method != LISTEN and not backend.terms.forward_unknown_tasks:
            return True
        try:
            ids = task_ids(body)
        except RpcFailure:
            return True  # the answer says what is wrong with it
        if not ids:
            return method != LISTEN
        if not backend.terms.forward_unknown_tasks:
            return True
        return any(map(self._broker.keyring.may_have_minted, ids))

    async def has_door(self, name: str) -> bool:
        """Whether there is a tool server behind the door of this name."""
        backend = await self._behind(name)
        return backend is not None and backend.terms.mcp_url is not None

    async def _behind(self, name: str) -> Backend | None:
        return await self._backends.get(name) if NAME.fullmatch(name) else None

    async def _find_backend(self, name: str) -> Backend | None:
        async with self._broker.db.transaction() as connection:
            return await backends.by_name(connection, name)


def _backend_name(scope: Scope) -> str:
    path: str = scope["path"]
    return path.removeprefix(PREFIX)
