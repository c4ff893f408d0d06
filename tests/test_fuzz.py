"""Promise: whatever comes in, the answer says what is wrong with it, and the service lives on.

Requests go to the application as an ASGI server would hand them over, so that headers and paths
may hold what no HTTP library lets a client send.
"""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, quote_from_bytes

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from app.asgi import Message
from app.main import create_app
from tests.support.clock import ShiftedClock
from tests.support.databases import Databases
from tests.support.service import (
    META,
    VERSION,
    McpClient,
    Service,
    ToolServer,
    owner_of,
    running_service,
    test_settings,
)
from tests.test_rawjson import json_documents, json_texts

on_one_service = settings(
    max_examples=150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

Header = tuple[bytes, bytes]


# --- the tools of these tests --------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[bytes, bytes]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """Hands requests to the application as they are, and knows one good request of each kind."""

    def __init__(self, service: Service, tools: ToolServer, client: McpClient) -> None:
        self.service = service
        self.tools = tools
        self.client = client
        transport = service.http._transport
        assert isinstance(transport, httpx.ASGITransport)
        self._application = transport.app

    async def send(
        self,
        method: str,
        path: str,
        headers: Sequence[Header] = (),
        body: bytes = b"",
        *,
        query: bytes = b"",
        chunk: int = 1 << 20,
    ) -> Answer:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": quote(path).encode(),
            "query_string": query,
            "headers": list(headers),
            "client": ("127.0.0.1", 50000),
            "server": ("127.0.0.1", 8080),
        }
        chunks = [body[at : at + chunk] for at in range(0, len(body), chunk)] or [b""]
        said: list[Message] = []

        async def receive() -> Message:
            if chunks:
                return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            said.append(message)

        await self._application(scope, receive, send)
        start, *parts = said
        sent = b"".join(part.get("body", b"") for part in parts)
        return Answer(start["status"], dict(start["headers"]), sent)

    async def mcp(self, headers: Sequence[Header], body: bytes, *, chunk: int = 1 << 20) -> Answer:
        answer = await self.send("POST", "/mcp", headers, body, chunk=chunk)
        if answer.status == 202:
            assert answer.body == b""
            return answer
        assert answer.status in {200, 400, 401, 403, 404, 406, 413, 415, 431}, answer
        assert answer.headers[b"content-type"] == b"application/json"
        said = answer.json()
        assert said["jsonrpc"] == "2.0"
        assert ("result" in said) != ("error" in said)
        if "error" in said:
            assert type(said["error"]["code"]) is int
            assert said["error"]["message"]
        else:
            assert answer.status == 200
        return _clean(answer)

    async def webhook(self, headers: Sequence[Header], body: bytes, **how: Any) -> Answer:
        path = how.pop("path", f"/v1/webhooks/{self.tools.name}")
        answer = await self.send("POST", path, headers, body, **how)
        if answer.status == 200:
            assert answer.headers[b"content-type"] == b"application/json"
            assert {"applied", "task", "cancelRequested", "inputResponses"} <= answer.json().keys()
            return _clean(answer)
        return _problem(answer)

    async def still_works(self) -> None:
        """One good request of each kind."""
        task = await self.tools.create(self.client)
        assert (await self.tools.complete(task))["applied"] is True
        assert (await self.client.get(task.id))["status"] == "completed"


def _problem(answer: Answer) -> Answer:
    """Checks a refusal of the backends' side: an RFC 9457 document that says what to do."""
    assert answer.status in {400, 401, 403, 404, 405, 409, 410, 413, 422}, answer
    assert answer.headers[b"content-type"] == b"application/problem+json"
    said = answer.json()
    assert said["status"] == answer.status
    assert said["type"]
    assert said["title"]
    assert said["detail"]
    for fault in said.get("errors", []):
        assert fault["pointer"] == "" or fault["pointer"].startswith("/")
        assert fault["detail"]
    return _clean(answer)


def _clean(answer: Answer) -> Answer:
    for hidden in (b"Traceback", b"asyncpg", b"sqlalchemy", b"SQLSTATE", b"INSERT ", b"SELECT "):
        assert hidden not in answer.body
    return answer


