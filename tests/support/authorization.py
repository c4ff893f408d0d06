"""An authorization server on loopback: it publishes keys, signs tokens and introspects them."""

import json
import secrets
from base64 import b64encode
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any
from urllib.parse import parse_qs

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from app.asgi import Receive, Scope, Send
from app.domain.issuers import Issuer
from tests.support.clock import ShiftedClock
from tests.support.secrecy import secret
from tests.support.servers import Behaviour, Received, read_all, respond, serving

AUDIENCE = "https://broker.example/mcp"
PUBLIC_URL = "https://broker.example"
OAUTH_METADATA = "/.well-known/oauth-authorization-server"
OPENID_METADATA = "/.well-known/openid-configuration"

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


@cache
def rsa_key(number: int = 0, bits: int = 2048) -> rsa.RSAPrivateKey:
    """The same key for the same number: making one takes long."""
    return rsa.generate_private_key(65537, bits)


def jwk(key: PrivateKey, **members: Any) -> dict[str, Any]:
    """The public half of a key, as it is published."""
    match key:
        case rsa.RSAPrivateKey():
            published = RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
        case ec.EllipticCurvePrivateKey():
            published = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
        case _:
            published = OKPAlgorithm.to_jwk(key.public_key(), as_dict=True)
    published.pop("key_ops", None)
    return {**published, **members}


class AuthorizationServer:
    """`requests` counts them by path; `instead` has what a test wants it to do at a path."""

    def __init__(self, clock: ShiftedClock) -> None:
        self.url = ""
        self.key: PrivateKey = rsa_key()
        self.keys: list[Any] = [jwk(self.key, kid="one")]
        self.metadata: dict[str, Any] = {}
        self.requests: Counter[str] = Counter()
        self.instead: dict[str, Behaviour] = {}
        self.client_id, self.client_secret = "broker", secret(f"s: /{secrets.token_urlsafe(16)}")
        self.known: dict[str, Any] = {}
        """The tokens that are introspected, and what is answered."""
        self._clock = clock

    def issuer(self, *audiences: str, jwks_uri: str | None = None) -> Issuer:
        """The server as a setting."""
        return Issuer(self.url, frozenset(audiences or (AUDIENCE,)), jwks_uri)

    def now(self) -> float:
        return self._clock().timestamp()

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Claims of a good token; those that are changed to `None` are left out."""
        claims = {
            "iss": self.url,
            "sub": "somebody",
            "aud": AUDIENCE,
            "exp": int(self.now()) + 3600,
            "iat": int(self.now()),
            "client_id": "desktop",
            "jti": secrets.token_hex(8),
            **changes,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def token(
        self,
        *,
        key: PrivateKey | None = None,
        algorithm: str = "RS256",
        header: dict[str, Any] | None = None,
        changes: Mapping[str, Any] | None = None,
        **claims: Any,
    ) -> str:
        """A token signed by this server, good unless a test changes it."""
        signed = jwt.api_jws.encode(
            json.dumps(self.claims(**(changes or {}), **claims)).encode(),
            key or self.key,
            algorithm,
            headers={"kid": "one", "typ": "at+jwt"} if header is None else header,
        )
        return secret(signed)

    def opaque_token(self, **answer: Any) -> str:
        """A token that is introspected."""
        token = secret(f"opaque-{secrets.token_urlsafe(16)}")
        self.known[token] = {"active": True, "sub": "somebody", "client_id": "desktop", **answer}
        return token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        headers = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"]]
        request = Received(scope["method"], scope["path"], scope["query_string"], headers)
        self.requests[request.path] += 1
        if request.path in self.instead:
            await self.instead[request.path](request, receive, send)
            return
        await read_all(request, receive)
        answers: dict[str, Callable[[Received], Any]] = {
            "/keys": lambda _: {"keys": self.keys},
            OAUTH_METADATA: lambda _: {
                "issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.metadata
            },
            "/introspect": self._introspected,
        }  # fmt: skip
        answer = answers[request.path](request) if request.path in answers else None
        body = json.dumps(answer).encode()
        await respond(send, body, status=404 if answer is None else 200)

    def _introspected(self, request: Received) -> Any:
        # RFC 6749, 2.3.1: both are encoded as in a form before they are joined.
        encoded = self.client_secret.replace(":", "%3A").replace(" ", "+").replace("/", "%2F")
        basic = b64encode(f"{self.client_id}:{encoded}".encode()).decode()
        assert request.header("authorization") == f"Basic {basic}"
        [token] = parse_qs(request.body.decode())["token"]
        return self.known.get(token, {"active": False})


@asynccontextmanager
async def authorization_server(clock: ShiftedClock) -> AsyncIterator[AuthorizationServer]:
    server = AuthorizationServer(clock)
    async with serving(server) as url:
        server.url = url
        yield server
