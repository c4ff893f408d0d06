r"""What is only carried comes back as the text that came in, and what is not JSON is refused.

The strategies build JSON *text*, not values: `1.0`, `\u0041` and a doubled member are lost as
soon as a document is a Python object. Other tests use them too.
"""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec import UNSET, Raw, Struct, UnsetType

from app import rawjson
from app.errors import Fault, Invalid
from app.rawjson import Malformed, WrongShape

# --- JSON texts -------------------------------------------------------------------------------

ODD_NUMBERS = ("0", "-0", "-0.0", "1.0", "1E+5", "1e-7", "1e999", "9007199254740993", "7" * 40)
ESCAPES = (r"\"", r"\\", r"\/", r"\b", r"\f", r"\n", r"\r", r"\t", r"\u0000", r"\u002F", r"\u00E9")
SURROGATES = (r"\ud83d\ude00", r"\uD83D", r"\udfff", r"\ude00\ud83d")

_spaces = st.text(" \t\n\r", max_size=2)
_numbers = st.sampled_from(ODD_NUMBERS) | st.from_regex(
    r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,9})?([eE][+-]?[0-9]{1,3})?",
    fullmatch=True,
    alphabet="0123456789.eE+-",
)
_plain = st.characters(min_codepoint=0x20, exclude_categories=["Cs"], exclude_characters='"\\')


def _quoted(pieces: list[str]) -> str:
    return f'"{"".join(pieces)}"'


def json_strings(*, surrogates: bool = True) -> st.SearchStrategy[str]:
    """Strings in quotes, with every form of escape."""
    escapes = ESCAPES + (SURROGATES if surrogates else SURROGATES[:1])
    return st.lists(_plain | st.sampled_from(escapes), max_size=8).map(_quoted)


@st.composite
def _arrays(draw: st.DrawFn, values: st.SearchStrategy[str]) -> str:
    items = draw(st.lists(st.tuples(_spaces, values, _spaces).map("".join), max_size=4))
    return f"[{','.join(items) or draw(_spaces)}]"


@st.composite
def json_objects(
    draw: st.DrawFn, names: st.SearchStrategy[str], values: st.SearchStrategy[str]
) -> str:
    """Objects whose names may come twice, in any order."""
    member = st.tuples(_spaces, names, _spaces, st.just(":"), _spaces, values, _spaces)
    members = draw(st.lists(member.map("".join), max_size=5))
    return f"{{{','.join(members) or draw(_spaces)}}}"


def json_texts(*, surrogates: bool = True) -> st.SearchStrategy[str]:
    """Any JSON value, without space around it."""
    strings = json_strings(surrogates=surrogates)
    names = st.sampled_from(['"a"', '"b"', r'"\u0061"', '""']) | strings
    return st.recursive(
        st.sampled_from(["null", "true", "false"]) | _numbers | strings,
        lambda inner: _arrays(inner) | json_objects(names, inner),
        max_leaves=12,
    )


def json_documents(*, surrogates: bool = True) -> st.SearchStrategy[str]:
    """An object with any members, such as a result."""
    strings = json_strings(surrogates=surrogates)
    return json_objects(strings, json_texts(surrogates=surrogates))


# --- what is carried ---------------------------------------------------------------------------


class Parcel(Struct):
    content: Raw
    label: str = ""


@given(json_texts(), _spaces, _spaces)
def test_a_carried_member_comes_out_byte_for_byte(content: str, before: str, after: str) -> None:
    body = f'{{"label":"x",{before}"content"{after}:{before}{content}{after}}}'.encode()

    parcel = rawjson.decode_body(body, Parcel)

    assert rawjson.text(parcel.content) == content
    assert parcel.label == "x"


@given(json_documents())
def test_a_map_of_carried_members_has_each_value_byte_for_byte(document: str) -> None:
    members = rawjson.decode_body(document.encode(), dict[str, Raw])

    pairs = json.loads(document, object_pairs_hook=dict, parse_int=str, parse_float=str)
    assert members.keys() == pairs.keys()
    for name, raw in members.items():
        text = rawjson.text(raw)
        assert text in document
        assert _value(text) == pairs[name]


