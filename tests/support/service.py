"""The service under test, and the two kinds of people who use it: tool servers and MCP clients."""

import asyncio
import json
import secrets
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import httpx

from app.asgi import Application, Message
from app.auth import remembered
from app.auth.issuing import issue_key, issue_secret
from app.auth.keys import SecretBox, key_hash, new_client_key
from app.broker.context import Broker
from app.broker.expire import Swept, sweep
from app.db import backends, clients
from app.db import tasks as stored
from app.db.tasks import HistoryEntry
from app.domain import signing
from app.domain.backends import BackendTerms
from app.domain.clock import iso
from app.main import create_app, create_broker
from app.settings import Settings
from tests.support.clock import ShiftedClock
from tests.support.secrecy import new_token, secret
from tests.support.servers import serving

VERSION = "2026-07-28"
TASKS = "io.modelcontextprotocol/tasks"
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"
META = {VERSION_KEY: VERSION, CAPABILITIES_KEY: {"extensions": {TASKS: {}}}}
ELICITATION = {
    "method": "elicitation/create",
    "params": {
        "message": "Really?",
        "requestedSchema": {"type": "object", "properties": {"sure": {"type": "boolean"}}},
    },
}


def new_secret_key() -> str:
    """A key for SECRET_KEYS."""
    return secret(urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("="))


def test_settings(database_url: str, **changes: Any) -> Settings:
    """Settings for tests: the sweeper of the service sleeps, `Service.sweep` does its work."""
    values = {
        "database_url": database_url,
        "secret_keys": (new_secret_key(),),
        "sweep_interval_ms": 86_400_000,
        "log_level": "debug",
        **changes,
    }
    return Settings.model_validate(values)


test_settings.__test__ = False  # type: ignore[attr-defined]  # no test, in spite of its name


class McpClient:
    """An MCP client of the modern era, written out: every header and member is visible."""

    def __init__(self, http: httpx.AsyncClient, token: str | None, path: str = "/mcp") -> None:
        self.token = token
        self.path = path
        self._http = http

    def at(self, replica: "Service") -> "McpClient":
        """The same client, talking to another replica."""
        return McpClient(replica.http, self.token, self.path)

    def through(self, backend: str) -> "McpClient":
        """The same client at the gateway to a backend."""
        return McpClient(self._http, self.token, f"/mcp/{backend}")

    async def post(
        self, body: Any, headers: dict[str, str | None] | None = None, *, path: str | None = None
    ) -> httpx.Response:
        """Sends a body as it is; a header given as `None` is left out."""
        sent: dict[str, str | None] = {
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
            "authorization": None if self.token is None else f"Bearer {self.token}",
            **(headers or {}),
        }
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        kept = {name: value for name, value in sent.items() if value is not None}
        return await self._http.post(path or self.path, content=content, headers=kept)

    async def request(
        self,
        method: str,
        params: dict[str, Any] | None = None,
        *,
        headers: dict[str, str | None] | None = None,
        rpc_id: Any = 1,
        meta: dict[str, Any] | None = None,
    ) -> httpx.Response:
        """A well-formed request, unless the test takes something away."""
        params = {**(params or {}), "_meta": META if meta is None else meta}
        routing: dict[str, str | None] = {"mcp-protocol-version": VERSION, "mcp-method": method}
        if isinstance(params.get("taskId"), str) and params["taskId"].isascii():
            routing["mcp-name"] = params["taskId"]
        message = {"jsonrpc": "2.0", "id": rpc_id, "method": method, "params": params}
        return await self.post(message, {**routing, **(headers or {})})

    async def get(self, task_id: str) -> dict[str, Any]:
        """The result of `tasks/get`."""
        return _result(await self.request("tasks/get", {"taskId": task_id}))

    async def update(self, task_id: str, responses: dict[str, Any]) -> dict[str, Any]:
        params = {"taskId": task_id, "inputResponses": responses}
        return _result(await self.request("tasks/update", params))

    async def cancel(self, task_id: str) -> dict[str, Any]:
        return _result(await self.request("tasks/cancel", {"taskId": task_id}))

    async def error(self, method: str, task_id: str, **params: Any) -> dict[str, Any]:
        """The error object of a `tasks/*` request that is answered with HTTP 200."""
        response = await self.request(method, {"taskId": task_id, **params})
        assert response.status_code == 200, response.text
        error: dict[str, Any] = response.json()["error"]
        return error


