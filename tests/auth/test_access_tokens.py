"""JWT access tokens: which are believed, whose tasks they reach, and how issuers are asked."""

import asyncio
import base64
import hashlib
import hmac
import json
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from app.asgi import Receive, Send
from app.auth import access_tokens, documents, issuer_keys
from tests.support.authorization import (
    AUDIENCE,
    OAUTH_METADATA,
    OPENID_METADATA,
    PUBLIC_URL,
    AuthorizationServer,
    PrivateKey,
    jwk,
    rsa_key,
)
from tests.support.clock import ShiftedClock
from tests.support.secrecy import secret
from tests.support.servers import Received, answer_with, respond
from tests.support.service import McpClient, Service, owner_of, running_service, test_settings

UNKNOWN = "A" * 64


async def ask(service: Service, token: str, task_id: str = UNKNOWN) -> httpx.Response:
    """A `tasks/get` with this token, about a task that need not exist."""
    return await service.client(token).request("tasks/get", {"taskId": task_id})


async def refused(service: Service, token: str) -> str:
    """Why a token is not believed."""
    response = await ask(service, token)
    assert response.status_code == 401, response.text
    assert response.headers["www-authenticate"] == (
        'Bearer error="invalid_token", '
        f'resource_metadata="{PUBLIC_URL}/.well-known/oauth-protected-resource/mcp"'
    )
    message: str = response.json()["error"]["message"]
    return message


async def accepted(service: Service, token: str) -> bool:
    return (await ask(service, token)).status_code == 200


# --- whose tasks ------------------------------------------------------------------------------


async def test_a_refreshed_token_reaches_the_tasks_of_the_first(
    broker: Service, server: AuthorizationServer
) -> None:
    tools = await broker.tool_server()
    first, second = broker.client(server.token()), broker.client(server.token())
    assert first.token != second.token
    task = await tools.create(first)
    assert (await second.get(task.id))["status"] == "working"


@pytest.mark.parametrize(
    "other",
    [{"sub": "another"}, {"client_id": "phone"}, {"client_id": None}, {"client_id": ""}],
)
async def test_another_subject_or_client_gets_the_answer_for_tasks_that_are_not_there(
    broker: Service, server: AuthorizationServer, other: dict[str, Any]
) -> None:
    tools = await broker.tool_server()
    task = await tools.create(broker.client(server.token()))
    foreign = await ask(broker, server.token(**other), task.id)
    missing = await ask(broker, server.token(**other), UNKNOWN)
    assert foreign.content == missing.content
    assert foreign.headers == missing.headers


async def test_azp_is_the_client_where_there_is_no_client_id(
    broker: Service, server: AuthorizationServer
) -> None:
    tools = await broker.tool_server()
    task = await tools.create(broker.client(server.token()))
    same = broker.client(server.token(client_id=None, azp="desktop"))
    assert (await same.get(task.id))["status"] == "working"


async def test_a_task_may_be_created_for_the_claims_of_a_token(
    broker: Service, server: AuthorizationServer
) -> None:
    tools = await broker.tool_server()
    client = broker.client(server.token(client_id=None))
    task = await tools.create({"issuer": server.url, "subject": "somebody"})
    assert (await client.get(task.id))["status"] == "working"
    named = {"issuer": server.url, "subject": "somebody", "clientId": "desktop"}
    other = await tools.create(named)
    assert (await broker.client(server.token()).get(other.id))["status"] == "working"
    assert "not found" in (await client.error("tasks/get", other.id))["message"]


