"""OAuth access tokens that are JSON Web Tokens (RFC 9068), verified with their issuer's keys."""

import binascii
import re
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from hashlib import sha256

import jwt
from cachetools import TLRUCache
from msgspec import UNSET, Raw, Struct, UnsetType

from app import rawjson
from app.auth.claim_sets import read_claims
from app.auth.issuer_keys import IssuerKeys
from app.auth.public_keys import ALGORITHMS, PublicKey
from app.domain import claims
from app.domain.claims import LEEWAY_SECONDS, Identity
from app.domain.clock import Clock
from app.domain.issuers import Issuer
from app.errors import Invalid, Unauthenticated

MAX_BYTES = 16_384
REMEMBERED_SECONDS = 60.0
"""A signature is not verified again for so long, so that who polls pays for it once."""
_REMEMBERED = 10_000

_SHAPE = re.compile(r"([A-Za-z0-9_-]+)\.([A-Za-z0-9_-]*)\.[A-Za-z0-9_-]*", re.ASCII)
_TYPES = frozenset(("at+jwt", "application/at+jwt", "jwt", "application/jwt"))
_NOT_OURS = "The access token is not of an issuer that is accepted here."
_NOT_VERIFIED = "The signature of the access token cannot be verified."


class _Header(Struct):
    alg: str
    kid: str | UnsetType = UNSET
    typ: str | UnsetType = UNSET
    crit: Raw | UnsetType = UNSET
    b64: Raw | UnsetType = UNSET


class AccessTokens:
    def __init__(self, issuers: Mapping[Issuer, IssuerKeys], clock: Clock) -> None:
        self._issuers = {issuer.name: (issuer, keys) for issuer, keys in issuers.items()}
        self._clock = clock
        self._verified: TLRUCache[bytes, tuple[Identity, float]] = TLRUCache(
            _REMEMBERED, lambda _key, value, _now: value[1], timer=self._now
        )

    async def identity(self, token: str) -> Identity | None:
        """Who bears a token; `None` if it is no JWT.

        Raises Unauthenticated for one that is and does not count, and IssuerUnavailable.
        """
        hashed = sha256(token.encode()).digest()
        remembered = self._verified.get(hashed)
        if remembered is not None:
            return remembered[0]
        parts = _SHAPE.fullmatch(token)
        if parts is None:
            return None
        if len(token) > MAX_BYTES:
            raise Unauthenticated(f"An access token may have {MAX_BYTES} bytes.")
        header = _decoded(parts[1])
        if not header.lstrip().startswith(b"{"):
            return None
        identity, until = await self._verify(token, header, _decoded(parts[2]))
        self._verified[hashed] = identity, min(until, self._now() + REMEMBERED_SECONDS)
        return identity

    async def _verify(self, token: str, header: bytes, payload: bytes) -> tuple[Identity, float]:
        """Who bears a token, and until when. Nothing that it says is believed before the end."""
        kid, algorithm = _read_header(header)
        try:
            claimed = read_claims(payload)
        except Invalid:
            raise Unauthenticated("The claims of the access token are malformed.") from None
        issuer, keys = self._issuers.get(claimed.issuer or "", (None, None))
        if issuer is None or keys is None:
            raise Unauthenticated(_NOT_OURS)
        candidates = await keys.fitting(kid, algorithm)
        if not any(_signed_by(token, key, algorithm) for key in candidates):
            raise Unauthenticated(_NOT_VERIFIED)
        if claimed.expires_at is None or claimed.audiences is None:
            raise Unauthenticated("The access token must have the claims exp and aud.")
        fault = claims.fault(claimed, issuer.audiences, self._now())
        if fault is not None:
            raise Unauthenticated(fault)
        return claims.identity(issuer.name, claimed), claimed.expires_at + LEEWAY_SECONDS

    def _now(self) -> float:
        return self._clock().timestamp()


def _decoded(part: str) -> bytes:
    """A base64url text as bytes; empty if it is none."""
    try:
        return urlsafe_b64decode(part + "=" * (-len(part) % 4))
    except binascii.Error:
        return b""


def _read_header(raw: bytes) -> tuple[str | None, str]:
    """The key's name and the algorithm. Raises Unauthenticated."""
    try:
        header = rawjson.decode_body(raw, _Header)
    except Invalid:
        raise Unauthenticated("The header of the access token is malformed.") from None
    if header.alg not in ALGORITHMS:
        raise Unauthenticated("The access token is not signed as it must be here.")
    if header.typ is not UNSET and header.typ.lower() not in _TYPES:
        raise Unauthenticated("This is a token of another type, no access token.")
    if header.crit is not UNSET or header.b64 is not UNSET:
        raise Unauthenticated("The access token needs an extension that is not known here.")
    return None if header.kid is UNSET else header.kid, header.alg


_signatures = jwt.PyJWS(algorithms=sorted(ALGORITHMS))


def _signed_by(token: str, key: PublicKey, algorithm: str) -> bool:
    try:
        _signatures.decode(token, key.key, algorithms=[algorithm])
    except jwt.PyJWTError:
        return False
    return True