@pytest.fixture(scope="module")
async def server(databases: Databases) -> AsyncIterator[Server]:
    """One broker for all that this file does to it."""
    async with (
        databases.fresh() as url,
        running_service(test_settings(url), ShiftedClock()) as service,
    ):
        yield Server(service, await service.tool_server(), service.client())


@pytest.fixture(autouse=True)
async def _lives_on(server: Server) -> AsyncIterator[None]:
    yield
    await server.still_works()


# --- what comes in -------------------------------------------------------------------------------

_texts = st.text(st.characters(exclude_categories=()), max_size=12) | st.sampled_from(
    ["", "\0", "a\0b", "\ud800", "a\udfffb", "x" * 256, "é" * 255, "a/b~c", "' OR 1=1 --", "%s{}"]
)
_scalars = (
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False) | _texts
)
values = st.recursive(
    _scalars.filter(lambda value: value not in (float("inf"), float("-inf"))),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=6,
)
bodies = (
    st.binary(max_size=100)
    | json_texts().map(str.encode)
    | json_documents().map(str.encode)
    | st.sampled_from([b"", b"\0", b"\xff", b"[" * 50_000, b'{"a":' * 50_000, b" " * 1_100_000])
)
GARBAGE = (
    b"", b"\0", b"a\0b", b"\xff\xfe", b"caf\xe9", b"x" * 9000, b"9" * 5000, b"-1", b"1, 1",
    b"0x1", b"1_0", b"\xb2", b"=?base64?//8=?=", b"=?base64?\xff?=", b"v1,", b"v1,\xff v1,a v2,b",
    b"[", b"//", b"Bearer \0", b"Bearer \xff", b"bearer  x", b'"', b";", b",,,;q=", b"\r\n",
    b"http://[", b"\x7f",
)  # fmt: skip
NAMES = (
    b"content-type", b"content-length", b"accept", b"authorization", b"host", b"origin",
    b"mcp-protocol-version", b"mcp-method", b"mcp-name", b"mcp-session-id", b"transfer-encoding",
    b"webhook-id", b"webhook-timestamp", b"webhook-signature", b"x-forwarded-for", b"\xff\0",
)  # fmt: skip


@dataclass(frozen=True)
class HeaderChange:
    """What is done to good headers: `drop` the name, then add the values, none, one or several."""

    name: bytes
    drop: bool
    added: tuple[bytes, ...]


header_changes = st.lists(
    st.builds(
        HeaderChange,
        st.sampled_from(NAMES),
        st.booleans(),
        st.lists(st.sampled_from(GARBAGE) | st.binary(max_size=20), max_size=2).map(tuple),
    ),
    min_size=1,
    max_size=3,
)


def changed(headers: Sequence[Header], changes: Sequence[HeaderChange]) -> list[Header]:
    result = list(headers)
    for change in changes:
        if change.drop:
            result = [(name, value) for name, value in result if name != change.name]
        result += [(change.name, value) for value in change.added]
    return result


# --- POST /mcp -----------------------------------------------------------------------------------


def mcp_headers(client: McpClient, method: str, task_id: str | None = None) -> list[Header]:
    headers = [
        (b"host", b"127.0.0.1:8080"),
        (b"content-type", b"application/json"),
        (b"accept", b"application/json, text/event-stream"),
        (b"authorization", f"Bearer {client.token}".encode()),
        (b"mcp-protocol-version", VERSION.encode()),
        (b"mcp-method", method.encode("utf-8", "replace")),
    ]
    return headers if task_id is None else [*headers, (b"mcp-name", task_id.encode())]


@on_one_service
@given(body=bodies, chunk=st.integers(1, 200_000))
async def test_mcp_takes_any_bytes(server: Server, body: bytes, chunk: int) -> None:
    chunk = max(chunk, len(body) // 50)
    answer = await server.mcp(mcp_headers(server.client, "tasks/get"), body, chunk=chunk)
    assert answer.status in {202, 400, 413}


_methods = st.sampled_from(["tasks/get", "tasks/update", "tasks/cancel", "server/discover", "x"])
_envelopes = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | values,
        "id": st.just(1) | values,
        "method": _methods | values,
        "params": values,
        "extra": values,
    },
)


