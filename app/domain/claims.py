"""What a token says about its bearer, and the rules by which it is believed."""

from dataclasses import dataclass
from typing import NamedTuple

from app.domain.owners import Owner, oauth_owner

LEEWAY_SECONDS = 30
"""By how much the clock of an issuer may differ from ours."""
MAX_NAME_BYTES = 1024
"""For a subject, and for a client id: they travel in handles, which are headers."""


class Identity(NamedTuple):
    """Who a client is, and what its credential may be used for."""

    owner: Owner
    scopes: frozenset[str] | None = None
    """What was granted; `None` for credentials that know no scopes."""


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims that count. Times are seconds since 1970."""

    issuer: str | None
    subject: str | None
    client_id: str | None
    audiences: frozenset[str] | None
    scopes: frozenset[str]
    expires_at: float | None
    not_before: float | None
    issued_at: float | None


def fault(
    claims: Claims, audiences: frozenset[str], now: float, *, late: float = LEEWAY_SECONDS
) -> str | None:
    """Why such a token does not count now for these audiences; never with a value of it.

    `late` is for how many seconds after its end it still does.
    """
    if claims.expires_at is not None and now >= claims.expires_at + late:
        return "The access token has expired."
    starts = (claims.not_before, claims.issued_at)
    if any(start is not None and now < start - LEEWAY_SECONDS for start in starts):
        return "The access token is not valid yet."
    if claims.audiences is not None and audiences.isdisjoint(claims.audiences):
        return "The access token was issued for another audience."
    if not claims.subject:
        return "The access token names no subject."
    return name_fault(claims.subject) or name_fault(claims.client_id or "")


def name_fault(name: str) -> str | None:
    """What is wrong with a subject or a client id."""
    if any("\ud800" <= char <= "\udfff" for char in name):
        return "A subject and a client id must be plain text."
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"A subject and a client id may have {MAX_NAME_BYTES} bytes."
    return None


def identity(issuer: str, claims: Claims) -> Identity:
    """Whom claims without a fault are about."""
    return Identity(oauth_owner(issuer, claims.subject or "", claims.client_id), claims.scopes)
