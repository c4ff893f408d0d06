"""The keys of one issuer: fetched when they are needed, and kept while it is away."""

import asyncio
import math

import structlog
from msgspec import Struct
from prometheus_client import Counter

from app import rawjson
from app.auth.documents import SECONDS, Documents, NoDocument
from app.auth.public_keys import NoKeySet, PublicKey, read_key_set
from app.domain.clock import Clock
from app.domain.issuers import Issuer, endpoint_fault, is_loopback, metadata_urls
from app.errors import Invalid, IssuerUnavailable

log = structlog.get_logger(__name__)

REST_SECONDS = 10.0
"""An issuer is asked at most this often, however many unknown keys tokens name."""
FRESH_SECONDS = 600.0
"""Older keys are fetched again, while those at hand are used."""
STALE_SECONDS = 3600.0
"""Keys as old as that are used only if no newer ones can be had."""


class _Metadata(Struct):
    issuer: str
    jwks_uri: str


class IssuerKeys:
    """`fetches` counts by issuer and outcome."""

    def __init__(
        self, issuer: Issuer, documents: Documents, clock: Clock, fetches: Counter
    ) -> None:
        self._issuer = issuer
        self._documents = documents
        self._clock = clock
        self._fetches = fetches
        self._keys: list[PublicKey] = []
        self._fetched = self._asked = -math.inf
        self._why_not: str | None = None
        self._fetching: asyncio.Task[None] | None = None

    async def fitting(self, kid: str | None, algorithm: str) -> list[PublicKey]:
        """The keys that may have signed with this algorithm, under this name if one is given.

        None if the issuer has none; raises IssuerUnavailable if it cannot be asked.
        """
        age = self._now() - self._fetched
        if age > STALE_SECONDS:
            await self._refresh()
        elif age > FRESH_SECONDS:
            self._begin()
        found = self._find(kid, algorithm)
        if not found:
            await self._refresh()
            found = self._find(kid, algorithm)
        if not found and self._why_not is not None:
            raise IssuerUnavailable
        return found

    async def count(self) -> int:
        """How many usable keys the issuer has now. Raises NoDocument."""
        return len(await self._fetch())

    async def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)

    def _now(self) -> float:
        return self._clock().timestamp()

    def _find(self, kid: str | None, algorithm: str) -> list[PublicKey]:
        return [
            key
            for key in self._keys
            if algorithm in key.algorithms and (kid is None or key.kid == kid)
        ]

    async def _refresh(self) -> None:
        """Fetches the keys, together with all who want them now; not again too soon."""
        fetching = self._begin()
        if fetching is not None:
            await asyncio.shield(fetching)

    def _begin(self) -> asyncio.Task[None] | None:
        if self._fetching is not None and not self._fetching.done():
            return self._fetching
        now = self._now()
        if 0 <= now - self._asked < REST_SECONDS:
            return None
        self._asked = now
        self._fetching = asyncio.create_task(self._replace())
        return self._fetching

    async def _replace(self) -> None:
        try:
            self._keys = await self._fetch()
        except NoDocument as failure:
            self._why_not = failure.why
            log.warning("no keys of an issuer", issuer=self._issuer.name, reason=failure.why)
        except Exception:
            self._why_not = "fault"
            log.exception("the keys of an issuer could not be read", issuer=self._issuer.name)
        else:
            self._why_not, self._fetched = None, self._now()
        self._fetches.labels(self._issuer.name, self._why_not or "ok").inc()

    async def _fetch(self) -> list[PublicKey]:
        try:
            async with asyncio.timeout(SECONDS):
                url = self._issuer.jwks_uri or await self._discover()
                return read_key_set(await self._documents.get(url))
        except TimeoutError:
            raise NoDocument("timeout") from None
        except NoKeySet:
            raise NoDocument("malformed") from None

    async def _discover(self) -> str:
        """Where the keys are, by the issuer's own metadata. Raises NoDocument."""
        why = ""
        for url in metadata_urls(self._issuer.name):
            try:
                return self._jwks_uri(await self._documents.get(url))
            except NoDocument as failure:
                why = why or failure.why
        raise NoDocument(why)

    def _jwks_uri(self, document: bytes) -> str:
        try:
            metadata = rawjson.decode_body(document, _Metadata)
        except Invalid:
            raise NoDocument("malformed") from None
        if metadata.issuer != self._issuer.name:
            raise NoDocument("wrong_issuer")
        outside = is_loopback(metadata.jwks_uri) and not is_loopback(self._issuer.name)
        if outside or endpoint_fault(metadata.jwks_uri) is not None:
            raise NoDocument("bad_jwks_uri")
        return metadata.jwks_uri