@on_one_service
@given(envelope=_envelopes)
async def test_mcp_takes_envelopes_of_any_types(server: Server, envelope: dict[str, Any]) -> None:
    body = json.dumps(envelope).encode()
    answer = await server.mcp(mcp_headers(server.client, str(envelope.get("method"))), body)
    if answer.status != 202 and "id" in answer.json():
        assert answer.json()["id"] == envelope["id"]


_params = st.fixed_dictionaries(
    {
        "_meta": st.just(META)
        | st.fixed_dictionaries(
            {},
            optional={name: st.just(value) | values for name, value in META.items()}
            | {"extra": values},
        )
        | values
    },
    optional={
        "taskId": st.just("a" * 64) | values,
        "inputResponses": st.dictionaries(_texts, values, max_size=3) | values,
        "protocolVersion": values,
        "extra": values,
    },
)


@on_one_service
@given(method=_methods, params=_params)
@example(method="tasks/get", params={"_meta": META, "taskId": "\ud800"})
@example(method="tasks/cancel", params={"_meta": META, "taskId": "\0" * 64})
@example(method="tasks/update", params={"_meta": META, "taskId": "a", "inputResponses": {"\0": {}}})
async def test_mcp_takes_params_of_any_types(
    server: Server, method: str, params: dict[str, Any]
) -> None:
    message = {"jsonrpc": "2.0", "id": "\0\ud800", "method": method, "params": params}
    answer = await server.mcp(mcp_headers(server.client, method), json.dumps(message).encode())
    assert answer.json()["id"] == "\0\ud800"


@on_one_service
@given(responses=st.dictionaries(_texts | st.just("k"), values, max_size=3))
async def test_mcp_takes_answers_of_any_types(server: Server, responses: dict[str, Any]) -> None:
    task = await server.tools.create(server.client)
    await server.tools.ask(task, "k")
    params = {"taskId": task.id, "inputResponses": responses, "_meta": META}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tasks/update", "params": params}

    headers = mcp_headers(server.client, "tasks/update", task.id)
    answer = await server.mcp(headers, json.dumps(message).encode())

    good = all(isinstance(response, dict) for response in responses.values())
    assert answer.status == (200 if good else 400)
    answered = good and "k" in responses
    assert (await server.client.get(task.id))["status"] == (
        "working" if answered else "input_required"
    )


@on_one_service
@given(changes=header_changes)
@example(changes=[HeaderChange(b"content-length", False, (b"9" * 5000,))])
@example(changes=[HeaderChange(b"content-length", False, (b"\xb2",))])
async def test_mcp_takes_any_headers(server: Server, changes: list[HeaderChange]) -> None:
    params = {"taskId": "a" * 64, "_meta": META}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tasks/get", "params": params}
    headers = changed(mcp_headers(server.client, "tasks/get", "a" * 64), changes)
    await server.mcp(headers, json.dumps(message).encode())


@pytest.mark.parametrize("headers", [[], [(b"", b"")], [(b"x", b"")] * 10_000])
async def test_mcp_takes_headers_of_any_number(server: Server, headers: list[Header]) -> None:
    assert (await server.mcp(headers, b"{}")).status == 403  # there is no Host among them
    assert (await server.mcp(mcp_headers(server.client, "x") + headers, b"")).status == 400


@pytest.mark.parametrize("headers", [[(b"x", b"x" * 1_000_000)], [(b"x", b"")] * 200_000])
async def test_mcp_refuses_headers_without_end(server: Server, headers: list[Header]) -> None:
    assert (await server.mcp(mcp_headers(server.client, "x") + headers, b"{}")).status == 431


# --- POST /v1/webhooks/{backend} -----------------------------------------------------------------


def signed(tools: ToolServer, body: bytes) -> list[Header]:
    return [(name.encode(), value.encode()) for name, value in tools.signed(body).items()]