async def test_only_claims_of_configured_issuers_name_an_owner(
    broker: Service, server: AuthorizationServer
) -> None:
    tools = await broker.tool_server()
    for owner in (
        {"issuer": "https://other.example", "subject": "somebody"},
        {"issuer": server.url},
        {"issuer": server.url, "clientId": "desktop"},
        {"issuer": server.url, "subject": ""},
        {"issuer": server.url, "subject": "x" * 1025},
        {"issuer": server.url, "subject": "x", "clientId": "x" * 1025},
        {"issuer": server.url, "subject": "x", "anonymous": True},
        {"authorization": f"Bearer {server.token(aud='https://other.example')}"},
    ):
        response = await tools.post_task({"owner": owner})
        assert response.status_code == 422, owner
        assert response.json()["errors"][0]["pointer"].startswith("/owner")


async def test_other_credentials_work_beside_access_tokens(broker: Service) -> None:
    tools = await broker.tool_server()
    for client in (broker.client(), await broker.keyed_client()):
        task = await tools.create(client)
        assert (await client.get(task.id))["status"] == "working"


# --- which tokens are believed ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "algorithms"),
    [
        (rsa_key(), ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512"]),
        (ec.generate_private_key(ec.SECP256R1()), ["ES256"]),
        (ec.generate_private_key(ec.SECP384R1()), ["ES384"]),
        (ec.generate_private_key(ec.SECP521R1()), ["ES512"]),
        (ed25519.Ed25519PrivateKey.generate(), ["EdDSA"]),
    ],
)
async def test_the_algorithms_that_are_believed(
    broker: Service, server: AuthorizationServer, key: PrivateKey, algorithms: list[str]
) -> None:
    server.keys = [jwk(key, kid="one")]
    for algorithm in algorithms:
        assert await accepted(broker, server.token(key=key, algorithm=algorithm))


def forged(header: dict[str, Any], claims: Any, key: bytes | None = None) -> str:
    """A token put together by hand, signed with a shared secret if there is one."""
    parts = [json.dumps(part).encode() for part in (header, claims)]
    signed = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    signature = b"" if key is None else hmac.digest(key, signed, hashlib.sha256)
    whole = signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")
    return secret(whole.decode())


@pytest.mark.parametrize("alg", ["none", "None", "NONE", "", "HS256", "HS512", "ES256K", "RSA1_5"])
async def test_no_other_algorithm_is_believed(
    broker: Service, server: AuthorizationServer, alg: str
) -> None:
    public = rsa_key().public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    for key in (None, pem, json.dumps(server.keys[0]).encode(), b""):
        why = await refused(broker, forged({"alg": alg, "kid": "one"}, server.claims(), key))
        assert "signed" in why
    assert not server.requests  # nobody needed to be asked


@pytest.mark.parametrize(
    "members",
    [
        {"use": "enc"},
        {"alg": "RS512"},
        {"alg": "RSA-OAEP"},
        {"key_ops": ["encrypt"]},
        {"key_ops": 5},
        {"kid": "two"},
        {"kid": 1},
        {"d": "AQAB"},
        {"kty": "oct"},
        {"n": "!"},
        {"n": "A" * 5000},
        {"e": None},
    ],
)
async def test_a_key_is_used_for_what_it_is_meant_for_only(
    broker: Service, server: AuthorizationServer, members: dict[str, Any]
) -> None:
    server.keys = [{**server.keys[0], **members}]
    assert "signature" in await refused(broker, server.token())


async def test_short_keys_are_not_used(broker: Service, server: AuthorizationServer) -> None:
    weak = rsa_key(bits=1024)
    server.keys = [jwk(weak, kid="one")]
    with pytest.warns(match="1024"):
        token = server.token(key=weak)
    assert "signature" in await refused(broker, token)


async def test_keys_may_share_a_name_and_tokens_need_not_name_one(
    broker: Service, server: AuthorizationServer
) -> None:
    curve = ec.generate_private_key(ec.SECP256R1())
    server.keys = [
        jwk(rsa_key(1), kid="one"), "garbage", {}, jwk(rsa_key(), kid="one"), jwk(curve),
    ]  # fmt: skip
    assert await accepted(broker, server.token())
    assert await accepted(broker, server.token(key=rsa_key(1), header={}))
    assert await accepted(broker, server.token(key=curve, algorithm="ES256", header={}))
    assert "signature" in await refused(broker, server.token(key=rsa_key(2)))


