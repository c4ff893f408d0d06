"""What a tool server says it can do, corrected by what the gateway in front of it does.

`server/discover`  the tasks extension is there, whoever the tool server is, and there is no
                   `capabilities.tasks`, which belongs to the era before (SEP-2663)
`initialize`       no `capabilities.tasks`: a task of that era could not be read through here
"""

import re
from collections.abc import AsyncIterator, Callable

import msgspec
from msgspec import Raw

from app import rawjson
from app.domain.backends import Backend
from app.errors import Invalid
from app.views.modern import EXTENSION

_Object = dict[str, Raw]
_BOM = b"\xef\xbb\xbf"
_END_OF_EVENT = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LONGEST_EVENT = 1024 * 1024
"""Longer ones are no answers to what is edited; they pass."""


def _offer_tasks(capabilities: _Object) -> None:
    extensions = _object_or_empty(capabilities.get("extensions"))
    extensions[EXTENSION] = Raw(b"{}")
    capabilities["extensions"] = Raw(msgspec.json.encode(extensions))
    capabilities.pop("tasks", None)


def _withhold_tasks(capabilities: _Object) -> None:
    capabilities.pop("tasks", None)


Edit = Callable[[_Object], None]


def edit_of(method: str, backend: Backend) -> Edit | None:
    """What to correct in the answer to a method."""
    if method == "server/discover":
        return _offer_tasks
    if method == "initialize" and not backend.terms.forward_unknown_tasks:
        return _withhold_tasks
    return None


def edited_message(message: bytes, edit: Edit) -> bytes:
    """A JSON-RPC answer with its capabilities edited; anything else comes back as it is."""
    try:
        envelope = rawjson.decode_body(message, _Object)
        result = _object(envelope["result"])
        capabilities = _object_or_empty(result.get("capabilities"))
        edit(capabilities)
        result["capabilities"] = Raw(msgspec.json.encode(capabilities))
        envelope["result"] = Raw(msgspec.json.encode(result))
        return msgspec.json.encode(envelope)
    except (Invalid, KeyError, UnicodeError):  # a name that is no text can be carried, not written
        return message


async def edited_events(chunks: AsyncIterator[bytes], edit: Edit) -> AsyncIterator[bytes]:
    """A stream of server-sent events, each with one JSON message, up to the one that is edited."""
    pending, searched, done = b"", 0, False
    async for chunk in chunks:
        pending += chunk
        while not done and (end := _END_OF_EVENT.search(pending, searched)) is not None:
            event, pending, searched = pending[: end.end()], pending[end.end() :], 0
            edited = _edited_event(event, edit)
            done = edited is not event
            yield edited
        searched = max(0, len(pending) - 3)  # an end of two lines may be cut anywhere
        if done or len(pending) > _LONGEST_EVENT:
            yield pending
            pending, done = b"", True
    if pending:
        yield pending


def _edited_event(event: bytes, edit: Edit) -> bytes:
    lines = event.removeprefix(_BOM).splitlines()
    data = b"\n".join(line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:"))
    edited = edited_message(data, edit)
    if edited == data:
        return event
    others = [line for line in lines if line and not line.startswith(b"data:")]
    data_lines = [b"data: " + line for line in edited.splitlines()]
    return b"\n".join([*others, *data_lines, b"", b""])


def _object(raw: Raw) -> _Object:
    return rawjson.decode(raw, _Object)


def _object_or_empty(raw: Raw | None) -> _Object:
    return {} if raw is None or bytes(raw) == b"null" else _object(raw)
