"""What becomes of a tool server's capabilities on their way through the gateway."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.mcp.advertising import _offer_extension, edited_events, edited_message
from tests.support.service import TASKS

objects = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3)
capabilities = st.fixed_dictionaries({}, optional={"tools": objects, "tasks": objects})


def discovery(offered: dict[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "result": {"capabilities": offered, "ttlMs": 1}}


@given(capabilities)
def test_the_extension_is_added_and_nothing_else_changes(offered: dict[str, Any]) -> None:
    edited = json.loads(edited_message(json.dumps(discovery(offered)).encode(), _offer_extension))
    kept = {name: value for name, value in offered.items() if name != "tasks"}
    assert edited == discovery({**kept, "extensions": {TASKS: {}}})


@given(st.binary(max_size=40) | st.just(b'{"result": {"capabilities": [1]}}'))
def test_what_is_no_such_answer_comes_back_as_it_is(message: bytes) -> None:
    assert edited_message(message, _offer_extension) == message


@pytest.mark.parametrize(
    "message",
    [
        b'{"result": {"capabilities": {}, "\\ud83d": 1}}',
        b'{"result": {"capabilities": {}, "a": "\xff", "\\ud83d": 1}}',
        b'{"result": {"capabilities": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}}",
    ],
    ids=["name-is-no-text", "no-utf-8", "too-deep"],
)
def test_what_cannot_be_written_again_comes_back_as_it_is(message: bytes) -> None:
    assert edited_message(message, _offer_extension) == message


def test_an_extension_with_settings_becomes_the_plain_one() -> None:
    """Clients read a value with members as an extension that they do not know."""
    offered = {"extensions": {TASKS: {"list": True}, "x/y": {}}}
    edited = json.loads(edited_message(json.dumps(discovery(offered)).encode(), _offer_extension))
    assert edited == discovery({"extensions": {TASKS: {}, "x/y": {}}})


@pytest.mark.parametrize("end", ["\r\n", "\n", "\r"])
async def test_an_event_is_found_however_the_stream_is_cut(end: str) -> None:
    message = json.dumps(discovery({}), indent=1)
    data = end.join(f"data: {line}" for line in message.splitlines())
    stream = f": ping{end}{end}id: 1{end}{data}{end}{end}data: other\n\nrest".encode()
    for cut in range(1, len(stream)):
        edited = b"".join(
            [event async for event in edited_events(_in_two(stream, cut), _offer_extension)]
        )
        ping, first, second, rest = "\n".join(edited.decode().splitlines()).split("\n\n")
        name, *lines = first.splitlines()
        text = "\n".join(line.removeprefix("data: ") for line in lines)
        assert json.loads(text) == discovery({"extensions": {TASKS: {}}})
        assert (ping, name, second.strip(), rest) == (": ping", "id: 1", "data: other", "rest")


async def _in_two(stream: bytes, cut: int) -> AsyncIterator[bytes]:
    yield stream[:cut]
    yield stream[cut:]


async def test_what_never_becomes_an_event_is_not_kept() -> None:
    """Nobody can make the broker hold or search more than one long event."""
    kilobyte = b"x" * 1024

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(30_000):
            yield kilobyte

    largest, total = 0, 0
    async for part in edited_events(endless(), _offer_extension):
        largest, total = max(largest, len(part)), total + len(part)
    assert total == 30_000 * 1024
    assert largest < 2 * 1024 * 1024
