"""What changes on a message that a proxy passes on: the headers between two hops, and nothing else.

(RFC 9110, 7.6: "Message Forwarding"; RFC 7239: "Forwarded".)
"""

import hmac
from collections.abc import Iterable
from hashlib import sha256
from ipaddress import ip_address
from urllib.parse import urlsplit

from app.asgi import Scope
from app.errors import Invalid

RawHeaders = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
     b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)  # fmt: skip
_OURS = frozenset(
    (b"host", b"expect", b"task-owner", b"forwarded", b"x-forwarded-for", b"x-forwarded-host",
     b"x-forwarded-port", b"x-forwarded-prefix", b"x-forwarded-proto")
)  # fmt: skip
"""What the gateway says itself; from outside nobody may claim it."""


_ABOUT_THE_BYTES = frozenset(
    (b"content-digest", b"content-encoding", b"content-length", b"content-md5", b"digest",
     b"etag", b"repr-digest")
)  # fmt: skip


def pseudonym(key: bytes) -> bytes:
    """What this installation calls itself in `Via` (RFC 9110, 7.6.3), to know itself again."""
    return b"taskbroker-" + hmac.digest(key, b"taskbroker/v1/via", sha256)[:6].hex().encode()


def upstream_url(mcp_url: str, query: bytes) -> str:
    """The address of a tool server, with the query that the client's request came with."""
    if not query:
        return mcp_url
    return f"{mcp_url}{'&' if urlsplit(mcp_url).query else '?'}{query.decode('ascii', 'ignore')}"


def request_headers(scope: Scope, handle: str, pseudonym: bytes, *, plain: bool) -> RawHeaders:
    """The headers of a client's request as the tool server gets them. Raises Invalid.

    `plain` asks for an answer that is not compressed.
    """
    given: RawHeaders = scope["headers"]
    dropped = _OURS | {b"accept-encoding"} if plain else _OURS
    kept = [
        (name, value)
        for name, value in _end_to_end(given)
        if name.replace(b"_", b"-") not in dropped  # to a CGI or WSGI server they are the same
    ]
    if plain:
        kept.append((b"accept-encoding", b"identity"))
    kept += [(b"via", b"1.1 " + pseudonym), (b"task-owner", handle.encode())]
    headers = [*kept, *_about_the_client(scope)]
    for name, value in headers:
        _check_text(name, value)
    return headers


def response_headers(given: Iterable[tuple[bytes, bytes]], *, edited: bool) -> RawHeaders:
    """The headers of a tool server's answer as the client gets them.

    The server that we run in says the date. What describes the bytes of a body is not true of
    an edited one.
    """
    dropped = {b"date"} | (_ABOUT_THE_BYTES if edited else set())
    lower = [(name.lower(), value) for name, value in given]
    return [(name, value) for name, value in _end_to_end(lower) if name not in dropped]


def _end_to_end(given: RawHeaders) -> RawHeaders:
    listed = b",".join(value for name, value in given if name == b"connection")
    named = {option.strip().lower() for option in listed.split(b",")}
    return [
        (name, value.strip(b" \t"))  # what surrounds a value is no part of it (RFC 9110, 5.5)
        for name, value in given
        if name not in _HOP_BY_HOP and name not in named
    ]


def _about_the_client(scope: Scope) -> RawHeaders:
    client = scope.get("client")
    address = _address(client[0]) if client else "unknown"
    host = next((value for name, value in scope["headers"] if name == b"host"), b"")
    node = f'"[{address}]"' if ":" in address else address
    quoted = host.replace(b"\\", b"").replace(b'"', b"")
    scheme: str = scope["scheme"]
    return [
        (b"forwarded", b'for=%b;host="%b";proto=%b' % (node.encode(), quoted, scheme.encode())),
        (b"x-forwarded-for", address.encode()),
        (b"x-forwarded-host", host),
        (b"x-forwarded-proto", scheme.encode()),
    ]


def _address(host: str) -> str:
    try:
        return str(ip_address(host))
    except ValueError:  # a socket without one, or what a proxy made of it
        return "unknown"


def _check_text(name: bytes, value: bytes) -> None:
    try:
        value.decode()
    except UnicodeDecodeError:
        raise Invalid(f"The header {name.decode('ascii', 'replace')} is not UTF-8.") from None
