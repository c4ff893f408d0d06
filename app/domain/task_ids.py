"""Task ids that are bound to the credential of their owner.

    taskId = base64url( kid ‖ uuid7 ‖ tag )            1 + 16 + 31 bytes = 64 characters

`kid` names the server key, `uuid7` is the task's public reference, and `tag` is the head of an
HMAC-SHA256 under that key over the reference and the owner's fingerprint. So an id is checked
against the credential that is presented before any look-up, and is stored nowhere.
"""

import binascii
import hmac
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from hashlib import sha256
from uuid import UUID

from app.domain.owners import Owner

KEY_BYTES = 32
TAG_BYTES = 31
ID_LENGTH = 64
_SHAPE = re.compile(r"[A-Za-z0-9_-]{64}", re.ASCII)
_NOT_AN_ID = bytes(1 + 16 + TAG_BYTES)


def new_task_ref(now: datetime, entropy: bytes) -> UUID:
    """A UUIDv7 (RFC 9562) of `now` and 10 random bytes."""
    milliseconds = int(now.timestamp() * 1000)
    random = int.from_bytes(entropy[:10], "big")
    value = (milliseconds & (1 << 48) - 1) << 80 | 0x7 << 76 | (random >> 62 & 0xFFF) << 64
    return UUID(int=value | 0b10 << 62 | random & (1 << 62) - 1)


class _Key:
    """One server key: its name and what is derived from it, one subkey for each purpose."""

    def __init__(self, secret: bytes) -> None:
        if len(secret) != KEY_BYTES:
            raise ValueError(f"a secret key has {KEY_BYTES} bytes")
        # Below 0xF8, so that no id begins with "-": command lines would take it for an option.
        self.kid = _derive(secret, b"kid")[0] % 0xF8
        self._owner = _derive(secret, b"owner")
        self._task_id = _derive(secret, b"task-id")

    def fingerprint(self, owner: Owner) -> bytes:
        return hmac.digest(self._owner, owner.canonical(), sha256)

    def tag(self, ref: bytes, fingerprint: bytes) -> bytes:
        return hmac.digest(self._task_id, ref + fingerprint, sha256)[:TAG_BYTES]


class Fingerprints(tuple[bytes, ...]):
    """An owner's fingerprint (32 bytes) under each key of the ring, in the ring's order."""

    __slots__ = ()


class Keyring:
    """The server's secret keys, newest first: the first one mints, all of them verify."""

    def __init__(self, secrets: Sequence[bytes]) -> None:
        if not secrets:
            raise ValueError("at least one secret key is needed")
        self._keys = [_Key(secret) for secret in secrets]
        self.fingerprints: Callable[[Owner], Fingerprints] = lru_cache(maxsize=10_000)(
            self._fingerprints
        )
        self._verified = lru_cache(maxsize=32_768)(self._verify)

    @property
    def newest_kid(self) -> int:
        return self._keys[0].kid

    def _fingerprints(self, owner: Owner) -> Fingerprints:
        return Fingerprints(key.fingerprint(owner) for key in self._keys)

    def mint(self, ref: UUID, owner: Fingerprints, kid: int | None = None) -> str:
        """The id of a task for its owner: under the key `kid` if the ring has it, else the newest.

        The same reference, owner and key always give the same id.
        """
        index = next((i for i, key in enumerate(self._keys) if key.kid == kid), 0)
        key = self._keys[index]
        raw = bytes((key.kid,)) + ref.bytes + key.tag(ref.bytes, owner[index])
        return binascii.b2a_base64(raw, newline=False).translate(_URL_SAFE).decode("ascii")

    def verify(self, task_id: str, owner: Fingerprints) -> UUID | None:
        """The reference inside an id that belongs to `owner`, else `None`.

        Malformed, unknown and foreign ids cost the same work. What a caller presents again is
        remembered, as clients poll.
        """
        return self._verified(task_id[: ID_LENGTH + 1], owner)

    def _verify(self, task_id: str, owner: Fingerprints) -> UUID | None:
        raw = _decoded(task_id)
        kid, ref, presented = raw[0], raw[1:17], raw[17:]
        genuine = False
        for key, fingerprint in zip(self._keys, owner, strict=True):
            matches = hmac.compare_digest(key.tag(ref, fingerprint), presented)
            genuine |= matches and key.kid == kid
        return UUID(bytes=ref) if genuine else None

    def may_have_minted(self, task_id: str) -> bool:
        """Whether an id has the form of those that are minted here, whoever its owner may be."""
        raw = _decoded(task_id)
        ref = UUID(bytes=raw[1:17])
        return any(key.kid == raw[0] for key in self._keys) and ref.version == 7

    def verify_stored(self, task_id: str, owner: bytes) -> UUID | None:
        """As `verify`, against one stored fingerprint, for callers who are not the owner."""
        return self.verify(task_id, Fingerprints(owner for _ in self._keys))


def peek_ref(task_id: str) -> UUID:
    """The reference that an id claims to have, unverified."""
    return UUID(bytes=_decoded(task_id)[1:17])


_URL_SAFE = bytes.maketrans(b"+/", b"-_")
_STANDARD = bytes.maketrans(b"-_", b"+/")


def _decoded(task_id: str) -> bytes:
    if _SHAPE.fullmatch(task_id) is None:
        return _NOT_AN_ID
    return binascii.a2b_base64(task_id.encode().translate(_STANDARD), strict_mode=True)


def _derive(secret: bytes, purpose: bytes) -> bytes:
    return hmac.digest(secret, b"taskbroker/v1/" + purpose, sha256)
