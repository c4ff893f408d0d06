"""Standard Webhooks 1.0: HMAC-SHA256 over `id.timestamp.body`."""

import binascii
import hmac
from base64 import b64decode, b64encode
from hashlib import sha256

_PREFIX = "whsec_"


def sign(secret: str, webhook_id: str, timestamp: int, body: bytes) -> str:
    """The `webhook-signature` of a body: `v1,` and base64.

    `secret` is `whsec_` and base64 (ValueError if not), `timestamp` the sending time in seconds.
    """
    signed = f"{webhook_id}.{timestamp}.".encode() + body
    return "v1," + b64encode(hmac.digest(signing_key(secret), signed, sha256)).decode()


def signing_key(secret: str) -> bytes:
    """The key inside a webhook secret. ValueError if it is none."""
    try:
        key = b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not key or not secret.startswith(_PREFIX):
        raise ValueError("a webhook secret is whsec_ and base64; this text is something else")
    return key
