"""Connections to the tool servers behind the gateway: one pool for each, so that none can use up
what another needs.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from app.asgi import ClientGone
from app.domain.backends import Backend
from app.errors import BrokerError

CONNECTIONS = 500
"""At once, for one tool server; whoever comes then waits as for a slow connect."""
CONNECT_SECONDS = 10.0
IDLE_SECONDS = (
    3.0  # less than servers keep an idle connection, so that they do not close ours first
)
_HEADER_BYTES = 65_536
_AUTOMATIC = ("accept", "accept-encoding", "content-type", "user-agent")

RawHeaders = Sequence[tuple[bytes, bytes]]


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


class Call(NamedTuple):
    """A request to a tool server. Header names are in lower case."""

    method: str
    url: str
    headers: RawHeaders
    body: bytes | AsyncIterator[bytes] | None


class Upstreams:
    """Calls tool servers. `answer_seconds` bounds the time to the head of an answer."""

    def __init__(self, answer_seconds: float) -> None:
        self.answer_seconds = answer_seconds
        self._sessions: dict[int, aiohttp.ClientSession] = {}

    @asynccontextmanager
    async def call(self, backend: Backend, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """The head of the answer; its body is read inside the block, and may be left unread.

        Raises Unreachable, Broken or NoAnswer, also for what happens while the body is read.
        """
        response = None
        try:
            async with asyncio.timeout(self.answer_seconds):
                response = await self._session(backend).request(
                    call.method,
                    URL(call.url, encoded=True),
                    data=call.body,
                    headers=CIMultiDict([(n.decode(), v.decode()) for n, v in call.headers]),
                    skip_auto_headers=_AUTOMATIC,
                    allow_redirects=False,
                )
            yield response
        except aiohttp.ConnectionTimeoutError:
            raise NoAnswer("The tool server could not be reached in time.") from None
        except TimeoutError:
            raise NoAnswer(
                f"The tool server did not answer within {self.answer_seconds:g} seconds."
            ) from None
        except aiohttp.ClientConnectorError as error:
            raise Unreachable from error
        except (aiohttp.ClientError, OSError) as error:
            if isinstance(error.__cause__, (BrokerError, ClientGone)):  # from the client's body
                raise error.__cause__ from None
            raise Broken from error
        finally:
            if response is not None:
                response.close()

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()

    def _session(self, backend: Backend) -> aiohttp.ClientSession:
        session = self._sessions.get(backend.id)
        if session is None:
            session = self._sessions[backend.id] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=CONNECTIONS,
                    keepalive_timeout=IDLE_SECONDS,
                    socket_factory=_socket,
                ),
                timeout=aiohttp.ClientTimeout(connect=CONNECT_SECONDS),
                cookie_jar=aiohttp.DummyCookieJar(),  # a cookie belongs to one client
                auto_decompress=False,
                max_line_size=_HEADER_BYTES,
                max_field_size=_HEADER_BYTES,
            )
        return session


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices within minutes that its peer is gone; a stream may be silent longer."""
    family, kind, protocol, *_ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return made