def _value(text: str) -> Any:
    return json.loads(text, parse_int=str, parse_float=str)


@pytest.mark.parametrize("content", [r'"\ud83d"', r'["cut \uD83D"]', r'{"\udfff":{}}', '"whole"'])
def test_of_a_member_that_comes_twice_the_last_one_counts(content: str) -> None:
    body = f'{{"content":1,"label":"first","content":{content},"label":"last"}}'.encode()

    parcel = rawjson.decode_body(body, Parcel)

    assert rawjson.text(parcel.content) == content
    assert parcel.label == "last"


def test_a_member_name_may_be_escaped() -> None:
    parcel = rawjson.decode_body(rb'{"\u0063ontent": 1.0, "x": "\ud83d"}', Parcel)
    assert rawjson.text(parcel.content) == "1.0"


def test_a_surrogate_in_a_member_that_nobody_reads_harms_nothing() -> None:
    body = rb'{"\ud83d": 1, "content": {}, "more": ["\ud83d", {"\ude00": "\ud83d"}]}'
    assert rawjson.is_object(rawjson.decode_body(body, Parcel).content)


@pytest.mark.parametrize(
    ("document", "shape"),
    [(rb'{"content": 1, "label": "\ud83d"}', Parcel), (rb'"\ud83d"', str), (rb' "\udfff" ', str)],
)
def test_a_text_that_is_read_must_be_whole(document: bytes, shape: type[Any]) -> None:
    with pytest.raises(WrongShape, match="unpaired surrogate"):
        rawjson.decode_body(document, shape)


@pytest.mark.parametrize(
    "document", [rb'"\ud83d" x', rb'"\ud83d"\u0020', rb'"\ud83d', rb'"\ud83q"']
)
def test_a_text_that_is_no_json_is_malformed_with_a_surrogate_too(document: bytes) -> None:
    with pytest.raises(Malformed):
        rawjson.decode_body(document, str)


def test_a_fault_names_the_place_of_a_wrong_type() -> None:
    with pytest.raises(WrongShape) as refused:
        rawjson.decode(Raw(b'{"content": 1, "label": 2}'), Parcel, at="/data")
    assert refused.value.faults == (Fault("/data/label", "Expected `str`, got `int`"),)


# --- what is accepted --------------------------------------------------------------------------


def _no_constant(name: str) -> object:
    raise ValueError(name)


def _is_a_json_object(body: bytes) -> bool:
    """The strict reference: the standard library, on strict UTF-8, without NaN and its like."""
    try:
        document = body.decode("utf-8", "strict")
        value = json.loads(
            document, parse_constant=_no_constant, parse_int=str, parse_float=str
        )  # texts: Python refuses to convert 4301 digits
    except ValueError:
        return False
    return isinstance(value, dict)


class Empty(Struct):
    """Takes any object."""


def _accepts(body: bytes, shape: type[Any]) -> bool:
    try:
        rawjson.decode_body(body, shape)
    except (Malformed, WrongShape):  # anything else fails the test
        return False
    return True


def _agrees_with_the_reference(body: bytes) -> None:
    expected = _is_a_json_object(body)
    assert _accepts(body, Empty) == expected
    assert _accepts(body, dict[str, Raw]) == expected
    if b"content" not in body:
        assert _accepts(b'{"content":' + body + b"}", Parcel) == _is_json(body)


def _is_json(body: bytes) -> bool:
    return _is_a_json_object(b'{"x":' + body + b"}")


@given(_spaces, json_documents() | json_texts(), _spaces)
def test_every_object_is_accepted_and_nothing_else(before: str, document: str, after: str) -> None:
    _agrees_with_the_reference((before + document + after).encode())


_EDITS = st.lists(
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 3),
        st.binary(max_size=2)
        | st.sampled_from([b'"', b"\\", b",", b":", b"{", b"}", b"[", b"]", b"\\ud83d", b"NaN"])
        | st.sampled_from([b"\x00", b"\x0b", b"\x0c", b"\xa0", b"\xef\xbb\xbf", b"+", b".", b"0"]),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200)