@on_one_service
@given(body=bodies, chunk=st.integers(1, 200_000))
async def test_the_webhook_takes_any_bytes(server: Server, body: bytes, chunk: int) -> None:
    chunk = max(chunk, len(body) // 50)
    answer = await server.webhook(signed(server.tools, body), body, chunk=chunk)
    assert answer.status in {400, 413, 422}


_moments = st.sampled_from([
    "2026-11-30T09:00:00Z", "2026-11-30T09:00:00", "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "9999-12-31T23:59:59.999Z", "",
    "2026-02-30T00:00:00Z", "2026-11-30T24:00:00Z", "2026-11-30T09:00:60Z", "2026-11-30",
])  # fmt: skip
_statuses = st.sampled_from(["working", "input_required", "completed", "failed", "cancelled", "x"])
_numbers = st.integers(-1, 100) | st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**40])
_requests = st.dictionaries(
    _texts,
    st.fixed_dictionaries(
        {"method": st.sampled_from(["roots/list", "elicitation/create"]) | values},
        optional={
            "params": values | st.dictionaries(st.sampled_from(["message", "mode", "url"]), values)
        },
    )
    | values,
    max_size=3,
)
state = {
    "status": _statuses | values,
    "statusMessage": _texts | values,
    "result": st.dictionaries(_texts, values, max_size=3) | values,
    "error": st.fixed_dictionaries({"code": _numbers | values, "message": _texts | values})
    | values,
    "inputRequests": _requests | values,
    "pollIntervalMs": _numbers | values,
    "ttlMs": _numbers | values,
    "stallAfterMs": _numbers | values,
    "extra": values,
}
_data = st.fixed_dictionaries({}, optional=state)
_names = st.fixed_dictionaries(
    {},
    optional={
        "taskRef": st.sampled_from(["{ref}", "0" * 32, "x"]) | values,
        "externalId": st.just("{ref}") | values,
        "taskId": st.sampled_from(["{id}", "a" * 64]) | values,
    },
)


async def _event(server: Server, names: dict[str, Any], **members: Any) -> tuple[Answer, str]:
    """Sends an event about a fresh task, which `{ref}` and `{id}` stand for."""
    task = await server.tools.create(server.client)
    real = {"{ref}": task.ref, "{id}": task.id}
    named = {k: real.get(v, v) if isinstance(v, str) else v for k, v in names.items()}
    members["data"] = {**members["data"], **named} if isinstance(members["data"], dict) else 0
    body = json.dumps({"type": "task.updated", **members}).encode()
    answer = await server.webhook(signed(server.tools, body), body)
    return answer, task.ref


@on_one_service
@given(data=_data, timestamp=_moments | values)
@example(data={}, timestamp="0001-01-01T00:00:00+14:00")
@example(data={"status": "working", "statusMessage": "\0\ud800"}, timestamp="2026-11-30T09:00:00Z")
async def test_the_webhook_takes_data_of_any_types(
    server: Server, data: dict[str, Any], timestamp: Any
) -> None:
    answer, ref = await _event(server, {"taskRef": "{ref}"}, data=data, timestamp=timestamp)

    stored = await server.tools.read(ref)
    if answer.status == 200:
        assert answer.json()["applied"] is True
        if stored.status_code == 410:  # it was given a time to live that is over
            assert "ttlMs" in data
        else:
            assert stored.json()["status"] == answer.json()["task"]["status"]
    else:
        assert answer.status in {400, 422}
        assert stored.json()["status"] == "working"


@on_one_service
@given(names=_names, kind=st.just("task.updated") | values)
async def test_the_webhook_takes_names_of_any_types(
    server: Server, names: dict[str, Any], kind: Any
) -> None:
    answer, _ = await _event(server, names, data={}, type=kind)
    assert answer.status in {200, 400, 404, 422}


