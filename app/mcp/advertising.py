"""What a tool server says it can do, corrected by what the gateway in front of it does.

`server/discover`  the tasks extension is there, whoever the tool server is, and there is no
                   `capabilities.tasks`, which belongs to the era before (SEP-2663)
`initialize`       `capabilities.tasks` is what is served here, for the version that has tasks
"""

import json
import re
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec
from msgspec import Raw

from app import rawjson
from app.broker.context import Caller
from app.domain.backends import Backend
from app.errors import Invalid
from app.views import legacy, modern

_Object = dict[str, Raw]
_BOM = b"\xef\xbb\xbf"
_END_OF_EVENT = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LONGEST_EVENT = 1024 * 1024
"""Longer ones are no answers to what is edited; they pass."""


def _offer_extension(result: _Object) -> None:
    capabilities = _object_or_empty(result.get("capabilities"))
    extensions = _object_or_empty(capabilities.get("extensions"))
    extensions[modern.EXTENSION] = Raw(b"{}")
    capabilities["extensions"] = Raw(msgspec.json.encode(extensions))
    capabilities.pop("tasks", None)
    result["capabilities"] = Raw(msgspec.json.encode(capabilities))


def _set_tasks(result: _Object, offered: dict[str, Any] | None) -> None:
    capabilities = _object_or_empty(result.get("capabilities"))
    capabilities.pop("tasks", None)
    has_tasks = result.get("protocolVersion") == Raw(json.dumps(legacy.VERSION).encode())
    if offered is not None and has_tasks:
        capabilities["tasks"] = Raw(msgspec.json.encode(offered))
    result["capabilities"] = Raw(msgspec.json.encode(capabilities))


Edit = Callable[[_Object], None]
"""Corrects the result of an answer."""


class Advertising:
    """What to correct. `legacy`: tasks of 2025-11-25 are served here."""

    def __init__(self, *, legacy: bool) -> None:
        self._legacy = legacy

    def edit_of(self, method: str, backend: Backend, caller: Caller) -> Edit | None:
        """What to correct in the answer to a method."""
        if method == "server/discover":
            return _offer_extension
        if method == "initialize" and self._legacy:
            # A list must have every task that can be read, and some are kept elsewhere.
            listable = not (caller.anonymous or backend.terms.forward_unknown_tasks)
            return partial(_set_tasks, offered=legacy.capability(listable=listable))
        if method == "initialize" and not backend.terms.forward_unknown_tasks:
            return partial(_set_tasks, offered=None)
        return None


def edited_message(message: bytes, edit: Edit) -> bytes:
    """A JSON-RPC answer with its capabilities edited; anything else comes back as it is."""
    try:
        envelope = rawjson.decode_body(message, _Object)
        result = _object(envelope["result"])
        edit(result)
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