def _result(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()["result"]
    return result


@dataclass(frozen=True)
class CreatedTask:
    ref: str
    id: str


class ToolServer:
    """A backend of the broker, with its key and its secret."""

    def __init__(
        self, http: httpx.AsyncClient, clock: ShiftedClock, name: str, key: str, webhook_secret: str
    ) -> None:
        self.name = name
        self.key = key
        self.webhook_secret = webhook_secret
        self._http = http
        self._clock = clock

    def at(self, replica: "Service") -> "ToolServer":
        """The same tool server, talking to another replica."""
        return ToolServer(replica.http, replica.clock, self.name, self.key, self.webhook_secret)

    @property
    def authorization(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    async def post_task(self, body: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._http.post("/v1/tasks", content=content, headers=self.authorization)

    async def create(self, owner: McpClient | dict[str, Any], **members: Any) -> CreatedTask:
        """Creates a task for a client (or an owner in the API's own words)."""
        who = owner if isinstance(owner, dict) else owner_of(owner)
        response = await self.post_task({"owner": who, **members})
        assert response.status_code in (200, 201), response.text
        made = response.json()
        return CreatedTask(made["taskRef"], secret(made["createTaskResult"]["taskId"]))

    async def read(self, ref: str) -> httpx.Response:
        return await self._http.get(f"/v1/tasks/{ref}", headers=self.authorization)

    async def list(self, **query: Any) -> httpx.Response:
        return await self._http.get("/v1/tasks", params=query, headers=self.authorization)

    def event(self, data: Any, *, sent_at: str | None = None) -> bytes:
        """The body of an event, sent now unless said otherwise."""
        timestamp = sent_at or iso(self._clock())
        return json.dumps({"type": "task.updated", "timestamp": timestamp, "data": data}).encode()

    def signed(
        self, body: bytes, *, webhook_id: str | None = None, timestamp: int | None = None
    ) -> dict[str, str]:
        """The headers of Standard Webhooks for a body."""
        webhook_id = webhook_id or f"msg_{secrets.token_hex(12)}"
        timestamp = int(self._clock().timestamp()) if timestamp is None else timestamp
        key = signing.decode_secret(self.webhook_secret)
        return {
            "webhook-id": webhook_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": signing.sign(key, webhook_id, timestamp, body),
        }

    async def post_event(
        self, body: bytes, headers: dict[str, str], *, to: str | None = None
    ) -> httpx.Response:
        path = f"/v1/webhooks/{to or self.name}"
        return await self._http.post(path, content=body, headers=headers)

    async def report(
        self,
        task: CreatedTask,
        *,
        webhook_id: str | None = None,
        sent_at: str | None = None,
        **data: Any,
    ) -> httpx.Response:
        """Reports on a task by a signed webhook."""
        body = self.event({"taskRef": task.ref, **data}, sent_at=sent_at)
        return await self.post_event(body, self.signed(body, webhook_id=webhook_id))

    async def complete(self, task: CreatedTask, result: Any = None) -> dict[str, Any]:
        """Completes a task; the answer to the event."""
        response = await self.report(task, status="completed", result=result or {"content": []})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def ask(self, task: CreatedTask, *keys: str) -> httpx.Response:
        """Asks one question for each key."""
        questions = dict.fromkeys(keys, ELICITATION)
        return await self.report(task, status="input_required", inputRequests=questions)


def owner_of(client: McpClient) -> dict[str, Any]:
    if client.token is None:
        return {"anonymous": True}
    return {"authorization": f"Bearer {client.token}"}


class Service:
    """One running broker."""

    def __init__(self, http: httpx.AsyncClient, broker: Broker, settings: Settings) -> None:
        assert isinstance(broker.clock, ShiftedClock)
        self.http = http
        self.settings = settings
        self.clock = broker.clock
        self.broker = broker
        """The verbs' tools on the same database, for what has no HTTP surface."""

    def client(self, token: str | None = None) -> McpClient:
        """An MCP client with an opaque token of its own."""
        return McpClient(self.http, token or new_token())

    def anonymous(self) -> McpClient:
        return McpClient(self.http, None)

    async def keyed_client(self, name: str = "desktop") -> McpClient:
        """An MCP client with a key of the broker."""
        key = secret(new_client_key())
        async with self.broker.db.transaction() as connection:
            await clients.add(connection, uuid4(), name, key_hash(key))
        return McpClient(self.http, key)

    async def tool_server(self, name: str = "tools", **terms: Any) -> ToolServer:
        """Registers a backend, as `taskbroker backend add` does."""
        async with self.broker.db.transaction() as connection:
            backend = await backends.add(connection, name, BackendTerms(**terms))
            key = secret(await issue_key(connection, backend.id))
            box = SecretBox(self.settings.keys)
            webhook_secret = secret(await issue_secret(connection, backend.id, box))
        return ToolServer(self.http, self.clock, name, key, webhook_secret)

    async def history(self, task: CreatedTask) -> list[HistoryEntry]:
        """What the broker remembers about a task, in order."""
        async with self.broker.db.transaction() as connection:
            return await stored.history(connection, UUID(task.ref))

    async def disable(self, tools: ToolServer) -> None:
        """As `taskbroker backend disable`, and then as long as servers may believe otherwise."""
        async with self.broker.db.transaction() as connection:
            backend = await backends.by_name(connection, tools.name)
            assert backend is not None
            await backends.set_disabled(connection, backend.id, self.clock())
        async with asyncio.timeout(10 * remembered.SECONDS):
            while (await tools.list()).status_code == 200:
                pass

    async def sweep(self) -> Swept:
        async with self.broker.db.own_connection() as connection:
            return await sweep(self.broker, connection)


@asynccontextmanager
async def running_service(settings: Settings, clock: ShiftedClock) -> AsyncIterator[Service]:
    """The application in this process, started and stopped as a server does it."""
    application = create_app(settings, clock)
    broker = create_broker(settings, clock)
    async with lifespan(application):
        transport = httpx.ASGITransport(application, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            yield Service(http, broker, settings)
    await broker.db.close()


@asynccontextmanager
async def networked_service(settings: Settings, clock: ShiftedClock) -> AsyncIterator[Service]:
    """The same behind a real HTTP server on loopback, for what only shows on a connection."""
    broker = create_broker(settings, clock)
    async with (
        serving(create_app(settings, clock)) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as http,
    ):
        yield Service(http, broker, settings)
    await broker.db.close()


@asynccontextmanager
async def lifespan(application: Application) -> AsyncIterator[None]:
    """Runs an application's start-up and shut-down around a block."""
    to_application: asyncio.Queue[Message] = asyncio.Queue()
    from_application: asyncio.Queue[Message] = asyncio.Queue()
    scope = {"type": "lifespan", "asgi": {"version": "3.0"}, "state": {}}
    running = asyncio.create_task(
        _as_coroutine(application(scope, to_application.get, from_application.put))
    )
    for phase in ("startup", "shutdown"):
        await to_application.put({"type": f"lifespan.{phase}"})
        answer = await from_application.get()
        assert answer["type"] == f"lifespan.{phase}.complete", answer
        if phase == "startup":
            try:
                yield
            except BaseException:
                running.cancel()
                with suppress(asyncio.CancelledError):
                    await running
                raise
    await running


async def _as_coroutine(awaitable: Any) -> None:
    await awaitable
