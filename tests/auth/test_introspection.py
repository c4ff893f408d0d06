"""Opaque tokens that the authorization server is asked about (RFC 7662)."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.auth import introspection
from tests.support.authorization import AUDIENCE, PUBLIC_URL, AuthorizationServer
from tests.support.clock import ShiftedClock
from tests.support.processes import free_port
from tests.support.servers import Behaviour, answer_with
from tests.support.service import Service, running_service, test_settings


def introspecting(database_url: str, server: AuthorizationServer, **changes: Any) -> Any:
    """Settings of a broker that asks the server about tokens."""
    return test_settings(
        database_url,
        **{
            "introspection_url": f"{server.url}/introspect",
            "introspection_client_id": server.client_id,
            "introspection_client_secret": server.client_secret,
            "introspection_issuer": server.url,
            "introspection_audience": (AUDIENCE,),
            "public_url": PUBLIC_URL,
            **changes,
        },
    )


@pytest.fixture
async def asking(
    server: AuthorizationServer, database_url: str, clock: ShiftedClock
) -> AsyncIterator[Service]:
    """A broker without issuers of JWTs."""
    async with running_service(introspecting(database_url, server), clock) as service:
        yield service


async def ask(service: Service, token: str) -> httpx.Response:
    return await service.client(token).request("tasks/get", {"taskId": "A" * 64})


async def test_a_renewed_token_reaches_the_tasks_of_the_first(
    asking: Service, server: AuthorizationServer
) -> None:
    tools = await asking.tool_server()
    task = await tools.create(asking.client(server.opaque_token(iss=server.url, aud=AUDIENCE)))
    same = asking.client(server.opaque_token())
    other = asking.client(server.opaque_token(client_id="phone"))
    assert (await same.get(task.id))["status"] == "working"
    assert "not found" in (await other.error("tasks/get", task.id))["message"]
    named = {"issuer": server.url, "subject": "somebody", "clientId": "desktop"}
    assert (await same.get((await tools.create(named)).id))["status"] == "working"


async def test_a_jwt_and_an_opaque_token_of_the_same_client_are_one_owner(
    server: AuthorizationServer, database_url: str, clock: ShiftedClock
) -> None:
    settings = introspecting(database_url, server, oauth_issuers=(server.issuer(),))
    async with running_service(settings, clock) as service:
        tools = await service.tool_server()
        task = await tools.create(service.client(server.token()))
        opaque = service.client(server.opaque_token())
        assert (await opaque.get(task.id))["status"] == "working"
        forged = server.token(iss="https://other.example")
        server.known[forged] = {"active": True, "sub": "somebody"}
        assert (await ask(service, forged)).status_code == 401  # the server is not asked


@pytest.mark.parametrize(
    "answer",
    [
        {"active": False},
        {"exp": 1},
        {"nbf": 99_999_999_999},
        {"sub": None},
        {"aud": "https://other.example"},
        {"aud": []},
        {"iss": "https://other.example"},
    ],
)
async def test_tokens_that_are_not_believed(
    asking: Service, server: AuthorizationServer, answer: dict[str, Any]
) -> None:
    assert (await ask(asking, server.opaque_token(**answer))).status_code == 401


async def test_keys_of_the_broker_are_never_introspected(
    asking: Service, server: AuthorizationServer
) -> None:
    tools = await asking.tool_server()
    client = await asking.keyed_client()
    assert (await client.get((await tools.create(client)).id))["status"] == "working"
    assert (await ask(asking, "tbc_unknown")).status_code == 401
    assert not server.requests


async def test_the_hash_of_a_token_names_nobody_where_tokens_are_introspected(
    asking: Service,
) -> None:
    tools = await asking.tool_server()
    response = await tools.post_task({"owner": {"tokenSha256": "ab" * 32}})
    assert response.status_code == 422
    assert response.json()["errors"][0]["pointer"] == "/owner/tokenSha256"


async def test_an_answer_is_shared_and_believed_for_a_while(
    asking: Service, server: AuthorizationServer, clock: ShiftedClock
) -> None:
    token = server.opaque_token()
    answers = await asyncio.gather(*(ask(asking, token) for _ in range(10)))
    assert {answer.status_code for answer in answers} == {200}
    assert server.requests["/introspect"] == 1
    server.known[token] = {"active": False}
    clock.advance(seconds=introspection.REMEMBERED_SECONDS - 5)
    assert (await ask(asking, token)).status_code == 200
    clock.advance(seconds=5)
    assert (await ask(asking, token)).status_code == 401
    server.known[token] = {"active": True, "sub": "somebody"}
    assert (await ask(asking, token)).status_code == 401
    clock.advance(seconds=introspection.REFUSED_SECONDS)
    assert (await ask(asking, token)).status_code == 200


async def test_an_answer_is_believed_no_longer_than_the_token_is_valid(
    asking: Service, server: AuthorizationServer, clock: ShiftedClock
) -> None:
    token = server.opaque_token(exp=int(server.now()) + 10)
    assert (await ask(asking, token)).status_code == 200
    clock.advance(seconds=10)
    assert (await ask(asking, token)).status_code == 401


@pytest.mark.parametrize(
    "behaviour",
    [
        answer_with(b"", status=500),
        answer_with(b"", status=401),
        answer_with(b"", status=302, headers=[("location", "/keys")]),
        answer_with(b"garbage"),
        answer_with(b'{"active": "true"}'),
        answer_with(b'{"active": true, "sub": 5}'),
        answer_with(b"{}" + b" " * 300_000),
    ],
)
async def test_without_a_clear_answer_nobody_is_let_in(
    asking: Service, server: AuthorizationServer, behaviour: Behaviour
) -> None:
    token = server.opaque_token()
    server.instead = {"/introspect": behaviour}
    response = await ask(asking, token)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    server.instead = {}
    assert (await ask(asking, token)).status_code == 200


async def test_while_the_endpoint_is_down_clients_are_asked_to_come_again(
    server: AuthorizationServer, database_url: str, clock: ShiftedClock
) -> None:
    down = f"http://127.0.0.1:{free_port()}/introspect"
    settings = introspecting(database_url, server, introspection_url=down)
    async with running_service(settings, clock) as service:
        assert (await ask(service, server.opaque_token())).status_code == 503
