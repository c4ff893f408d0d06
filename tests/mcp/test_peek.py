"""Reading the envelope of a message whose body is still arriving."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.mcp.peek import LOOKED_AT, peek

texts = st.text(st.characters(codec="utf-8"), max_size=20)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)
ids = st.integers() | texts
formats: st.SearchStrategy[dict[str, Any]] = st.sampled_from(
    ({}, {"indent": 2}, {"separators": (",", ":")}, {"ensure_ascii": False})
)  # as serialisers differ


@st.composite
def messages(draw: st.DrawFn) -> tuple[dict[str, Any], bytes]:
    """A request with its members in any order, and its text."""
    members = {"jsonrpc": "2.0", "id": draw(ids), "method": draw(texts), "params": draw(values)}
    order = draw(st.permutations(list(members)))
    message = {name: members[name] for name in order}
    return message, json.dumps(message, **draw(formats)).encode()


@given(messages())
def test_a_whole_message_tells_its_method_and_its_id(message: tuple[dict[str, Any], bytes]) -> None:
    members, body = message
    seen = peek(body, complete=True)
    assert seen.settled
    assert seen.method == members["method"]
    assert seen.id is not None
    assert json.loads(seen.id) == members["id"]


@given(messages(), st.integers(min_value=0, max_value=400))
def test_a_part_of_a_message_tells_nothing_wrong(
    message: tuple[dict[str, Any], bytes], length: int
) -> None:
    members, body = message
    seen = peek(body[:length], complete=False)
    assert seen.method in (None, members["method"])
    assert seen.settled == (seen.method is not None)
    assert seen.id is None or json.loads(seen.id) == members["id"]


@given(st.binary(max_size=60) | texts.map(str.encode))
def test_what_is_no_message_names_no_method(body: bytes) -> None:
    assert peek(b"x" + body, complete=True) == (None, None, True)


@pytest.mark.parametrize(
    ("head", "settled"),
    [
        (b'{"id": 7, "result": {"a": 1}, ', True),
        (b'{"id": 7, "error": {}, ', True),
        (b"[{", True),
        (b'{"method": 7, ', True),
        (b" \n[", True),
        (b"no json", True),
        (b"", False),
        (b"  {", False),
        (b'{"params": {"method": "tasks/get"}, ', False),
        (b'{"params": "an \\"open\\" text', False),
    ],
)
def test_looking_ends_when_nothing_more_can_come_of_it(head: bytes, settled: bool) -> None:
    assert peek(head, complete=False).settled is settled


@pytest.mark.parametrize("value", [b"[" * 3000, b'{"a":' * 3000, b'"\\uZZZZ"', b'"\xff"', b"7"])
def test_a_method_that_is_no_text_is_none(value: bytes) -> None:
    assert peek(b'{"method": %b, "id": 1}' % value, complete=True).method is None


def test_a_megabyte_of_escapes_is_looked_at_in_one_pass() -> None:
    """The patterns must not try again what they have seen: this would take hours."""
    head = b'{"params": {"text": "' + b"\\n" * 500_000
    assert not peek(head, complete=False).settled
    assert not peek(b'{"params": {"a": ' + b"[" * 500_000, complete=False).settled


def test_only_the_beginning_of_a_large_body_is_looked_at() -> None:
    body = b'{"a": "' + b"x" * LOOKED_AT + b'", "method": "tools/call", "id": 7}'
    assert peek(body, complete=False) == (None, None, False)
    assert peek(body, complete=True) == ("tools/call", b"7", True)


@pytest.mark.parametrize("rpc_id", [rb'"\q"', b'"a\nb"', b'"\xff"', b"007", b"1.5", b"null", b"{}"])
def test_what_is_no_id_is_not_repeated(rpc_id: bytes) -> None:
    for complete in (False, True):
        assert peek(b'{"id": %b, "method": "x"}' % rpc_id, complete=complete).id is None
