"""MCP clients: from an `Authorization` header to the owner that it stands for.

A bearer token is one of three: a client key of the broker's; an access token of a configured
issuer, if it looks like one; or opaque, and then it is introspected where that is configured, and
otherwise is the owner itself.
"""

import re

from app.auth.access_tokens import AccessTokens
from app.auth.introspection import Introspection
from app.auth.keys import BACKEND_KEY_PREFIX, CLIENT_KEY_PREFIX, key_hash
from app.auth.remembered import Remembered
from app.db import backends, clients
from app.db.database import Database
from app.domain.backends import Backend
from app.domain.claims import Identity
from app.domain.clients import Client
from app.domain.owners import ANONYMOUS, client_key_owner, opaque_token_owner
from app.errors import Unauthenticated

_BEARER = re.compile(r"bearer +([\x21-\x7e]+)", re.ASCII | re.IGNORECASE)


def bearer_token(authorization: str) -> str:
    """The token of an `Authorization` value. Raises Unauthenticated if it is no bearer token."""
    match = _BEARER.fullmatch(authorization.strip())
    if match is None:
        raise Unauthenticated("The Authorization header must be `Bearer` and one token.")
    return match[1]


class Callers:
    """Finds out who is behind a credential; keys are looked up and briefly remembered."""

    def __init__(
        self,
        db: Database,
        access_tokens: AccessTokens | None = None,
        introspection: Introspection | None = None,
    ) -> None:
        self._db = db
        self._access_tokens = access_tokens
        self._introspection = introspection
        self._clients = Remembered(self._find_client)
        self._anonymous_allowed = Remembered(self._find_anonymous_allowed)

    @property
    def takes_opaque_tokens_as_they_are(self) -> bool:
        return self._introspection is None

    async def identity(self, authorization: str | None, backend: Backend | None = None) -> Identity:
        """Who an MCP client is, at the door of one backend or of all.

        Raises Unauthenticated, also for a client without a credential where none may be anonymous,
        and Unavailable.
        """
        if authorization is None:
            allowed = (
                await self._anonymous_allowed.get(None)
                if backend is None
                else backend.terms.allow_anonymous
            )
            if not allowed:
                raise Unauthenticated
            return Identity(ANONYMOUS)
        return await self.identity_of_token(bearer_token(authorization))

    async def identity_of_token(self, token: str) -> Identity:
        """Who is behind a bearer token. Raises Unauthenticated or Unavailable.

        An opaque token that is not introspected is not checked with anyone: it is the owner of
        what was created for it.
        """
        if token.startswith(BACKEND_KEY_PREFIX):
            raise Unauthenticated("This is the API key of a tool server, not of an MCP client.")
        if token.startswith(CLIENT_KEY_PREFIX):
            client = await self._clients.get(key_hash(token))
            if client is None:
                raise Unauthenticated("This client key is unknown or revoked.")
            return Identity(client_key_owner(str(client.id)))
        if self._access_tokens is not None:
            identity = await self._access_tokens.identity(token)
            if identity is not None:
                return identity
        if self._introspection is not None:
            return await self._introspection.identity(token)
        return Identity(opaque_token_owner(token))

    async def _find_client(self, hashed: bytes) -> Client | None:
        async with self._db.transaction() as connection:
            return await clients.by_key(connection, hashed)

    async def _find_anonymous_allowed(self, _: None) -> bool:
        async with self._db.transaction() as connection:
            return await backends.any_allows_anonymous(connection)
