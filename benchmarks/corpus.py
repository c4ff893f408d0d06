"""What the load is made of: stored tasks, and whole HTTP requests about them."""

import asyncio
import itertools
import json
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

from app.auth.keys import SecretBox
from app.broker.context import Broker
from app.broker.create import NewTask, create
from app.db import backends
from app.domain import signing
from app.domain.backends import Backend, BackendTerms
from app.domain.clock import iso
from app.domain.events import Report
from app.domain.owners import opaque_token_owner
from app.domain.tasks import Status, ToolResult
from app.settings import Settings

VERSION = "2026-07-28"
BACKEND = "bench"
CLIENTS = 50
_META = {
    "io.modelcontextprotocol/protocolVersion": VERSION,
    "io.modelcontextprotocol/clientInfo": {"name": "bench", "version": "1.0"},
    "io.modelcontextprotocol/clientCapabilities": {
        "extensions": {"io.modelcontextprotocol/tasks": {}}
    },
}
_RESULT = json.dumps({"content": [{"type": "text", "text": "x" * 970}], "isError": False})
LIVE = Report(status_message='"Reading page 17 of 120"')
COMPLETED = Report(status=Status.COMPLETED, result=ToolResult(_RESULT, False, False))


@dataclass(frozen=True)
class StoredTask:
    ref: UUID
    id: str
    token: str


@dataclass(frozen=True)
class Corpus:
    """Tasks of many owners in the broker's database, and the secret of their backend."""

    live: list[StoredTask]
    reported: list[StoredTask]
    """Live as well, and the ones that events are about."""
    completed: list[StoredTask]
    webhook_key: bytes


async def store(broker: Broker, settings: Settings, live: int, completed: int) -> Corpus:
    key = secrets.token_bytes(32)
    async with broker.db.transaction() as connection:
        backend = await backends.add(connection, BACKEND, BackendTerms())
        await backends.add_secret(connection, backend.id, SecretBox(settings.keys).close(key))
    try:
        return Corpus(
            await _tasks(broker, backend, LIVE, live),
            await _tasks(broker, backend, LIVE, live),
            await _tasks(broker, backend, COMPLETED, completed),
            key,
        )
    finally:
        await broker.db.close()


async def register(broker: Broker, name: str, mcp_url: str) -> None:
    """A tool server for the gateway."""
    async with broker.db.transaction() as connection:
        await backends.add(connection, name, BackendTerms(mcp_url=mcp_url))
    await broker.db.close()


async def called_back(
    broker: Broker, settings: Settings, name: str, callback_url: str, count: int
) -> list[StoredTask]:
    """Live tasks of a tool server with a callback."""
    async with broker.db.transaction() as connection:
        backend = await backends.add(connection, name, BackendTerms(callback_url=callback_url))
        key = SecretBox(settings.keys).close(secrets.token_bytes(32))
        await backends.add_secret(connection, backend.id, key)
    return await _tasks(broker, backend, LIVE, count)


async def _tasks(broker: Broker, backend: Backend, state: Report, count: int) -> list[StoredTask]:
    tokens = [secrets.token_urlsafe(32) for _ in range(CLIENTS)]
    owners = [broker.keyring.fingerprints(opaque_token_owner(token)) for token in tokens]
    made = await asyncio.gather(
        *(create(broker, backend, owners[i % CLIENTS], NewTask(state)) for i in range(count))
    )
    return [
        StoredTask(one.task.ref, one.task_id, tokens[i % CLIENTS]) for i, one in enumerate(made)
    ]


def write(file: Path, requests: Iterable[bytes]) -> Path:
    """Requests as the generators read them: a length on a line, then the request."""
    file.write_bytes(b"".join(b"%d\n%b" % (len(request), request) for request in requests))
    return file


def gets(tasks: Iterable[StoredTask]) -> Iterator[bytes]:
    """`tasks/get` as a client of 2026-07-28 sends it, with an opaque bearer token."""
    return _about(tasks, "tasks/get")


def cancels(tasks: Iterable[StoredTask]) -> Iterator[bytes]:
    """`tasks/cancel`, likewise."""
    return _about(tasks, "tasks/cancel")


def listens(tasks: Iterable[StoredTask]) -> Iterator[bytes]:
    """`subscriptions/listen`, each about one task."""
    for number, task in enumerate(tasks):
        params = {"notifications": {"taskIds": [task.id]}}
        yield _rpc("/mcp", number, "subscriptions/listen", params, task.token)


def calls(path: str) -> Iterator[bytes]:
    """`tools/call` of `greet`, of many clients."""
    params = {"name": "greet", "arguments": {"name": "bench"}}
    for number in range(CLIENTS):
        yield _rpc(path, number, "tools/call", params, secrets.token_urlsafe(32), "greet")


def _about(tasks: Iterable[StoredTask], method: str) -> Iterator[bytes]:
    for number, task in enumerate(tasks):
        yield _rpc("/mcp", number, method, {"taskId": task.id}, task.token, task.id)


def _rpc(
    path: str,
    number: int,
    method: str,
    params: dict[str, Any],
    token: str,
    name: str | None = None,
) -> bytes:
    message = {
        "jsonrpc": "2.0",
        "id": number,
        "method": method,
        "params": params | {"_meta": _META},
    }
    headers = {
        "accept": "application/json, text/event-stream",
        "authorization": f"Bearer {token}",
        "mcp-protocol-version": VERSION,
        "mcp-method": method,
    }
    if name is not None:
        headers["mcp-name"] = name
    return _post(path, json.dumps(message, separators=(",", ":")).encode(), headers)


def events(tasks: list[StoredTask], key: bytes, count: int) -> Iterator[bytes]:
    """Progress webhooks signed now, each with an id of its own, in the order of their time."""
    now = datetime.now(UTC)
    sent = str(int(time.time()))
    for number, task in enumerate(itertools.islice(itertools.cycle(tasks), count)):
        event = {
            "type": "task.updated",
            "timestamp": iso(now + timedelta(milliseconds=number // 100)),
            "data": {"taskRef": str(task.ref), "statusMessage": f"Reading page {number}"},
        }
        body = json.dumps(event, separators=(",", ":")).encode()
        webhook_id = f"msg_{secrets.token_hex(12)}"
        yield _post(
            f"/v1/webhooks/{BACKEND}",
            body,
            {
                "webhook-id": webhook_id,
                "webhook-timestamp": sent,
                "webhook-signature": signing.sign(key, webhook_id, int(sent), body),
            },
        )


def _post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    headers = {
        "host": "127.0.0.1:8080",  # servers that check it want a port
        "content-type": "application/json",
        "content-length": str(len(body)),
        **headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body
