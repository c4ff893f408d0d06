"""Errors as RFC 9457 problem documents; the HTTP status comes from one table."""

import json

from app.asgi import Answer
from app.errors import (
    BrokerError,
    Conflict,
    Expired,
    Fault,
    Forbidden,
    Invalid,
    IssuerUnavailable,
    NotFound,
    Refused,
    StorageUnavailable,
    TooLarge,
    TooSlow,
    Unauthenticated,
)

MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = 1
_TITLES: dict[type[BrokerError], tuple[int, str, str]] = {
    Invalid: (400, "invalid", "The request cannot be read"),
    Unauthenticated: (401, "unauthenticated", "A valid credential is needed"),
    Forbidden: (403, "forbidden", "Not allowed"),
    NotFound: (404, "not-found", "Not found"),
    Conflict: (409, "conflict", "The name is taken"),
    Expired: (410, "expired", "The task has expired"),
    TooSlow: (408, "too-slow", "The body did not come in time"),
    TooLarge: (413, "too-large", "The body is too large"),
    Refused: (422, "refused", "The input does not fit"),
    StorageUnavailable: (503, "unavailable", "The database cannot be reached"),
    IssuerUnavailable: (503, "unavailable", "The credential cannot be checked"),
}


def problem(error: BrokerError) -> Answer:
    """The answer to a request that raised `error`."""
    for kind, (status, slug, title) in _TITLES.items():
        if isinstance(error, kind):
            return document(status, slug, title, error.detail, error.faults)
    return document(500, "internal", "Internal error", "The broker failed; its log says why.")


def document(
    status: int, slug: str, title: str, detail: str, faults: tuple[Fault, ...] = ()
) -> Answer:
    members: dict[str, object] = {
        "type": f"urn:taskbroker:problem:{slug}",
        "title": title,
        "status": status,
        "detail": detail,
    }
    if faults:
        members["errors"] = [{"pointer": f.pointer, "detail": f.detail} for f in faults]
    headers: tuple[tuple[bytes, bytes], ...] = ()
    if status == 401:
        headers = ((b"www-authenticate", b"Bearer"),)
    elif status == 503:
        headers = ((b"retry-after", b"%d" % RETRY_SECONDS),)
    return Answer(status, json.dumps(members).encode(), MEDIA_TYPE.encode(), headers)
