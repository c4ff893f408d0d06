"""Standard Webhooks 1.0, on bytes: what was received is what was signed.

signed = webhook-id ‖ "." ‖ webhook-timestamp ‖ "." ‖ body
header = "v1," ‖ base64( HMAC-SHA256(secret, signed) )       several, separated by spaces
"""

import binascii
import hmac
import re
from base64 import b64decode, b64encode
from collections.abc import Iterable
from datetime import datetime
from hashlib import sha256

TOLERANCE_SECONDS = 300
SECRET_PREFIX = "whsec_"  # noqa: S105 - the prefix of a secret, not one
_INTEGER = re.compile(r"[0-9]{1,15}", re.ASCII)


def decode_secret(secret: str) -> bytes:
    """The key inside `whsec_<base64>`. ValueError if it is not one."""
    try:
        key = b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except binascii.Error:
        raise ValueError("a webhook secret is whsec_ and base64") from None
    if not secret.startswith(SECRET_PREFIX) or len(key) < 24:
        raise ValueError("a webhook secret is whsec_ and base64 of at least 24 bytes")
    return key


def encode_secret(key: bytes) -> str:
    return SECRET_PREFIX + b64encode(key).decode("ascii")


def sign(key: bytes, webhook_id: str, timestamp: int, body: bytes) -> str:
    """One `v1,…` signature."""
    signed = f"{webhook_id}.{timestamp}.".encode() + body
    return "v1," + b64encode(hmac.digest(key, signed, sha256)).decode("ascii")


def timely(timestamp: str, now: datetime) -> bool:
    """Whether a `webhook-timestamp` is a whole number of seconds within the window around `now`."""
    if _INTEGER.fullmatch(timestamp) is None:
        return False
    return abs(int(timestamp) - now.timestamp()) <= TOLERANCE_SECONDS


def verify(
    keys: Iterable[bytes], webhook_id: bytes, timestamp: bytes, signatures: bytes, body: bytes
) -> bool:
    """Whether any `v1` signature of the list is right under any of the keys.

    Unknown versions are skipped. The header values are the bytes that came in.
    """
    presented = [
        signature[3:] for signature in signatures.split(b" ") if signature.startswith(b"v1,")
    ]
    signed = webhook_id + b"." + timestamp + b"." + body
    genuine = False
    for key in keys:
        expected = b64encode(hmac.digest(key, signed, sha256))
        for signature in presented:
            genuine |= hmac.compare_digest(signature, expected)
    return genuine
