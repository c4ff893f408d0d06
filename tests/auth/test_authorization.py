"""What clients are told about tokens: metadata (RFC 9728), challenges, scopes; and open streams."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.authorization import AUDIENCE, PUBLIC_URL, AuthorizationServer
from tests.support.clock import ShiftedClock
from tests.support.listening import listening
from tests.support.servers import running_upstream
from tests.support.service import Service, networked_service, test_settings

WELL_KNOWN = "/.well-known/oauth-protected-resource"
LEGACY = {"mcp-protocol-version": "2025-11-25", "mcp-method": None}


@pytest.fixture
async def scoped(
    server: AuthorizationServer, database_url: str, clock: ShiftedClock
) -> AsyncIterator[Service]:
    """A broker on a real connection that wants scopes."""
    settings = test_settings(
        database_url,
        oauth_issuers=(server.issuer(),),
        public_url=PUBLIC_URL,
        scopes_read=("tasks:read", "tasks"),
        scopes_write=("tasks:write", "tasks"),
    )
    async with networked_service(settings, clock) as service:
        yield service


# --- metadata and challenges ------------------------------------------------------------------


async def test_every_door_has_its_metadata(scoped: Service, server: AuthorizationServer) -> None:
    await scoped.tool_server("images", mcp_url="http://127.0.0.1:9/mcp")
    await scoped.tool_server("no-door")
    shared = {
        "authorization_servers": [server.url],
        "scopes_supported": ["tasks:read", "tasks", "tasks:write"],
        "bearer_methods_supported": ["header"],
    }
    for path, resource in (("", "/mcp"), ("/mcp", "/mcp"), ("/mcp/images", "/mcp/images")):
        response = await scoped.http.get(WELL_KNOWN + path)
        assert response.headers["content-type"] == "application/json"
        assert response.json() == {"resource": PUBLIC_URL + resource, **shared}
    for path in ("/mcp/no-door", "/mcp/nobody", "/mcp/UPPER", "/other"):
        assert (await scoped.http.get(WELL_KNOWN + path)).status_code == 404


async def test_without_oauth_there_is_no_metadata_and_the_challenge_is_plain(
    service: Service,
) -> None:
    assert (await service.http.get(WELL_KNOWN)).status_code == 404
    response = await service.anonymous().request("tasks/get", {"taskId": "x"})
    assert response.headers["www-authenticate"] == "Bearer"


async def test_a_challenge_leads_to_the_metadata_of_the_door(broker: Service) -> None:
    async with running_upstream() as upstream:
        await broker.tool_server("images", mcp_url=upstream.url)
        for client, path in (
            (broker.anonymous(), "/mcp"),
            (broker.anonymous().through("images"), "/mcp/images"),
        ):
            response = await client.request("tools/call", {"name": "x"})
            assert response.status_code == 401
            assert response.headers["www-authenticate"] == (
                f'Bearer resource_metadata="{PUBLIC_URL}{WELL_KNOWN}{path}"'
            )
        assert not upstream.received


async def test_a_handle_of_the_gateway_carries_the_owner(
    broker: Service, server: AuthorizationServer
) -> None:
    async with running_upstream() as upstream:
        tools = await broker.tool_server(mcp_url=upstream.url)
        client = broker.client(server.token()).through("tools")
        await client.request("tools/call", {"name": "x"})
        task = await tools.create({"handle": upstream.last.header("task-owner")})
        refreshed = broker.client(server.token()).through("tools")
        assert (await refreshed.get(task.id))["status"] == "working"


# --- scopes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["tasks:read other", "tasks", ["tasks:read"]])
async def test_reading_needs_a_scope_for_it(
    scoped: Service, server: AuthorizationServer, scope: Any
) -> None:
    tools = await scoped.tool_server()
    client = scoped.client(server.token(scope=scope))
    assert (await client.get((await tools.create(client)).id))["status"] == "working"


@pytest.mark.parametrize(
    ("method", "headers", "scope"),
    [
        ("tasks/get", {}, "tasks:read"),
        ("subscriptions/listen", {}, "tasks:read"),
        ("tasks/update", {}, "tasks:write"),
        ("tasks/cancel", {}, "tasks:write"),
        ("tasks/get", LEGACY, "tasks:read"),
        ("tasks/result", LEGACY, "tasks:read"),
        ("tasks/list", LEGACY, "tasks:read"),
        ("tasks/cancel", LEGACY, "tasks:write"),
    ],
)
async def test_a_token_without_the_scope_is_refused_at_every_door(
    scoped: Service,
    server: AuthorizationServer,
    method: str,
    headers: dict[str, str | None],
    scope: str,
) -> None:
    tools = await scoped.tool_server(mcp_url="http://127.0.0.1:9/mcp")
    other = "tasks:write" if scope == "tasks:read" else "tasks:read"
    client = scoped.client(server.token(scope=other))
    task = await tools.create(client)
    params = {"taskId": task.id, "notifications": {"taskIds": [task.id]}, "inputResponses": {}}
    for path, at in (("/mcp", client), ("/mcp/tools", client.through("tools"))):
        response = await at.request(
            method, params, headers=headers, rpc_id="mine", meta={} if headers else None
        )
        assert response.status_code == 403
        assert response.json()["id"] == "mine"
        assert response.headers["www-authenticate"] == (
            f'Bearer error="insufficient_scope", scope="{scope}", '
            f'resource_metadata="{PUBLIC_URL}{WELL_KNOWN}{path}"'
        )


async def test_an_answer_to_a_question_needs_the_scope_for_writing(
    scoped: Service, server: AuthorizationServer
) -> None:
    client = scoped.client(server.token(scope="tasks:read"))
    response = await client.post({"jsonrpc": "2.0", "id": "x", "result": {}}, LEGACY)
    assert response.status_code == 403


async def test_other_methods_and_other_credentials_need_no_scope(
    scoped: Service, server: AuthorizationServer
) -> None:
    without = scoped.client(server.token())
    assert (await without.request("server/discover")).status_code == 200
    tools = await scoped.tool_server()
    for client in (scoped.client(), await scoped.keyed_client()):
        task = await tools.create(client)
        assert (await client.get(task.id))["status"] == "working"
        await client.cancel(task.id)


# --- answers that take their time -------------------------------------------------------------


async def test_a_stream_ends_when_its_token_has_expired(
    scoped: Service, server: AuthorizationServer, clock: ShiftedClock
) -> None:
    tools = await scoped.tool_server()
    client = scoped.client(server.token(scope="tasks", exp=int(server.now()) + 60))
    task = await tools.create(client)
    async with listening(scoped.http, client, [task.id]) as stream:
        await stream.acknowledged()
        assert (await stream.task())["status"] == "working"
        clock.advance(seconds=91)
        await tools.report(task, statusMessage="a secret")
        [last] = await stream.rest()
    assert last["error"]["message"] == "The access token has expired."


async def test_a_wait_ends_when_its_token_has_expired(
    scoped: Service, server: AuthorizationServer, clock: ShiftedClock
) -> None:
    tools = await scoped.tool_server()
    client = scoped.client(server.token(scope="tasks", exp=int(server.now()) + 60))
    task = await tools.create(client)
    headers = {
        "authorization": f"Bearer {client.token}",
        "accept": "application/json, text/event-stream",
    }
    asked = {"jsonrpc": "2.0", "id": 1, "method": "tasks/result", "params": {"taskId": task.id}}
    async with scoped.http.stream("POST", "/mcp", json=asked, headers=headers) as response:
        clock.advance(seconds=91)
        await tools.complete(task, {"content": [], "secret": "a secret"})
        body = await response.aread()
    assert b"The access token has expired." in body
    assert b"a secret" not in body


async def test_a_stream_ends_when_a_token_has_lost_its_scope(
    server: AuthorizationServer, database_url: str, clock: ShiftedClock
) -> None:
    settings = test_settings(
        database_url,
        introspection_url=f"{server.url}/introspect",
        introspection_client_id=server.client_id,
        introspection_client_secret=server.client_secret,
        introspection_audience=(AUDIENCE,),
        scopes_read=("tasks:read",),
    )
    async with networked_service(settings, clock) as service:
        tools = await service.tool_server()
        client = service.client(server.opaque_token(scope="tasks:read"))
        task = await tools.create(client)
        async with listening(service.http, client, [task.id]) as stream:
            await stream.acknowledged()
            await stream.task()
            server.known[client.token or ""] = {"active": True, "sub": "somebody", "scope": ""}
            clock.advance(seconds=31)
            await tools.report(task, statusMessage="a secret")
            [last] = await stream.rest()
    assert "scope" in last["error"]["message"]
