"""The composition root: every part is made here, once, and handed to those who need it."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from app import __version__
from app.asgi import Application, ClientGone, Message, Receive, Scope, Send
from app.auth.access_tokens import AccessTokens
from app.auth.callers import Callers
from app.auth.cursors import Cursors
from app.auth.documents import Documents
from app.auth.handles import Handles
from app.auth.introspection import Endpoint, Introspection
from app.auth.issuer_keys import IssuerKeys
from app.auth.keys import SecretBox
from app.auth.senders import Senders
from app.auth.signers import Signers
from app.backends import documentation, rest
from app.backends.owners import Owners
from app.backends.problems import document, problem
from app.backends.rest import to_response
from app.backends.webhook import PREFIX as WEBHOOKS
from app.backends.webhook import WebhookEndpoint
from app.broker.context import Broker, Policy, TerminalTasks
from app.db import health, migrations
from app.db.database import Database
from app.domain.clock import Clock, utc_now
from app.domain.lifetimes import Lifetimes
from app.domain.task_ids import Keyring
from app.errors import BrokerError, Fault
from app.mcp.advertising import Advertising
from app.mcp.answering import Answering
from app.mcp.door import Doorkeeper
from app.mcp.endpoint import McpEndpoint
from app.mcp.forwarding import pseudonym
from app.mcp.gateway import PREFIX as GATEWAY
from app.mcp.gateway import Gateway
from app.mcp.listening import Listening
from app.mcp.rechecking import Rechecking
from app.mcp.relay import Relay
from app.mcp.resources import WELL_KNOWN, ProtectedResources
from app.mcp.scopes import Scopes
from app.mcp.streams import Holding
from app.mcp.upstreams import Upstreams
from app.settings import Settings
from app.signals import when_ended
from app.telemetry import Metrics
from app.workers.callbacks import Callbacks
from app.workers.delivery import DeliveryWorker
from app.workers.sweeper import run_sweeper

log = structlog.get_logger(__name__)


def create_broker(settings: Settings, clock: Clock = utc_now) -> Broker:
    """The verbs' tools. The settings must name a database and secret keys."""
    if settings.database_url is None or not settings.secret_keys:
        raise ValueError("a broker needs a database and secret keys")
    return Broker(
        db=Database(settings.database_url, clock, pooled=settings.pooler == "transaction"),
        keyring=Keyring(settings.keys),
        clock=clock,
        policy=Policy(
            lifetimes=Lifetimes(
                default_ttl_ms=settings.default_ttl_ms,
                max_ttl_ms=settings.max_ttl_ms,
                unlimited_allowed=settings.allow_unlimited_ttl,
            ),
            poll_interval_ms=settings.default_poll_interval_ms,
            cancel_grace_ms=settings.cancel_grace_ms,
            expired_grace_ms=settings.expired_grace_ms,
        ),
        terminal_tasks=TerminalTasks(settings.cache_bytes),
    )


