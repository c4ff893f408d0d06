"""The envelope of a JSON-RPC message, read from the beginning of a body that is still arriving.

The gateway passes bodies on without holding them; to know which message it is passing on it needs
two small members of the outermost object, and looks no further than they stand.
"""

import json
import re
from typing import NamedTuple

from msgspec import UNSET, Raw, Struct, UnsetType

from app import rawjson
from app.asgi import StreamedBody
from app.errors import Invalid

_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'  # possessive: an unended text fails in one pass
_NAME = re.compile(rb"[\s,]*(" + _TEXT + rb")\s*:\s*", re.DOTALL)
_SCALAR = re.compile(rb"(" + _TEXT + rb")|[^\s,{}\[\]\"]+(?=[\s,}])", re.DOTALL)
_BRACKET_OR_TEXT = re.compile(rb"[{}\[\]]|" + _TEXT + rb'|"', re.DOTALL)
_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]*)")

LOOKED_AT = 16 * 1024
"""Bytes; to look costs time, for everybody else as well."""


class Peek(NamedTuple):
    """What the beginning of a body tells."""

    method: str | None
    """`None`: it names none (a response, a batch, no JSON), or not yet."""
    id: bytes | None
    """The JSON text of the id, if it stands in what was looked at."""
    settled: bool
    """False: the method may still come."""


class _Envelope(Struct):
    method: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET


def peek(head: bytes, *, complete: bool) -> Peek:
    """Looks into a whole body, or into the first LOOKED_AT bytes of one that is still coming."""
    return _whole(head) if complete else _beginning(head[:LOOKED_AT])


def _whole(body: bytes) -> Peek:
    try:
        envelope = rawjson.decode(body, _Envelope)
    except Invalid:
        return Peek(None, None, settled=True)
    method = b"" if envelope.method is UNSET else bytes(envelope.method)
    rpc_id = b"" if envelope.id is UNSET else bytes(envelope.id)
    return Peek(_text(method), _checked_id(rpc_id), settled=True)


def _beginning(head: bytes) -> Peek:
    found: dict[bytes, bytes] = {}
    at = len(head) - len(head.lstrip())
    is_object = head[at : at + 1] in (b"{", b"")
    if is_object:
        at += 1
        while (member := _NAME.match(head, at)) is not None:
            start = member.end()
            at = _end_of_value(head, start)
            if at < 0:
                break
            found.setdefault(member[1], head[start:at])
    known = found.keys() & {b'"method"', b'"result"', b'"error"'}
    return Peek(
        method=_text(found.get(b'"method"', b"")),
        id=_checked_id(found.get(b'"id"', b"")),
        settled=bool(known) or not is_object,
    )


def message_id(body: StreamedBody) -> bytes | None:
    """The id of the message that a body is, if it stands in what has been received."""
    return peek(body.head, complete=body.complete).id


def request_id(body: StreamedBody) -> bytes | None:
    """The same of a request only: the id of a response is not for errors to repeat."""
    seen = peek(body.head, complete=body.complete)
    return None if seen.method is None else seen.id


def _end_of_value(head: bytes, start: int) -> int:
    """Where the value that begins at `start` ends, or -1 if that is not there yet."""
    if head[start : start + 1] not in (b"{", b"["):
        scalar = _SCALAR.match(head, start)
        return -1 if scalar is None else scalar.end()
    depth, at = 0, start
    while (token := _BRACKET_OR_TEXT.search(head, at)) is not None:
        at = token.end()
        if token[0] in (b"{", b"["):
            depth += 1
        elif token[0] in (b"}", b"]"):
            depth -= 1
            if depth == 0:
                return at
        elif token[0] == b'"':  # a text that has not ended
            return -1
    return -1


def _text(value: bytes) -> str | None:
    if value[:1] != b'"':
        return None
    try:
        text: str = json.loads(value)
    except ValueError:  # an escape that is none, or no UTF-8
        return None
    return text


def _checked_id(value: bytes) -> bytes | None:
    if _INTEGER.fullmatch(value) or _text(value) is not None:
        return value
    return None
