"""Signals to tool servers: one POST to a URL that somebody else chose, and what came of it.

Such a URL may name, or come to resolve to, an address that only this process can reach. So every
attempt resolves the host anew, judges all its addresses, and connects to the judged ones only;
what is really connected to is judged once more.
"""

import asyncio
import socket
import ssl
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from io import BytesIO
from ipaddress import IPv4Address, ip_address

import aiohappyeyeballs
import aiohttp
from aiohttp import AddrInfoType
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from app.domain.addresses import Reach, reach, url_fault

_AUTOMATIC = ("accept", "accept-encoding", "content-type", "user-agent")
_THREADS = 32
_RETRY_AFTER_CHARS = 64
_HEAD_START_SECONDS = 0.25
"""How long an address of a host may take before the next one is tried beside it."""


class Kind(StrEnum):
    """What became of one attempt."""

    DELIVERED = "delivered"
    GONE = "gone"  # 410: the server wants no more of them
    REDIRECT = "redirect"
    STATUS = "status"  # any other status
    TIMEOUT = "timeout"
    UNREACHABLE = "unreachable"  # no address, or no connection
    TLS = "tls"
    BROKEN = "broken"  # broken off, or no HTTP
    FAULT = "fault"
    """Of ours."""
    FORBIDDEN = "forbidden"  # nothing may be sent to this URL


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one attempt. `detail` is for the operator, and has no secret in it."""

    kind: Kind
    status: int | None = None
    retry_after: str | None = None
    detail: str | None = None


class _Forbidden(OSError):
    """Nothing may be sent there; says what the operator can do.

    An OSError, because other errors of a socket factory get lost on their way through aiohttp.
    """


class Callbacks:
    """Sends signals. Each attempt has `seconds` in all, from the name to the answer's status.

    HTTPS to public addresses, and if `private_allowed`, HTTP and HTTPS to private ones. Link-local
    addresses are refused even then, since the metadata services of clouds have them.
    Certificates are verified against the system's authorities, or those of SSL_CERT_FILE.
    """

    def __init__(self, *, private_allowed: bool, seconds: float = 15.0) -> None:
        self._private_allowed = private_allowed
        self._seconds = seconds
        self._names = _Names()
        self._tls = ssl.create_default_context()
        self._tls.set_alpn_protocols(["http/1.1"])

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Outcome:
        """One attempt on a connection of its own. Raises nothing."""
        try:
            async with asyncio.timeout(self._seconds):
                return await self._post(url, headers, body)
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            return _failure(error)

    async def look(self, url: str) -> Outcome | None:
        """What keeps signals from being sent there; `None` if it takes connections."""
        try:
            async with asyncio.timeout(self._seconds):
                gate, places = await self._places(url)
                connected = await aiohappyeyeballs.start_connection(
                    places, happy_eyeballs_delay=_HEAD_START_SECONDS, socket_factory=gate.socket
                )
                connected.close()
        except (OSError, ValueError, RuntimeError) as error:
            return _failure(error)
        return None

    async def close(self) -> None:
        """Ends the threads; to be called when no attempt is under way."""
        self._names.close()

    async def _post(self, url: str, headers: Mapping[str, str], body: bytes) -> Outcome:
        gate, places = await self._places(url)
        connector = aiohttp.TCPConnector(
            resolver=_Resolved(places),
            socket_factory=gate.socket,
            ssl=self._tls,
            force_close=True,  # tells the server that nothing more will come
            happy_eyeballs_delay=_HEAD_START_SECONDS,
        )
        # No session outlives its attempt: a stale connection would make another one fail.
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            trust_env=False,
        ) as session:
            response = await session.post(
                URL(url, encoded=True),
                data=BytesIO(body),  # which may be large
                headers=headers,
                skip_auto_headers=_AUTOMATIC,
                allow_redirects=False,
            )
            response.close()  # its body is nobody's business
            return _outcome(response)

    async def _places(self, url: str) -> tuple["_Gate", list[AddrInfoType]]:
        """Where the URL leads now, as far as something may be sent there."""
        if fault := url_fault(url):
            raise _Forbidden(fault)
        parts = URL(url, encoded=True)
        host, port = parts.raw_host or "", parts.port or 0
        if host.replace(".", "").isdigit():
            IPv4Address(host)  # or it is one like 127.1, which not everything reads alike
        gate = _Gate(parts.scheme != "https", self._private_allowed, self._seconds)
        return gate, gate.admitted(await self._names.resolve(host, port))


@dataclass(frozen=True, slots=True)
class _Gate:
    """Which addresses one attempt may connect to."""

    plain: bool
    private_allowed: bool
    seconds: float

    def admitted(self, places: list[AddrInfoType]) -> list[AddrInfoType]:
        """Those places that may be connected to, at least one. Raises _Forbidden."""
        faults = [self._fault(place) for place in places]
        admitted = [place for place, fault in zip(places, faults, strict=True) if fault is None]
        if not admitted:
            raise _Forbidden(faults[0])
        return admitted

    def socket(self, place: AddrInfoType) -> socket.socket:
        """A socket for what is really connected to: aiohttp does not ask for literal addresses."""
        if fault := self._fault(place):
            raise _Forbidden(fault)
        family, kind, protocol, *_ = place
        made = socket.socket(family, kind, protocol)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            # Else what a server never reads would be kept for as long as it likes.
            milliseconds = int(self.seconds * 1000)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        return made

    def _fault(self, place: AddrInfoType) -> str | None:
        match reach(ip_address(place[4][0])):
            case Reach.PUBLIC if self.plain:
                return "The URL must begin with https://."
            case Reach.PRIVATE if not self.private_allowed:
                return (
                    "The URL leads to a private address. Register a public one over https://, "
                    "or set TASKBROKER_ALLOW_PRIVATE_CALLBACKS."
                )
            case Reach.NEVER:
                return "The URL leads to a link-local, metadata or otherwise special address."
        return None


class _Names:
    """Resolves names in threads of its own, since a look-up may hang much longer than an attempt.

    Attempts share a look-up of the same name that is under way: however many there are, a name
    whose servers hang takes one thread only.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "callback-names")
        self._under_way: dict[tuple[str, int], asyncio.Future[list[AddrInfoType]]] = {}

    async def resolve(self, host: str, port: int) -> list[AddrInfoType]:
        look_up = self._under_way.get((host, port))
        if look_up is None:
            loop = asyncio.get_running_loop()
            look_up = loop.run_in_executor(self._threads, _get_address_info, host, port)
            self._under_way[host, port] = look_up
            look_up.add_done_callback(partial(self._done, (host, port)))
        await asyncio.wait([look_up])  # which goes on if this one is given up
        return look_up.result()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, name: tuple[str, int], look_up: asyncio.Future[list[AddrInfoType]]) -> None:
        del self._under_way[name]
        if not look_up.cancelled():
            look_up.exception()  # all who wanted to know may have given up