@pytest.mark.parametrize("typ", ["at+jwt", "application/at+jwt", "JWT", "jwt"])
async def test_types_of_access_tokens(
    broker: Service, server: AuthorizationServer, typ: str
) -> None:
    assert await accepted(broker, server.token(header={"kid": "one", "typ": typ}))


@pytest.mark.parametrize(
    "header",
    [
        {"typ": "dpop+jwt"},
        {"typ": "logout+jwt"},
        {"crit": ["x"], "x": 1},
        {"crit": []},
        {"b64": True},
        {"typ": 5},
    ],
)
async def test_headers_that_ask_for_more_are_refused(
    broker: Service, server: AuthorizationServer, header: dict[str, Any]
) -> None:
    await refused(broker, forged({"alg": "RS256", "kid": "one", **header}, server.claims()))


@pytest.mark.parametrize(
    "claims",
    [
        {"exp": None},
        {"exp": "soon"},
        {"exp": True},
        {"sub": None},
        {"sub": ""},
        {"sub": 5},
        {"sub": "\ud800"},
        {"sub": "x" * 1025},
        {"client_id": 5},
        {"client_id": "x" * 1025},
        {"aud": None},
        {"aud": []},
        {"aud": "https://other.example"},
        {"aud": [AUDIENCE + "/"]},
        {"aud": {"a": AUDIENCE}},
        {"nbf": "x"},
        {"iss": None},
        {"iss": "https://other.example"},
        {"iss": ["x"]},
    ],
)
async def test_claims_that_are_not_believed(
    broker: Service, server: AuthorizationServer, claims: dict[str, Any]
) -> None:
    await refused(broker, server.token(**claims))


async def test_an_issuer_is_compared_exactly(broker: Service, server: AuthorizationServer) -> None:
    for name in (server.url + "/", server.url.upper(), server.url + "\0"):
        assert "issuer" in await refused(broker, server.token(iss=name))


async def test_one_of_many_audiences_is_enough(
    broker: Service, server: AuthorizationServer
) -> None:
    assert await accepted(broker, server.token(aud=["https://other.example", AUDIENCE]))


@pytest.mark.parametrize(
    ("claim", "good", "bad"), [("exp", -25, -35), ("nbf", 25, 35), ("iat", 25, 35)]
)
async def test_clocks_may_differ_by_half_a_minute(
    broker: Service, server: AuthorizationServer, claim: str, good: int, bad: int
) -> None:
    early, late = ({claim: server.now() + seconds} for seconds in (good, bad))
    assert await accepted(broker, server.token(changes=early))
    await refused(broker, server.token(changes=late))


async def test_what_looks_like_a_token_is_never_taken_for_an_opaque_one(
    broker: Service, server: AuthorizationServer
) -> None:
    good = server.token()
    head, claims, signature = good.split(".")
    for token in (
        f"{head}.{claims}.", f"{head}..{signature}", f"{head}.{claims}.{signature[:-4]}AAAA",
        f"{head}.e30.{signature}", f"{head}.bm9uZQ.{signature}", "e30.e30.e30", "e2E.e30.e30",
    ):  # fmt: skip
        await refused(broker, secret(token))
    for token in (f"{head}.{claims}", f"{good}.{signature}.{signature}", "MQ.e30.e30-opaque"):
        assert await accepted(broker, secret(token))  # of no issuer: an owner of its own


async def test_huge_and_deep_tokens_are_refused(
    broker: Service, server: AuthorizationServer
) -> None:
    many = server.token(changes={f"c{number}": number for number in range(2_000)})
    assert "bytes" in await refused(broker, many)
    tools = await broker.tool_server()
    million = forged({"alg": "RS256"}, [0] * 200_000)
    response = await tools.post_task({"owner": {"authorization": f"Bearer {million}"}})
    assert response.status_code == 422
    deep = base64.urlsafe_b64encode(b'{"iss":' + b"[" * 5_000).decode().rstrip("=")
    await refused(broker, secret(f"e30.{deep}.e30"))


