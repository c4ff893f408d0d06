r"""JSON at the edges: decoded once, and what is only carried stays the text that came in.

A *shape* is a flat msgspec Struct whose members are scalars or `Raw`, or `dict[str, Raw]`; what
is inside a `Raw` is decoded by the next call. msgspec refuses unpaired surrogate escapes
(`"\ud83d"`, which JavaScript senders produce when they cut a string inside an emoji) although
JSON allows them; a document that has one takes a slower way through the standard library.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from app.errors import Fault, Invalid

T = TypeVar("T")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
_SPACE = re.compile(r"[ \t\n\r]*")
_UNPAIRED = "A text has an unpaired surrogate where plain text is needed."
_MISSING = re.compile(r"Object missing required field `(.+)`")
_LOCATED = re.compile(r"(?P<detail>.*) - at `\$(?P<path>.*)`", re.DOTALL)


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}


class Malformed(Invalid):
    """The body is not valid JSON."""


class WrongShape(Invalid):
    """The body is JSON, but a member is missing or has the wrong type."""


def decode_body(body: bytes, shape: type[T]) -> T:
    """The document that a peer sent. Raises Malformed or WrongShape."""
    try:
        body.decode()  # what msgspec skips over it does not check
    except UnicodeDecodeError:
        raise Malformed("The body is not UTF-8.") from None
    return decode(body, shape)


def decode(document: bytes | Raw, shape: type[T], at: str = "") -> T:
    """A document, or a raw member of one, as `shape`. `at`: the JSON pointer of its root."""
    try:
        decoded: T = _decoder(shape).decode(document)
    except msgspec.ValidationError as error:
        _check_syntax(bytes(document))  # msgspec stops at the first wrong type
        raise WrongShape(faults=[_fault(error, at)]) from None
    except RecursionError:
        raise Malformed("The JSON is nested too deeply.") from None
    except msgspec.DecodeError as error:
        if _SURROGATE_ESCAPE.search(document):
            return _decode_slowly(bytes(document).decode(), shape, at)
        raise Malformed(f"The body is not valid JSON: {error}.") from None
    return decoded


def is_object(raw: Raw) -> bool:
    return memoryview(raw)[0] == ord("{")


def is_array(raw: Raw) -> bool:
    return memoryview(raw)[0] == ord("[")


def is_text(raw: Raw) -> bool:
    return memoryview(raw)[0] == ord('"')


def text(raw: Raw) -> str:
    """A raw member as the text that came in."""
    return bytes(raw).decode()


def storable(value: str) -> bool:
    """Whether Postgres can keep it as text: no NUL, no unpaired surrogate."""
    return "\0" not in value and not any("\ud800" <= char <= "\udfff" for char in value)


def _check_syntax(document: bytes) -> None:
    try:
        _strict.decode(document.decode())
    except RecursionError:
        raise Malformed("The JSON is nested too deeply.") from None
    except ValueError as error:
        raise Malformed(f"The body is not valid JSON: {error}.") from None


def _decoder(shape: Any) -> msgspec.json.Decoder[Any]:
    decoder = _decoders.get(shape)
    if decoder is None:
        decoder = _decoders[shape] = msgspec.json.Decoder(shape)
    return decoder


def _decode_slowly(document: str, shape: type[T], at: str) -> T:
    if document.lstrip(" \t\n\r")[:1] != "{":
        _check_syntax(document.encode())
        raise WrongShape(_UNPAIRED)
    try:
        found = list(members(document))
    except RecursionError:
        raise Malformed("The JSON is nested too deeply.") from None
    except ValueError as error:
        raise Malformed(f"The body is not valid JSON: {error}.") from None
    if not issubclass(shape, msgspec.Struct):
        return msgspec.convert({name: Raw(raw.encode()) for name, raw in found}, shape)
    return _fill(shape, found, at)


def _fill(shape: type[T], given: list[tuple[str, str]], at: str) -> T:
    fields = {field.encode_name: field for field in msgspec.structs.fields(shape)}  # type: ignore[arg-type]
    carried = {name: field.name for name, field in fields.items() if _may_be_raw(field.type)}
    outline = ",".join(
        f"{json.dumps(name)}:{'0' if name in carried else raw}"
        for name, raw in given
        if name in fields  # any other is skipped unread
    )
    try:
        filled: T = _decoder(shape).decode(f"{{{outline}}}")
    except msgspec.ValidationError as error:
        raise WrongShape(faults=[_fault(error, at)]) from None
    except msgspec.DecodeError:
        raise WrongShape(_UNPAIRED) from None
    for name, raw in given:
        if name in carried:
            msgspec.structs.force_setattr(filled, carried[name], Raw(raw.encode()))  # type: ignore[arg-type]
    return filled


def _may_be_raw(annotation: object) -> bool:
    return Raw in (annotation, *getattr(annotation, "__args__", ()))


def members(document: str) -> Iterator[tuple[str, str]]:
    """The members of a JSON object with their values as they stand in the text."""
    at = _skip(document, 0, "{")
    if document[at : at + 1] == "}":
        _end(document, at + 1)
        return
    while True:
        if document[at : at + 1] != '"':
            raise ValueError(f"expected a member name at character {at}")
        name, after_name = _strict.raw_decode(document, at)
        start = _skip(document, after_name, ":")
        _, stop = _strict.raw_decode(document, start)
        yield name, document[start:stop]
        at = _space(document, stop)
        if document[at : at + 1] == "}":
            _end(document, at + 1)
            return
        at = _skip(document, at, ",")


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_strict = json.JSONDecoder(parse_constant=_no_constant, parse_int=str, parse_float=str)


def _space(document: str, at: int) -> int:
    match = _SPACE.match(document, at)
    assert match is not None  # it matches the empty text too
    return match.end()


def _skip(document: str, at: int, mark: str) -> int:
    at = _space(document, at)
    if document[at : at + 1] != mark:
        raise ValueError(f"expected {mark!r} at character {at}")
    return _space(document, at + 1)


def _end(document: str, at: int) -> None:
    if _space(document, at) != len(document):
        raise ValueError(f"trailing characters at character {at}")


def _fault(error: msgspec.ValidationError, at: str) -> Fault:
    located = _LOCATED.fullmatch(str(error))
    if located is None:
        missing = _MISSING.fullmatch(str(error))
        return Fault(at if missing is None else f"{at}/{missing[1]}", str(error))
    steps = re.sub(r"\[(\d+|\.\.\.)\]", r"/\1", located["path"]).replace(".", "/")
    return Fault(at + steps, located["detail"])
