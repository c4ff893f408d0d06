"""MCP clients: from an `Authorization` header to the owner that it stands for."""

import re

from app.auth.keys import BACKEND_KEY_PREFIX, CLIENT_KEY_PREFIX, key_hash
from app.auth.remembered import Remembered
from app.db import backends, clients
from app.db.database import Database
from app.domain.backends import Backend
from app.domain.clients import Client
from app.domain.owners import (
    ANONYMOUS,
    Owner,
    client_key_owner,
    opaque_token_owner,
)
from app.errors import Unauthenticated

_BEARER = re.compile(r"bearer +([\x21-\x7e]+)", re.ASCII | re.IGNORECASE)


def bearer_token(authorization: str) -> str:
    """The token of an `Authorization` value. Raises Unauthenticated if it is no bearer token."""
    match = _BEARER.fullmatch(authorization.strip())
    if match is None:
        raise Unauthenticated("The Authorization header must be `Bearer` and one token.")
    return match[1]


class Callers:
    """Finds the owner behind a credential; keys of clients are looked up and briefly remembered."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._clients = Remembered(self._find_client)
        self._anonymous_allowed = Remembered(self._find_anonymous_allowed)

    async def owner(self, authorization: str | None, backend: Backend | None = None) -> Owner:
        """The owner that an MCP client is, at the door of one backend or of all.

        Raises Unauthenticated, also for a client without a credential where none may be anonymous.
        """
        if authorization is None:
            allowed = (
                await self._anonymous_allowed.get(None)
                if backend is None
                else backend.terms.allow_anonymous
            )
            if not allowed:
                raise Unauthenticated
            return ANONYMOUS
        return await self.owner_of_token(bearer_token(authorization))

    async def owner_of_token(self, token: str) -> Owner:
        """The owner behind a bearer token.

        An opaque token is not checked with anyone: it is the owner of what was created for it.
        """
        if token.startswith(BACKEND_KEY_PREFIX):
            raise Unauthenticated("This is the API key of a tool server, not of an MCP client.")
        if not token.startswith(CLIENT_KEY_PREFIX):
            return opaque_token_owner(token)
        client = await self._clients.get(key_hash(token))
        if client is None:
            raise Unauthenticated("This client key is unknown or revoked.")
        return client_key_owner(str(client.id))

    async def _find_client(self, hashed: bytes) -> Client | None:
        async with self._db.transaction() as connection:
            return await clients.by_key(connection, hashed)

    async def _find_anonymous_allowed(self, _: None) -> bool:
        async with self._db.transaction() as connection:
            return await backends.any_allows_anonymous(connection)