# --- remembering ------------------------------------------------------------------------------


async def test_a_token_that_was_verified_is_believed_to_its_end(
    broker: Service, server: AuthorizationServer, clock: ShiftedClock
) -> None:
    token = server.token(exp=int(server.now()) + 30)
    assert await accepted(broker, token)
    server.keys = []
    clock.advance(seconds=59)
    assert await accepted(broker, token)
    clock.advance(seconds=2)
    assert "expired" in await refused(broker, token)


async def test_a_token_is_verified_again_after_a_while(
    broker: Service, server: AuthorizationServer, clock: ShiftedClock
) -> None:
    token = server.token(exp=int(server.now()) + 100_000)
    assert await accepted(broker, token)
    server.keys = []  # the key is withdrawn
    clock.advance(seconds=issuer_keys.STALE_SECONDS + access_tokens.REMEMBERED_SECONDS)
    assert "signature" in await refused(broker, token)


# --- asking the issuer ------------------------------------------------------------------------


async def test_the_keys_are_fetched_once_for_all_who_wait(
    broker: Service, server: AuthorizationServer
) -> None:
    tokens = [server.token() for _ in range(20)]
    assert all(await asyncio.gather(*(accepted(broker, token) for token in tokens)))
    assert server.requests == {OAUTH_METADATA: 1, "/keys": 1}


async def test_a_new_key_is_found_when_a_token_names_it(
    broker: Service, server: AuthorizationServer, clock: ShiftedClock
) -> None:
    assert await accepted(broker, server.token())
    new = ed25519.Ed25519PrivateKey.generate()
    server.keys.append(jwk(new, kid="two"))
    rotated = server.token(key=new, algorithm="EdDSA", header={"kid": "two"})
    assert "signature" in await refused(broker, rotated)  # asked a moment ago
    clock.advance(seconds=issuer_keys.REST_SECONDS)
    assert await accepted(broker, rotated)
    assert await accepted(broker, server.token())


async def test_a_flood_of_unknown_keys_asks_the_issuer_once(
    broker: Service, server: AuthorizationServer, clock: ShiftedClock
) -> None:
    assert await accepted(broker, server.token())
    clock.advance(seconds=issuer_keys.REST_SECONDS)
    flood = [server.token(header={"kid": f"unknown-{number}"}) for number in range(50)]
    await asyncio.gather(*(refused(broker, token) for token in flood))
    assert server.requests["/keys"] == 2


async def test_keys_are_used_while_the_issuer_is_away(
    broker: Service, server: AuthorizationServer, clock: ShiftedClock
) -> None:
    assert await accepted(broker, server.token())
    server.instead = {"/keys": answer_with(b"", status=503)}
    clock.advance(seconds=issuer_keys.STALE_SECONDS + 1)
    assert await accepted(broker, server.token())
    unknown = await ask(broker, server.token(header={"kid": "two"}))
    assert (unknown.status_code, unknown.headers["retry-after"]) == (503, "1")


async def test_without_keys_nobody_is_let_in_and_that_is_not_the_clients_fault(
    broker: Service, server: AuthorizationServer, clock: ShiftedClock
) -> None:
    server.instead = {"/keys": answer_with(b"", status=500)}
    token = server.token()
    response = await ask(broker, token)
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    tools = await broker.tool_server()
    created = await tools.post_task({"owner": {"authorization": f"Bearer {token}"}})
    assert (created.status_code, created.headers["retry-after"]) == (503, "1")
    assert server.requests["/keys"] == 1
    server.instead = {}
    clock.advance(seconds=issuer_keys.REST_SECONDS)
    assert await accepted(broker, token)


