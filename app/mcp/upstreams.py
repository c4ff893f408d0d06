"""Connections to the tool servers behind the gateway, kept apart for each."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import aiohttp
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.tracing import Trace
from multidict import CIMultiDict
from yarl import URL

from app.domain.backends import Backend
from app.errors import BrokerError
from app.mcp.forwarding import RawHeaders

CONNECT_SECONDS = 10.0
IDLE_SECONDS = (
    3.0  # less than servers keep an idle connection, so that they do not close ours first
)
_HEADER_BYTES = 65_536
_AUTOMATIC = ("accept", "accept-encoding", "content-type", "user-agent")


class BadGateway(BrokerError):
    """The tool server gave no answer that could be passed on."""

    status = 502
    outcome = "broken"


class Unreachable(BadGateway):
    """The tool server cannot be reached."""

    outcome = "unreachable"


class Broken(BadGateway):
    """The tool server broke the connection off, or does not speak HTTP."""


class NoAnswer(BadGateway):
    """The tool server did not answer in time."""

    status = 504
    outcome = "timeout"


class Redirected(BadGateway):
    """The tool server answered with a redirect; its operator must register where it really is."""

    outcome = "redirect"


class AnswerTooLarge(BadGateway):
    """The tool server's answer is larger than this gateway passes on."""

    outcome = "too_large"


class Loop(BadGateway):
    """The address of the tool server leads back to this gateway; its operator must correct it."""

    status = 508
    outcome = "loop"


class Disabled(BadGateway):
    """The operator has disabled this tool server."""

    status = 503
    outcome = "disabled"


class Upstreams:
    """Calls tool servers, which have `answer_seconds` to begin an answer, and to go on with one."""

    def __init__(self, answer_seconds: float) -> None:
        self._answer_seconds = answer_seconds
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    async def ask(
        self,
        backend: Backend,
        method: str,
        url: str,
        headers: RawHeaders,
        body: bytes | AsyncIterator[bytes] | None,
        *,
        plain: object = None,
    ) -> aiohttp.ClientResponse:
        """The head of the answer; the caller closes it. Raises BadGateway.

        If `plain`, the body of the answer is decompressed.
        """
        with self._failures():
            async with asyncio.timeout(self._answer_seconds) as deadline:
                return await self._session(backend).request(
                    method,
                    URL(url, encoded=True),
                    data=self._timed(body, deadline) if isinstance(body, AsyncIterator) else body,
                    headers=CIMultiDict([(n.decode(), v.decode()) for n, v in headers]),
                    skip_auto_headers=_AUTOMATIC,
                    allow_redirects=False,
                    auto_decompress=plain is not None,
                )

    async def _timed(
        self, body: AsyncIterator[bytes], deadline: asyncio.Timeout
    ) -> AsyncIterator[bytes]:
        """A body that is still being sent: its sender's time is not the tool server's."""
        async for part in body:
            _extend(deadline, self._answer_seconds)
            yield part
            _extend(deadline, None)
        _extend(deadline, self._answer_seconds)

    async def read(
        self, response: aiohttp.ClientResponse, *, may_be_silent: bool
    ) -> AsyncIterator[bytes]:
        """The body of an answer as it comes. Raises BadGateway."""
        seconds = None if may_be_silent else self._answer_seconds
        while True:
            with self._failures():
                async with asyncio.timeout(seconds):
                    chunk = await response.content.readany()
            if not chunk:
                return
            yield chunk

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except aiohttp.ConnectionTimeoutError:
            raise NoAnswer("The tool server could not be reached in time.") from None
        except TimeoutError:
            raise NoAnswer(
                f"The tool server did not answer within {self._answer_seconds:g} seconds."
            ) from None
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL, UnicodeError) as error:
            raise Unreachable from error
        except (aiohttp.ClientError, OSError) as error:
            raise Broken from error

    def _session(self, backend: Backend) -> aiohttp.ClientSession:
        session = self._sessions.get(backend.id)
        if session is None:
            session = self._sessions[backend.id] = aiohttp.ClientSession(
                # Each connection belongs to one of a client's, and those are bounded elsewhere.
                connector=_Connector(
                    limit=0, keepalive_timeout=IDLE_SECONDS, socket_factory=_socket
                ),
                timeout=aiohttp.ClientTimeout(connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),  # a cookie belongs to one client
                auto_decompress=False,
                max_line_size=_HEADER_BYTES,
                max_field_size=_HEADER_BYTES,
            )
        return session


class _Connector(aiohttp.TCPConnector):
    """Uses no connection again on which something has come that nobody had asked for."""

    async def _get(
        self, key: ConnectionKey, traces: list[Trace]
    ) -> aiohttp.connector.Connection | None:
        while (idle := await super()._get(key, traces)) is not None:
            if idle.protocol is not None and not idle.protocol.should_close:
                return idle
            idle.close()
        return None


def _extend(deadline: asyncio.Timeout, seconds: float | None) -> None:
    with suppress(RuntimeError):  # an answer may come before the end of its request
        when = None if seconds is None else asyncio.get_running_loop().time() + seconds
        deadline.reschedule(when)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices within minutes that its peer is gone; a stream may be silent longer."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
