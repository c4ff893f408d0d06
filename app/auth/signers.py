"""Signing what goes to tool servers, as they sign what comes from them."""

from datetime import datetime

import structlog

from app.auth.keys import SecretBox, Undecryptable
from app.auth.remembered import Remembered
from app.db import backends
from app.db.database import Database
from app.domain import signing
from app.domain.clock import Clock

log = structlog.get_logger(__name__)


class Signers:
    """The webhook secrets of each backend; what was looked up is briefly remembered."""

    def __init__(self, db: Database, box: SecretBox, clock: Clock) -> None:
        self._db = db
        self._box = box
        self._clock = clock
        self._secrets = Remembered(self._find)

    async def headers(
        self, backend_id: int, webhook_id: str, now: datetime, body: bytes
    ) -> dict[str, str] | None:
        """The headers of Standard Webhooks, with a signature under each current secret.

        `None` when there is no secret that could be used.
        """
        timestamp = int(now.timestamp())
        signatures = [
            signing.sign(secret, webhook_id, timestamp, body)
            for secret in await self._secrets.get(backend_id)
        ]
        if not signatures:
            return None
        return {
            "webhook-id": webhook_id,
            "webhook-timestamp": str(timestamp),
            "webhook-signature": " ".join(signatures),
        }

    async def _find(self, backend_id: int) -> list[bytes]:
        async with self._db.transaction() as connection:
            closed = await backends.secrets_of(connection, backend_id, self._clock())
        return open_all(self._box, closed, backend_id=backend_id)


def open_all(box: SecretBox, closed: list[bytes], **whose: object) -> list[bytes]:
    """The secrets that can be opened; the log tells of the others."""
    secrets = []
    for ciphertext in closed:
        try:
            secrets.append(box.open(ciphertext))
        except Undecryptable:
            log.error("webhook secret cannot be decrypted", **whose)  # noqa: TRY400 - no trace
    return secrets
