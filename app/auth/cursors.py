"""Cursors of `tasks/list`: opaque, good for one owner, and noticed when they were changed."""

from collections.abc import Sequence
from uuid import UUID

from cryptography.fernet import InvalidToken

from app.auth.keys import fernet
from app.domain.task_ids import Fingerprints
from app.errors import Invalid


class Cursors:
    def __init__(self, keys: Sequence[bytes]) -> None:
        self._fernet = fernet(keys, b"list-cursor")

    def seal(self, ref: UUID, owner: Fingerprints) -> str:
        """A cursor of this owner for what comes after the task `ref`."""
        return self._fernet.encrypt(ref.bytes + owner[0]).decode("ascii")

    def open(self, cursor: str, owner: Fingerprints) -> UUID:
        """The task that a page of this owner ended with. Raises Invalid."""
        try:
            text = self._fernet.decrypt(cursor.encode())
        except InvalidToken:
            text = b""
        if text[16:] not in owner:
            raise Invalid("The cursor is not one that this broker gave to this caller.")
        return UUID(bytes=text[:16])