async def hang(request: Received, receive: Receive, send: Send) -> None:
    """Sends a part of an answer, and then nothing."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b'{"keys":', "more_body": True})
    while (await receive())["type"] != "http.disconnect":
        pass


async def redirect(request: Received, receive: Receive, send: Send) -> None:
    await respond(send, b"", status=302, headers=[("location", "/keys")])


def outcomes(text: str) -> list[str]:
    """The outcomes of fetches in the metrics."""
    lines = [line for line in text.splitlines() if line.startswith("taskbroker_jwks_fetches_total")]
    return [line.partition('outcome="')[2].partition('"')[0] for line in lines]


@pytest.mark.parametrize(
    ("path", "behaviour", "outcome"),
    [
        ("/keys", hang, "timeout"),
        ("/keys", redirect, "redirect"),
        ("/keys", answer_with(b'{"keys": []}' + b" " * documents.MAX_BYTES), "too_large"),
        ("/keys", answer_with(b"garbage"), "malformed"),
        ("/keys", answer_with(b"[" * 100_000), "malformed"),
        ("/keys", answer_with(b'{"keys": {}}'), "malformed"),
        ("/keys", answer_with(b"{}", status=404), "4xx"),
        (OAUTH_METADATA, answer_with(b"garbage"), "malformed"),
        (OAUTH_METADATA, redirect, "redirect"),
    ],
)
async def test_what_a_hostile_issuer_may_answer(
    broker: Service,
    server: AuthorizationServer,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    behaviour: Any,
    outcome: str,
) -> None:
    monkeypatch.setattr(issuer_keys, "SECONDS", 0.3)
    server.instead = {path: behaviour}
    assert (await ask(broker, server.token())).status_code == 503
    assert outcomes((await broker.http.get("/metrics")).text) == [outcome]


@pytest.mark.parametrize(
    ("metadata", "outcome"),
    [
        ({"issuer": "https://other.example"}, "wrong_issuer"),
        ({"jwks_uri": "http://other.example/keys"}, "bad_jwks_uri"),
        ({"jwks_uri": "file:///etc/passwd"}, "bad_jwks_uri"),
        ({"jwks_uri": None}, "malformed"),
    ],
)
async def test_metadata_that_is_not_believed(
    broker: Service, server: AuthorizationServer, metadata: dict[str, Any], outcome: str
) -> None:
    server.metadata = metadata
    assert (await ask(broker, server.token())).status_code == 503
    assert outcomes((await broker.http.get("/metrics")).text) == [outcome]
    assert not server.requests["/keys"]


async def test_metadata_of_openid_connect_will_do(
    broker: Service, server: AuthorizationServer
) -> None:
    found = json.dumps({"issuer": server.url, "jwks_uri": f"{server.url}/keys"}).encode()
    server.instead = {
        OAUTH_METADATA: answer_with(b"{}", status=404),
        OPENID_METADATA: answer_with(found),
    }
    assert await accepted(broker, server.token())


async def test_where_the_keys_are_may_be_configured(
    server: AuthorizationServer, database_url: str, clock: ShiftedClock
) -> None:
    issuer = server.issuer(jwks_uri=f"{server.url}/keys")
    settings = test_settings(database_url, oauth_issuers=(issuer,), public_url=PUBLIC_URL)
    async with running_service(settings, clock) as service:
        assert await accepted(service, server.token())
    assert server.requests == {"/keys": 1}


async def test_without_an_issuer_every_token_is_opaque(
    service: Service, server: AuthorizationServer
) -> None:
    tools = await service.tool_server()
    first, refreshed = McpClient(service.http, server.token()), service.client(server.token())
    task = await tools.create(owner_of(first))
    assert (await first.get(task.id))["status"] == "working"
    assert "not found" in (await refreshed.error("tasks/get", task.id))["message"]
    assert not server.requests