class _Resolved(AbstractResolver):
    """Tells aiohttp what has been resolved and judged, so that it looks nothing up again."""

    def __init__(self, places: list[AddrInfoType]) -> None:
        self._places = places

    async def resolve(
        self,
        host: str,
        port: int = 0,
        family: socket.AddressFamily = socket.AF_UNSPEC,  # noqa: ARG002 - all were judged
    ) -> list[ResolveResult]:
        return [
            ResolveResult(
                hostname=host, host=address[0], port=port, family=kind, proto=protocol, flags=0
            )
            for kind, _, protocol, _, address in self._places
        ]

    async def close(self) -> None:
        """Has nothing to close."""


def _get_address_info(host: str, port: int) -> list[AddrInfoType]:
    return [
        (family, kind, protocol, name, address)
        for family, kind, protocol, name, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )
    ]


def _outcome(response: aiohttp.ClientResponse) -> Outcome:
    status = response.status
    if 200 <= status < 300:
        return Outcome(Kind.DELIVERED, status)
    if 300 <= status < 400:
        return Outcome(Kind.REDIRECT, status)
    if status == 410:
        return Outcome(Kind.GONE, status)
    return Outcome(Kind.STATUS, status, _retry_after(response))


def _retry_after(response: aiohttp.ClientResponse) -> str | None:
    given = response.headers.get("retry-after")
    if response.status not in (429, 503) or not given or not given.isascii():
        return None  # what is no ASCII means nothing, and might not be storable
    return given[:_RETRY_AFTER_CHARS]


def _failure(error: Exception) -> Outcome:
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    match cause:
        case _Forbidden():
            return Outcome(Kind.FORBIDDEN, detail=str(cause))
        case ssl.SSLError():
            return Outcome(Kind.TLS, detail=getattr(cause, "verify_message", None) or cause.reason)
        case TimeoutError():
            return Outcome(Kind.TIMEOUT)
        case socket.gaierror():
            return Outcome(Kind.UNREACHABLE, detail="The host name of the URL does not resolve.")
        case ValueError():
            return Outcome(Kind.FORBIDDEN, detail="The host of the URL is none that can be called.")
        case aiohttp.ClientError():
            return Outcome(Kind.BROKEN)
        case _:
            return Outcome(Kind.UNREACHABLE)
