"""Tool servers: by API key, or by the signature of a webhook."""

from app.auth.callers import bearer_token
from app.auth.keys import SecretBox, key_hash
from app.auth.remembered import Remembered
from app.auth.signers import open_all
from app.db import backends
from app.db.database import Database
from app.domain import signing
from app.domain.backends import Backend
from app.domain.clock import Clock
from app.errors import Forbidden, Unauthenticated

_NO_SIGNATURE = (
    "Sign the body as Standard Webhooks says (webhook-id, webhook-timestamp, webhook-signature "
    "with a current secret of this backend), or send `Authorization: Bearer` with its API key."
)


class Senders:
    """Finds the backend behind a request; what was looked up is briefly remembered."""

    def __init__(self, db: Database, box: SecretBox, clock: Clock) -> None:
        self._db = db
        self._box = box
        self._clock = clock
        self._by_key = Remembered(self._find_by_key)
        self._by_name = Remembered(self._find_by_name)

    async def by_key(self, authorization: str | None) -> Backend:
        """The backend of an API key. Raises Unauthenticated, or Forbidden when it is disabled."""
        if authorization is None:
            raise Unauthenticated("Send `Authorization: Bearer` with the backend's API key.")
        backend = await self._by_key.get(key_hash(bearer_token(authorization)))
        if backend is None:
            raise Unauthenticated("This API key is unknown or no longer valid.")
        return _enabled(backend)

    async def by_signature(
        self, name: str, webhook_id: bytes, timestamp: bytes, signatures: bytes, body: bytes
    ) -> Backend:
        """The backend `name`, if it signed exactly this body just now."""
        if not (webhook_id and timestamp and signatures):
            raise Unauthenticated(_NO_SIGNATURE)
        if not signing.timely(timestamp.decode("latin-1"), self._clock()):
            raise Unauthenticated(
                "webhook-timestamp must be the sending time in whole seconds, "
                f"within {signing.TOLERANCE_SECONDS} s of the broker's clock."
            )
        backend, secrets = await self._by_name.get(name) or (None, [])
        if not signing.verify(secrets, webhook_id, timestamp, signatures, body) or backend is None:
            raise Unauthenticated(f"No signature is valid. {_NO_SIGNATURE}")
        return _enabled(backend)

    async def _find_by_key(self, hashed: bytes) -> Backend | None:
        async with self._db.transaction() as connection:
            return await backends.by_key(connection, hashed, self._clock())

    async def _find_by_name(self, name: str) -> tuple[Backend, list[bytes]] | None:
        async with self._db.transaction() as connection:
            backend = await backends.by_name(connection, name)
            if backend is None:
                return None
            closed = await backends.secrets_of(connection, backend.id, self._clock())
        return backend, open_all(self._box, closed, backend=name)


def _enabled(backend: Backend) -> Backend:
    if backend.disabled_at is not None:
        raise Forbidden(f"The backend {backend.name} is disabled.")
    return backend