@on_one_service
@given(changes=header_changes, by_key=st.booleans())
@example(changes=[HeaderChange(b"webhook-id", True, (b"a\0b",))], by_key=True)
@example(changes=[HeaderChange(b"webhook-id", True, (b"x" * 256,))], by_key=True)
@example(changes=[HeaderChange(b"content-length", True, (b"9" * 5000,))], by_key=True)
async def test_the_webhook_takes_any_headers(
    server: Server, changes: list[HeaderChange], by_key: bool
) -> None:
    task = await server.tools.create(server.client)
    body = server.tools.event({"taskRef": task.ref})
    headers = signed(server.tools, body)
    if by_key:
        headers = [(b"authorization", f"Bearer {server.tools.key}".encode())]
    await server.webhook(changed(headers, changes), body)


@pytest.mark.parametrize(
    "webhook_id", [b"\0", b"a\0b", b"\xff", b"caf\xe9", b"x" * 256, b"\x7f", b"a b", b"\xc3\xa9"]
)
async def test_a_webhook_id_of_any_bytes_is_applied_once_or_refused(
    server: Server, webhook_id: bytes
) -> None:
    task = await server.tools.create(server.client)
    body = server.tools.event({"taskRef": task.ref, "statusMessage": "x"})
    headers = [
        (b"authorization", f"Bearer {server.tools.key}".encode()),
        (b"webhook-id", webhook_id),
    ]

    first, second = [await server.webhook(headers, body) for _ in range(2)]

    if first.status == 200:
        assert second.json()["reason"] == "duplicate"
    else:
        assert first.status == second.status == 400
        assert b"webhook-id" in first.body


@on_one_service
@given(name=st.text(max_size=70))
@example(name="")
@example(name="\0")
@example(name="tools\0")
@example(name="../tasks")
@example(name="tools/")
@example(name="Tools")
async def test_the_webhook_takes_any_path(server: Server, name: str) -> None:
    body = server.tools.event({"externalId": "x"})
    for headers in (
        signed(server.tools, body),
        [(b"authorization", f"Bearer {server.tools.key}".encode())],
    ):
        answer = await server.webhook(headers, body, path=f"/v1/webhooks/{name}")
        assert answer.status == (404 if name == server.tools.name else 401)


# --- /v1/tasks -----------------------------------------------------------------------------------


def key_of(tools: ToolServer) -> Header:
    return (b"authorization", f"Bearer {tools.key}".encode())


_create_members = st.fixed_dictionaries(
    {},
    optional={
        **state,
        "externalId": _texts | values,
        "tool": _texts | values,
        "owner": st.dictionaries(
            st.sampled_from(
                ["authorization", "tokenSha256", "anonymous", "handle", "issuer", "subject"]
            ),
            _texts | values,
            max_size=2,
        )
        | values,
    },
)


@on_one_service
@given(members=_create_members)
@example(members={"externalId": "\0"})
@example(members={"externalId": "\ud800"})
@example(members={"tool": "\0"})
@example(members={"tool": "\ud800"})
@example(members={"owner": {"authorization": "Bearer \0"}})
@example(members={"owner": {"authorization": "Bearer \ud800"}})
@example(members={"statusMessage": "\0\ud800"})
async def test_a_create_takes_members_of_any_types(server: Server, members: dict[str, Any]) -> None:
    body = json.dumps({"owner": owner_of(server.client), **members}).encode()
    answer = await server.send("POST", "/v1/tasks", [key_of(server.tools)], body)
    if answer.status in {200, 201}:
        assert _clean(answer).json().keys() >= {"taskRef", "createTaskResult"}
    else:
        _problem(answer)


@on_one_service
@given(body=bodies)
async def test_a_create_takes_any_bytes(server: Server, body: bytes) -> None:
    answer = await server.send("POST", "/v1/tasks", [key_of(server.tools)], body)
    assert _problem(answer).status in {400, 413, 422}


@on_one_service
@given(changes=header_changes)
@example(changes=[HeaderChange(b"content-length", True, (b"9" * 5000,))])
async def test_a_create_takes_any_headers(server: Server, changes: list[HeaderChange]) -> None:
    body = json.dumps({"owner": owner_of(server.client)}).encode()
    headers = changed([key_of(server.tools)], changes)
    answer = await server.send("POST", "/v1/tasks", headers, body)
    if answer.status != 201:
        assert _problem(answer).status in {400, 401, 413}


