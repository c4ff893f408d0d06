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
_END_OF_EVENT = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_DATA = re.compile(rb"^data:[ ]?([^\r\n]*)(?:\r\n|\r|\n)?", re.MULTILINE)


def _offer_tasks(capabilities: _Object) -> None:
    extensions = _object(capabilities.get("extensions", Raw(b"{}")))
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
        envelope = rawjson.decode(message, _Object)
        result = _object(envelope["result"])
        capabilities = _object(result["capabilities"])
        edit(capabilities)
    except (Invalid, KeyError):
        return message
    result["capabilities"] = Raw(msgspec.json.encode(capabilities))
    envelope["result"] = Raw(msgspec.json.encode(result))
    return msgspec.json.encode(envelope)


async def edited_json(chunks: AsyncIterator[bytes], edit: Edit) -> AsyncIterator[bytes]:
    """A body that is one JSON message."""
    yield edited_message(b"".join([chunk async for chunk in chunks]), edit)


async def edited_events(chunks: AsyncIterator[bytes], edit: Edit) -> AsyncIterator[bytes]:
    """A stream of server-sent events, each with one JSON message."""
    pending = b""
    async for chunk in chunks:
        pending += chunk
        while (end := _END_OF_EVENT.search(pending)) is not None:
            event, pending = pending[: end.end()], pending[end.end() :]
            yield _edited_event(event, edit)
    if pending:
        yield pending


def _edited_event(event: bytes, edit: Edit) -> bytes:
    data = b"\n".join(_DATA.findall(event))
    edited = edited_message(data, edit)
    if edited == data:
        return event
    others = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    data_lines = [b"data: " + line for line in edited.splitlines()]
    return b"\n".join([*others, *data_lines, b"", b""])


def _object(raw: Raw) -> _Object:
    return rawjson.decode(raw, _Object)
