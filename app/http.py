"""HTTP/1.1 as uvicorn speaks it by httptools, without two ways to slip something past us.

A wish to upgrade (`Upgrade: h2c`, which some clients send by default) is ignored, as RFC 9110,
7.8 allows: the parser beneath would take the body of such a request for the next request. The
trailers of a chunked body are dropped: uvicorn would add them to the headers, after those have
been judged.

What is not sent yet stays here, where it is bounded and can be given up, and not in the kernel,
which would take megabytes for each reader that does not read.
"""

import asyncio
import socket
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from app.asgi import ABORT, Scope

_UNSENT_BYTES = 65_536


class HttpProtocol(HttpToolsProtocol):
    _in_head = True
    _missing = 0
    """Bytes of a body that the parser does not know to be one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):  # on Linux
            connection: socket.socket = transport.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self.parser.should_upgrade():
            self._missing = _body_length(self.headers)
        super().on_headers_complete()
        cast("Scope", self.scope)[ABORT] = self.transport.abort

    def on_message_complete(self) -> None:
        if not self._missing:
            super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        data = self._take_body(data)
        while data:
            self._unset_keepalive_if_required()
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as wish:
                data = self._take_body(data[wish.args[0] :])
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    def _take_body(self, data: bytes) -> bytes:
        """Hands on the body behind a wish to upgrade; what comes after it."""
        if not self._missing or not data:
            return data
        body, rest = data[: self._missing], data[self._missing :]
        self._missing -= len(body)
        self.on_body(body)
        if not self._missing:
            self.on_message_complete()
        return rest


def _body_length(headers: list[tuple[bytes, bytes]]) -> int:
    given: dict[bytes, Any] = dict(headers)
    if b"transfer-encoding" in given:
        raise ValueError("a chunked body behind a wish to upgrade has no end that we could see")
    return int(given.get(b"content-length", b"0"))