_raw = st.binary(max_size=20) | _texts.map(lambda text: text.encode("utf-8", "surrogatepass"))


@on_one_service
@given(
    query=st.lists(
        st.tuples(
            st.sampled_from(["status", "externalId", "limit", "cursor", "x"]),
            _raw | st.sampled_from([b"working", b"1", b"201", b"0", b"9" * 5000, b"AAAA"]),
        ),
        max_size=4,
    )
)
@example(query=[("externalId", b"\0")])
@example(query=[("externalId", b"\xed\xa0\x80")])
@example(query=[("cursor", b"\0")])
@example(query=[("cursor", b"\xed\xa0\x80")])
@example(query=[("cursor", b"A" * 22)])
@example(query=[("status", b"\0")])
@example(query=[("limit", b"9" * 5000)])
async def test_a_listing_takes_any_query(server: Server, query: list[tuple[str, bytes]]) -> None:
    written = "&".join(f"{name}={quote_from_bytes(value)}" for name, value in query).encode()
    for sent in (written, b"&".join(name.encode() + b"=" + value for name, value in query)):
        answer = await server.send("GET", "/v1/tasks", [key_of(server.tools)], query=sent)
        if answer.status == 200:
            assert "tasks" in _clean(answer).json()
        else:
            assert _problem(answer).status == 400


@on_one_service
@given(after=_raw | st.sampled_from([b"0", b"1.1", b"9" * 19, b"9" * 5000, b"1" + b".1" * 200]))
@example(after=b"\0")
@example(after=b"\xed\xa0\x80")
@example(after=b"1.")
async def test_fetching_signals_takes_any_cursor(server: Server, after: bytes) -> None:
    for sent in (quote_from_bytes(after).encode(), after):
        query = b"after=" + sent
        answer = await server.send("GET", "/v1/signals", [key_of(server.tools)], query=query)
        if answer.status == 200:
            assert _clean(answer).json().keys() == {"signals", "cursor"}
        else:
            assert _problem(answer).status == 400


@on_one_service
@given(segment=st.text(max_size=70))
@example(segment="\0")
@example(segment="{}")
@example(segment="0" * 32)
@example(segment="../tasks")
@example(segment="a" * 100_000)
async def test_reading_takes_any_path(server: Server, segment: str) -> None:
    answer = await server.send("GET", f"/v1/tasks/{segment}", [key_of(server.tools)])
    assert _problem(answer).status == 404


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "TRACE", "\xff"])
@pytest.mark.parametrize("path", ["/v1/webhooks/tools", "/v1/nothing", "/", "/nothing"])
async def test_any_method_on_any_path_is_answered(server: Server, method: str, path: str) -> None:
    answer = await server.send(method, path, [key_of(server.tools)])
    assert _problem(answer).status in {404, 405}
    assert answer.status != 405 or answer.headers[b"allow"] == b"POST"


@pytest.mark.parametrize("path", ["/mcp", "/v1/tasks", "/v1/webhooks/tools"])
async def test_a_peer_that_goes_away_in_the_middle_is_let_go(server: Server, path: str) -> None:
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "headers": [*mcp_headers(server.client, "x")[:3], key_of(server.tools)],
        "client": ("127.0.0.1", 50000), "server": ("127.0.0.1", 8080),
    }  # fmt: skip
    messages: list[Message] = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    answered: list[int] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Any) -> None:
        answered.append(message.get("status", 0))

    await server._application(scope, receive, send)

    assert not any(status in {200, 201, 202} or status >= 500 for status in answered)


# --- the contract in /openapi.json ---------------------------------------------------------------

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
OPERATIONS = (
    ("POST", "/v1/tasks"),
    ("GET", "/v1/tasks"),
    ("GET", "/v1/tasks/{task_ref}"),
    ("GET", "/v1/signals"),
    ("POST", "/v1/webhooks/{backend}"),
)
STATES: tuple[dict[str, Any], ...] = (
    {},
    {"statusMessage": "x", "stallAfterMs": 60_000},
    {"status": "completed", "result": {"content": []}},
    {"status": "failed", "error": {"code": -32603, "message": "x"}},
    {"status": "cancelled"},
    {"status": "input_required", "inputRequests": {"k": {"method": "roots/list"}}},
)