def create_app(settings: Settings, clock: Clock = utc_now) -> Application:
    """The whole service as one ASGI application.

    The two hot endpoints are plain ASGI callables beside FastAPI, which serves the rest.
    """
    broker = create_broker(settings, clock)
    holding = Holding(per_owner=settings.max_streams_per_owner, in_all=settings.max_streams)
    metrics = Metrics(
        CollectorRegistry(),
        waiters=lambda: broker.db.waiters,
        streams=lambda: len(holding),
        notifications=lambda: broker.db.notifications.arrive,
    )
    oauth = _OAuth(settings, clock, metrics)
    callers = Callers(broker.db, oauth.access_tokens, oauth.introspection)
    senders = Senders(broker.db, SecretBox(settings.keys), clock)
    handles = Handles(settings.keys, clock)
    doorkeeper = Doorkeeper(
        bound_to=settings.host,
        allowed_hosts=settings.allowed_hosts,
        allowed_origins=settings.allowed_origins,
    )
    scopes = Scopes(settings.scopes_read, settings.scopes_write)
    resources = ProtectedResources(
        settings.public_url,
        settings.authorization_servers,
        (*settings.scopes_read, *settings.scopes_write),
    )
    rechecking = Rechecking(callers, scopes)
    listening = Listening(broker, rechecking, max_tasks=settings.max_tasks_per_stream)
    answering = Answering(
        broker,
        Cursors(settings.keys),
        holding,
        listening,
        rechecking,
        scopes,
        metrics,
        legacy=settings.legacy,
        strict_headers=settings.strict_headers,
    )
    mcp = McpEndpoint(
        broker,
        callers,
        doorkeeper,
        answering,
        holding,
        resources,
        max_body_bytes=settings.max_body_bytes,
    )
    upstreams = Upstreams(settings.gateway_timeout_ms / 1000)
    relay = Relay(upstreams, metrics, max_answer_bytes=settings.gateway_max_answer_bytes)
    gateway = Gateway(
        broker,
        callers,
        doorkeeper,
        handles,
        answering,
        holding,
        relay,
        resources,
        advertising=Advertising(legacy=settings.legacy),
        pseudonym=pseudonym(settings.keys[0]),
        max_body_bytes=settings.max_body_bytes,
    )
    webhook = WebhookEndpoint(broker, senders, metrics, max_body_bytes=settings.max_body_bytes)
    callbacks = Callbacks(private_allowed=settings.allow_private_callbacks)
    deliveries = DeliveryWorker(
        broker, Signers(broker.db, SecretBox(settings.keys), clock), callbacks, metrics
    )
    ending = asyncio.Event()

    def drain() -> None:
        ending.set()
        holding.drain()
        relay.drain()

    workers = {
        "sweeper": lambda: run_sweeper(broker, metrics, settings.sweep_interval_ms),
        "deliveries": deliveries.run,
        "notifications": broker.db.notifications.run,
    }
    close = (deliveries.close, upstreams.close, oauth.close)
    api = _create_api(broker, workers, drain, close, metrics)
    _add_metadata(api, resources, gateway)
    owners = Owners(callers, handles, oauth.issuers)
    api.include_router(
        rest.router(
            broker, owners, senders, metrics, ending, max_body_bytes=settings.max_body_bytes
        )
    )

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path: str = scope["path"]
            if path == "/mcp":
                await mcp(scope, receive, send)
                return
            if path.startswith(GATEWAY):
                await gateway(scope, receive, send)
                return
            if path.startswith(WEBHOOKS):
                await webhook(scope, receive, send)
                return
        await api(scope, receive, send)

    return _logged(application) if settings.log_level == "debug" else application


class _OAuth:
    """Who verifies access tokens; nobody where nothing is configured."""

    def __init__(self, settings: Settings, clock: Clock, metrics: Metrics) -> None:
        self._documents = Documents()
        self._keys = {
            issuer: IssuerKeys(issuer, self._documents, clock, metrics.jwks_fetches)
            for issuer in settings.oauth_issuers
        }
        self.access_tokens = AccessTokens(self._keys, clock) if self._keys else None
        endpoint = _introspection_endpoint(settings)
        self.introspection = (
            None if endpoint is None else Introspection(endpoint, self._documents, clock)
        )
        self.issuers = {issuer.name for issuer in settings.oauth_issuers}
        if endpoint is not None:
            self.issuers.add(endpoint.issuer)

    async def close(self) -> None:
        for keys in self._keys.values():
            await keys.close()
        if self.introspection is not None:
            await self.introspection.close()
        await self._documents.close()


def _introspection_endpoint(settings: Settings) -> Endpoint | None:
    if settings.introspection_url is None:
        return None
    named = {issuer.name for issuer in settings.oauth_issuers}
    audiences = [audience for issuer in settings.oauth_issuers for audience in issuer.audiences]
    return Endpoint(
        url=settings.introspection_url,
        client_id=settings.introspection_client_id or "",
        client_secret=settings.introspection_client_secret or "",
        issuer=settings.introspection_issuer or settings.introspection_url,
        audiences=frozenset((*audiences, *settings.introspection_audience)),
        other_issuers=frozenset(named) if settings.authorization_servers else None,
    )


