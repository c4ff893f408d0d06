"""New credentials for tool servers: shown once, kept as a hash or encrypted."""

import secrets

from app.auth.keys import SecretBox, key_hash, new_backend_key
from app.db import backends
from app.db.database import Connection
from app.domain import signing


async def issue_key(connection: Connection, backend_id: int) -> str:
    """A new API key of a backend."""
    key = new_backend_key()
    await backends.add_key(connection, backend_id, key_hash(key))
    return key


async def issue_secret(connection: Connection, backend_id: int, box: SecretBox) -> str:
    """A new webhook secret of a backend."""
    secret = secrets.token_bytes(32)
    await backends.add_secret(connection, backend_id, box.close(secret))
    return signing.encode_secret(secret)
