"""Standard Webhooks 1.0: HMAC-SHA256 over `id.timestamp.body`."""

import binascii
import hmac
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Iterable
from hashlib import sha256
from typing import Any, Protocol, TypeAlias

TOLERANCE_SECONDS = 300
_PREFIX = "whsec_"
_HEADERS = (b"webhook-id", b"webhook-timestamp", b"webhook-signature")
_ID = re.compile(rb"[A-Za-z0-9_-]{1,255}")
_TIMESTAMP = re.compile(rb"[0-9]{1,15}")


class _Mapping(Protocol):
    """What has pairs, such as the headers of Django, Flask, Starlette and `http.server`."""

    def items(self) -> Iterable[tuple[Any, Any]]: ...


Headers: TypeAlias = _Mapping | Iterable[tuple[str | bytes, str | bytes]]
"""The headers of a request, as text or bytes, their names in any spelling."""


def sign(secret: str, webhook_id: str, timestamp: int, body: bytes) -> str:
    """The `webhook-signature` of a body: `v1,` and base64.

    `secret` is `whsec_` and base64 (ValueError if not), `timestamp` the sending time in seconds.
    """
    return _signature(signing_key(secret), f"{webhook_id}.{timestamp}.".encode() + body).decode()


def verify(
    secrets: str | Iterable[str], headers: Headers, body: bytes, *, now: float | None = None
) -> bool:
    """Whether a request is signed with one of the secrets, and not older than five minutes.

    `body` is what was received, byte for byte; `now` is in seconds since 1970.
    """
    now = time.time() if now is None else now
    return genuine_id(signing_keys(secrets), headers, body, now) is not None


def genuine_id(keys: Iterable[bytes], headers: Headers, body: bytes, now: float) -> str | None:
    """The `webhook-id` of a request that is signed and timely; None for any other."""
    webhook_id, timestamp, signatures = _those_of_standard_webhooks(headers)
    if not _ID.fullmatch(webhook_id) or not _TIMESTAMP.fullmatch(timestamp):
        return None
    if abs(int(timestamp) - now) > TOLERANCE_SECONDS:
        return None
    signed = b"%b.%b.%b" % (webhook_id, timestamp, body)
    presented = signatures.split(b" ")
    genuine = False
    for key in keys:
        expected = _signature(key, signed)
        for signature in presented:  # all of them: the time it takes tells nothing
            genuine |= hmac.compare_digest(signature, expected)
    return webhook_id.decode() if genuine else None


def signing_keys(secrets: str | Iterable[str]) -> tuple[bytes, ...]:
    """The keys inside of one secret or several. ValueError if one is none, or there is none."""
    keys = tuple(map(signing_key, [secrets] if isinstance(secrets, str) else secrets))
    if not keys:
        raise ValueError("there is no webhook secret: nothing can be verified")
    return keys


def signing_key(secret: str) -> bytes:
    """The key inside a webhook secret. ValueError if it is none."""
    try:
        key = b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key or not secret.startswith(_PREFIX):
        raise ValueError("a webhook secret is whsec_ and base64; this text is something else")
    return key


def _signature(key: bytes, signed: bytes) -> bytes:
    return b"v1," + b64encode(hmac.digest(key, signed, sha256))


def _those_of_standard_webhooks(headers: Headers) -> list[bytes]:
    """The id, the timestamp and the signatures. What is missing or came twice is empty, which is
    never genuine.
    """
    pairs = headers.items() if hasattr(headers, "items") else headers
    given = [(_bytes(name).lower(), _bytes(value)) for name, value in pairs]
    values = [[value for name, value in given if name == wanted] for wanted in _HEADERS]
    return [found[0] if len(found) == 1 else b"" for found in values]


def _bytes(text: object) -> bytes:
    """As it came over the wire; empty for what cannot have come."""
    if isinstance(text, str):
        return text.encode("latin-1", "replace")
    return text if isinstance(text, bytes) else b""
