"""Opaque tokens that an authorization server is asked about (RFC 7662)."""

import asyncio
from base64 import b64encode
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from urllib.parse import quote_plus

import structlog
from cachetools import TLRUCache
from msgspec import Struct

from app import rawjson
from app.auth.claim_sets import read_claims
from app.auth.documents import Documents, NoDocument
from app.domain import claims
from app.domain.claims import Identity
from app.domain.clock import Clock
from app.errors import Invalid, IssuerUnavailable, Unauthenticated

log = structlog.get_logger(__name__)

MAX_BYTES = 16_384
REMEMBERED_SECONDS = 30.0
"""The longest that a good answer is believed: a revocation takes effect within this time."""
REFUSED_SECONDS = 5.0
_REMEMBERED = 10_000
_INACTIVE = "The access token is not active."


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where tokens are introspected, and as whom."""

    url: str
    client_id: str
    client_secret: str = field(repr=False)
    issuer: str
    """Whose tokens they are, where an answer does not say it."""
    audiences: frozenset[str]
    other_issuers: frozenset[str] | None = None
    """Who else an answer may name as the issuer; `None` is anybody."""


class _Answer(Struct):
    active: bool


@dataclass(frozen=True, slots=True)
class _Verdict:
    """An identity, or why there is none, and until when that is believed."""

    found: Identity | str
    until: float


class Introspection:
    """Asks about tokens; an answer is shared by all who want it, and remembered for a while."""

    def __init__(self, endpoint: Endpoint, documents: Documents, clock: Clock) -> None:
        self._endpoint = endpoint
        self._documents = documents
        self._clock = clock
        names = map(quote_plus, (endpoint.client_id, endpoint.client_secret))
        self._authorization = "Basic " + b64encode(":".join(names).encode()).decode()
        self._verdicts: TLRUCache[bytes, _Verdict] = TLRUCache(
            _REMEMBERED, lambda _key, verdict, _now: verdict.until, timer=self._now
        )
        self._asking: dict[bytes, asyncio.Task[_Verdict]] = {}

    async def identity(self, token: str) -> Identity:
        """Who bears a token. Raises Unauthenticated or IssuerUnavailable."""
        if len(token) > MAX_BYTES:
            raise Unauthenticated(f"An access token may have {MAX_BYTES} bytes.")
        hashed = sha256(token.encode()).digest()
        verdict = self._verdicts.get(hashed) or await self._verdict(hashed, token)
        if isinstance(verdict.found, str):
            raise Unauthenticated(verdict.found)
        return verdict.found

    async def close(self) -> None:
        asking = list(self._asking.values())
        for one in asking:
            one.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def _verdict(self, hashed: bytes, token: str) -> _Verdict:
        asking = self._asking.get(hashed)
        if asking is None:
            asking = self._asking[hashed] = asyncio.create_task(self._ask(hashed, token))
            asking.add_done_callback(partial(self._done, hashed))
        return await asyncio.shield(asking)

    def _done(self, hashed: bytes, asking: asyncio.Task[_Verdict]) -> None:
        del self._asking[hashed]
        if not asking.cancelled():
            asking.exception()  # all who wanted to know may have given up

    async def _ask(self, hashed: bytes, token: str) -> _Verdict:
        form = {"token": token, "token_type_hint": "access_token"}
        try:
            answer = await self._documents.post(self._endpoint.url, form, self._authorization)
            verdict = self._judged(answer)
        except NoDocument as failure:
            log.warning("a token could not be introspected", reason=failure.why)
            raise IssuerUnavailable from None
        except Invalid:
            log.warning("a token could not be introspected", reason="malformed")
            raise IssuerUnavailable from None
        self._verdicts[hashed] = verdict
        return verdict

    def _judged(self, answer: bytes) -> _Verdict:
        """What an answer means. Raises Invalid if it is none."""
        now = self._now()
        if not rawjson.decode_body(answer, _Answer).active:
            return _Verdict(_INACTIVE, now + REFUSED_SECONDS)
        said = read_claims(answer)
        fault = claims.fault(said, self._endpoint.audiences, now, late=0)
        issuer = self._endpoint.issuer if said.issuer is None else said.issuer
        others = self._endpoint.other_issuers
        if fault is None and issuer != self._endpoint.issuer and others is not None:
            fault = None if issuer in others else "The access token is of an unknown issuer."
        if fault is not None:
            return _Verdict(fault, now + REFUSED_SECONDS)
        until = now + REMEMBERED_SECONDS
        return _Verdict(
            claims.identity(issuer, said),
            until if said.expires_at is None else min(until, said.expires_at),
        )

    def _now(self) -> float:
        return self._clock().timestamp()