@given(json_documents(), _EDITS)
@example('{0:null,"a":"\\ud83d"}', [])
@example('{null:1,"a":"\\ud83d"}', [])
def test_a_damaged_document_is_accepted_only_if_it_is_json_still(
    document: str, edits: list[tuple[float, int, bytes]]
) -> None:
    body = document.encode()
    for place, removed, inserted in edits:
        at = round(place * len(body))
        body = body[:at] + inserted + body[at + removed :]
    _agrees_with_the_reference(body)


@settings(max_examples=400)
@given(st.binary(max_size=40) | st.text('{}[]":,\\u0dEe+-. \t\n', max_size=20).map(str.encode))
@example(b"")
@example(b"\xef\xbb\xbf{}")
@example(b'{"a":"\xed\xa0\x80"}')
@example(b'{"a":' + b"9" * 5000 + b"}")
@example('{"a":１}'.encode())
def test_random_bytes_are_accepted_only_if_they_are_json(body: bytes) -> None:
    _agrees_with_the_reference(body)


@pytest.mark.parametrize("shape", [Empty, Parcel, dict[str, Raw]])
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"[" * 4_000_000, id="arrays"),
        pytest.param(b'{"a":' * 800_000, id="objects"),
        pytest.param(b"[" * 100_000 + b"]" * 100_000, id="closed arrays"),
        pytest.param(b'{"content":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="carried"),
        pytest.param(b'{"label":' + b"[" * 100_000 + b"]" * 100_000 + b"}", id="of a wrong type"),
        pytest.param(b'{"x":' + b'{"a":' * 100_000 + b"0" + b"}" * 100_001, id="of no interest"),
        pytest.param(rb'{"x":"\ud83d","content":' + b"[" * 1_000_000, id="after a surrogate"),
        pytest.param(b'{"content":' + b"[" * 100_000 + rb'"\ud83d"', id="around a surrogate"),
    ],
)
def test_deep_nesting_is_refused(body: bytes, shape: type[Any]) -> None:
    with pytest.raises(Malformed):
        rawjson.decode_body(body, shape)

    assert rawjson.decode_body(b'{"content":[[[]]]}', shape)  # and the process lives


# --- two ways, one answer ----------------------------------------------------------------------


class Form(Struct, rename="camel", kw_only=True):
    """A shape of every kind of member that the broker reads."""

    text: str | UnsetType = UNSET
    number: int | UnsetType = UNSET
    nullable_number: int | None | UnsetType = UNSET
    truth: bool | UnsetType = UNSET
    carried: Raw | UnsetType = UNSET
    needed: Raw


def _outcome(body: bytes) -> Any:
    """Everything that a caller can tell apart, but for the wording."""
    try:
        form = rawjson.decode_body(body, Form)
    except Invalid as refused:
        return type(refused), refused.faults
    values = msgspec.structs.asdict(form)
    return {name: bytes(v) if isinstance(v, Raw) else v for name, v in values.items()}


_form_names = st.sampled_from(
    ['"text"', '"number"', '"nullableNumber"', '"truth"', '"carried"', '"needed"', '"other"']
)
_simple = st.sampled_from(["1", "-0", "null", "true", '"x"', r'"\u0000é"', "1.5", "{}", "[1]"])


@settings(max_examples=200)
@given(json_objects(_form_names, _simple | json_texts(surrogates=False)), st.booleans())
@example('{"needed":1,"text":1,"text":"x"}', False)
@example('{"needed":1,"text":1,"other":[}', True)
def test_a_surrogate_elsewhere_in_the_document_changes_nothing(document: str, first: bool) -> None:
    """A document with an unpaired surrogate is decoded another way; it must not show."""
    inner = document[1:-1]
    cut = r'"other":"\ud83d"'
    parts = [cut, inner] if first else [inner, cut]
    with_a_surrogate = f"{{{','.join(part for part in parts if part.strip())}}}"

    assert _outcome(with_a_surrogate.encode()) == _outcome(document.encode())


@given(json_strings())
def test_only_what_postgres_can_keep_is_storable(text: str) -> None:
    value = json.loads(text)
    try:
        keepable = b"\0" not in value.encode()
    except UnicodeEncodeError:
        keepable = False
    assert rawjson.storable(value) == keepable