class Contract:
    """The API by its own description. The application lives in Schemathesis's own event loop."""

    def __init__(self, schema: Any, tools: ToolServer) -> None:
        self.schema = schema
        self.tools = tools

    def call_and_validate(self, case: Any) -> None:
        case.call_and_validate(checks=CHECKS, headers=self.tools.authorization)

    def new_task(self, state: dict[str, Any]) -> str:
        """The reference of a fresh task."""
        body = {"owner": {"tokenSha256": "0" * 64}, **state}
        case = self.schema["/v1/tasks"]["POST"].Case(body=body, media_type="application/json")
        response = case.call(headers=self.tools.authorization)
        assert response.status_code == 201, response.text
        ref: str = response.json()["taskRef"]
        return ref


@pytest.fixture
async def contract(database_url: str) -> Contract:
    """Schemathesis starts the application at the first request, and ends it with the test."""
    chosen = test_settings(database_url)
    async with running_service(chosen, ShiftedClock()) as beside:
        tools = await beside.tool_server()
    application = create_app(chosen, ShiftedClock())
    schema = schemathesis.openapi.from_asgi("/openapi.json", application)
    schema.config.generation.update(with_security_parameters=False)  # the key goes along instead
    return Contract(schema, tools)


def test_every_operation_is_held_to_the_description(contract: Contract) -> None:
    described = [operation.ok() for operation in contract.schema.get_all_operations()]
    assert {(operation.method.upper(), operation.path) for operation in described} == {*OPERATIONS}


application_runs_beside = pytest.mark.filterwarnings(
    "ignore:Do not use the `random` module inside strategies"  # its thread uses it, not a strategy
)


@pytest.mark.slow
@application_runs_beside
@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        (method, path, mode)
        for method, path in OPERATIONS
        for mode in GenerationMode
        if (path, mode) != ("/v1/tasks/{task_ref}", GenerationMode.NEGATIVE)  # any text will do
    ],
)
def test_the_api_keeps_to_its_description(
    contract: Contract, method: str, path: str, mode: GenerationMode
) -> None:
    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=contract.schema[path][method].as_strategy(generation_mode=mode))
    def holds(case: Any) -> None:
        # Of a query parameter that comes twice the last one counts; that is no bad value.
        assume(not any(isinstance(value, list) for value in case.query.values()))
        assume(not case.query.get("wait"))  # there would be nothing to wait for
        contract.call_and_validate(case)

    holds()


@pytest.mark.slow
@pytest.mark.parametrize("state", STATES)
def test_reading_a_task_keeps_to_the_description(contract: Contract, state: dict[str, Any]) -> None:
    ref = contract.new_task(state)
    for path, where in (("/v1/tasks/{task_ref}", {"task_ref": ref}), ("/v1/tasks", {})):
        contract.call_and_validate(contract.schema[path]["GET"].Case(path_parameters=where))


@pytest.mark.slow
@application_runs_beside
def test_an_event_of_a_live_task_keeps_to_the_description(contract: Contract) -> None:
    """What is described as valid is valid, on a task that exists."""
    operation = contract.schema["/v1/webhooks/{backend}"]["POST"]
    statuses = set()

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def holds(case: Any) -> None:
        case.path_parameters["backend"] = contract.tools.name
        case.body = {
            "type": "task.updated",
            "data": {**_with_integers(case.body["data"]), "taskRef": contract.new_task({})},
        }
        for other_name in ("externalId", "taskId"):
            case.body["data"].pop(other_name, None)
        response = case.call(headers=contract.tools.authorization)
        case.validate_response(response, checks=CHECKS, headers=contract.tools.authorization)
        statuses.add(response.status_code)

    holds()
    assert 200 in statuses
    assert statuses <= {200, 422}


def _with_integers(value: Any) -> Any:
    """JSON Schema takes 60000.0 for an integer, this API does not."""
    if isinstance(value, dict):
        return {name: _with_integers(inner) for name, inner in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