def _logged(application: Application) -> Application:
    """A line for every request, for debugging only: it costs more than many of the answers."""

    async def logged(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await application(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def send_and_note(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        await application(scope, receive, send_and_note)
        log.debug(
            "request handled",
            method=scope["method"],
            path=scope["path"],
            status=status,
            ms=round((time.perf_counter() - started) * 1000, 1),
        )

    return logged


def _create_api(
    broker: Broker,
    workers: Mapping[str, Callable[[], Coroutine[Any, Any, None]]],
    drain: Callable[[], None],
    close: Sequence[Callable[[], Awaitable[None]]],
    metrics: Metrics,
) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await _look_at_schema(broker)
        working = [asyncio.create_task(run(), name=name) for name, run in workers.items()]
        with when_ended(drain):
            yield
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)
        for close_one in close:
            await close_one()
        await broker.db.close()

    api = FastAPI(
        title="Task Broker",
        version=__version__,
        summary="The backend API: tool servers create MCP tasks and report on them.",
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,  # a Location made of the Host header is no place for a key
    )
    _add_operations(api, broker, metrics)
    _add_error_handlers(api)
    api.openapi = lambda: _openapi(api)  # type: ignore[method-assign]  # FastAPI's own way to extend
    return api


async def _look_at_schema(broker: Broker) -> None:
    """Says what is wrong with the database; the service starts all the same, and waits for it."""
    try:
        revision = await health.revision(broker.db)
    except BrokerError as error:
        log.error("the database cannot be used yet", reason=error.detail)  # noqa: TRY400 - no trace
        return
    if revision != migrations.head():
        log.error("run `taskbroker migrate`", schema=revision, needed=migrations.head())


def _add_operations(api: FastAPI, broker: Broker, metrics: Metrics) -> None:
    head = migrations.head()

    @api.api_route("/healthz", methods=["GET", "HEAD"], include_in_schema=False)
    async def healthz() -> Response:
        return Response("ok\n", media_type="text/plain")

    @api.api_route("/readyz", methods=["GET", "HEAD"], include_in_schema=False)
    async def readyz() -> Response:
        try:
            revision = await health.revision(broker.db)
        except BrokerError:
            return Response("the database cannot be reached\n", 503, media_type="text/plain")
        if revision != head:
            said = f"the schema is at {revision}, this program needs {head}: run migrate\n"
            return Response(said, 503, media_type="text/plain")
        return Response("ready\n", media_type="text/plain")

    @api.get("/metrics", include_in_schema=False)
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)


def _add_metadata(api: FastAPI, resources: ProtectedResources, gateway: Gateway) -> None:
    """What MCP clients need to know to get a token for a door (RFC 9728)."""

    def answer(backend: str | None) -> Response:
        metadata = resources.metadata(backend)
        if metadata is None:
            raise HTTPException(404, "OAuth is not configured here")
        return Response(metadata, media_type="application/json")

    @api.get(WELL_KNOWN, include_in_schema=False)
    @api.get(f"{WELL_KNOWN}/mcp", include_in_schema=False)
    async def of_all() -> Response:
        return answer(None)

    @api.get(WELL_KNOWN + "/mcp/{backend}", include_in_schema=False)
    async def of_one(backend: str) -> Response:
        if not await gateway.has_door(backend):
            raise HTTPException(404, "No tool server with an mcp-url has this name")
        return answer(backend)


def _add_error_handlers(api: FastAPI) -> None:
    @api.exception_handler(BrokerError)
    async def refused(_: Request, error: BrokerError) -> Response:
        answer = problem(error)
        if answer.status == 500:
            log.error("request failed", reason=error.detail)
        return to_response(answer)

    @api.exception_handler(RequestValidationError)
    async def bad_parameters(_: Request, error: RequestValidationError) -> Response:
        faults = tuple(
            Fault("/" + "/".join(str(step) for step in fault["loc"][1:]), str(fault["msg"]))
            for fault in error.errors()
        )
        title = "The request cannot be read"
        detail = "A parameter of the query has a bad value."
        return to_response(document(400, "invalid", title, detail, faults))

    @api.exception_handler(HTTPException)
    async def not_here(_: Request, error: HTTPException) -> Response:
        answer = document(error.status_code, "http", str(error.detail), str(error.detail))
        response = to_response(answer)
        response.headers.update(error.headers or {})
        return response

    @api.exception_handler(ClientGone)
    async def client_gone(_: Request, __: ClientGone) -> Response:
        return Response(status_code=400)  # nobody reads it

    @api.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        log.error("request failed", exc_info=error)
        return to_response(problem(BrokerError()))


def _openapi(api: FastAPI) -> dict[str, object]:
    if api.openapi_schema is None:
        schema = get_openapi(
            title=api.title, version=api.version, summary=api.summary, routes=api.routes
        )
        schema["paths"][WEBHOOKS + "{backend}"] = documentation.WEBHOOK_PATH
        schema.setdefault("components", {})["securitySchemes"] = documentation.SECURITY_SCHEMES
        api.openapi_schema = schema
    return api.openapi_schema
