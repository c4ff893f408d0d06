"""JSON-RPC 2.0 envelopes as MCP restricts them: one request or notification, ids never null."""

import json
import re
from typing import NamedTuple

from msgspec import UNSET, Raw, Struct, UnsetType

from app import rawjson
from app.rawjson import Malformed, WrongShape

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
HEADER_MISMATCH = -32020
MISSING_CLIENT_CAPABILITY = -32021
UNSUPPORTED_VERSION = -32022

_TWO = Raw(b'"2.0"')
_INTEGER = re.compile(rb"-?(?:0|[1-9][0-9]*)")


class RpcFailure(Exception):
    """A JSON-RPC error answer. `data` is JSON text; `status` the HTTP status that goes with it."""

    def __init__(self, code: int, message: str, status: int, data: str | None = None) -> None:
        self.code = code
        self.message = message
        self.status = status
        self.data = data
        super().__init__(message)


class StoredFailure(RpcFailure):
    """A JSON-RPC error as a tool server wrote it: `text`, which nobody here reads."""

    def __init__(self, text: str) -> None:
        super().__init__(INTERNAL_ERROR, "", 200)
        self.text = text


class Request(NamedTuple):
    """`id` is the JSON text that came in, so that it goes back with its type and digits."""

    id: bytes
    method: str
    params: Raw | None


class Notification(NamedTuple):
    method: str
    params: Raw | None


class Response(NamedTuple):
    """A client's answer to a request of the broker's. `result` is `None` if it is an error."""

    id: bytes
    result: str | None


class _Envelope(Struct):
    jsonrpc: Raw | UnsetType = UNSET
    method: Raw | UnsetType = UNSET
    id: Raw | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _Plain(Struct):
    """The envelope of a well-formed request; everything else takes the way that explains."""

    jsonrpc: str
    method: str
    id: Raw | UnsetType = UNSET
    params: Raw | UnsetType = UNSET


def parse(body: bytes) -> Request | Notification | Response:
    """The message in an HTTP body. Raises BadMessage."""
    try:
        envelope = rawjson.decode_body(body, _Plain)
    except Malformed as error:
        raise BadMessage(PARSE_ERROR, f"Parse error: {error.detail}", None) from None
    except WrongShape:
        return _response(body)
    rpc_id = _id(envelope.id)
    if envelope.jsonrpc != "2.0":
        raise BadMessage(INVALID_REQUEST, 'Invalid request: "jsonrpc" must be "2.0"', rpc_id)
    if envelope.params is UNSET:
        params = None
    elif rawjson.is_object(envelope.params):
        params = envelope.params
    else:
        raise BadMessage(INVALID_PARAMS, 'Invalid params: "params" must be an object', rpc_id)
    if rpc_id is None:
        return Notification(envelope.method, params)
    return Request(rpc_id, envelope.method, params)


class BadMessage(RpcFailure):
    """The body is not a message that MCP knows. `id` is the message's, if it could be read."""

    def __init__(self, code: int, message: str, rpc_id: bytes | None) -> None:
        super().__init__(code, message, 400)
        self.id = rpc_id


def _id(raw: Raw | UnsetType) -> bytes | None:
    """A request's id as JSON text, `None` for a notification."""
    if raw is UNSET:
        return None
    text = bytes(raw)
    if text[:1] == b'"' or _INTEGER.fullmatch(text):
        return text
    raise BadMessage(INVALID_REQUEST, 'Invalid request: "id" must be a string or an integer', None)


def _response(body: bytes) -> Response:
    """A body that is no request as a response. Raises BadMessage, which says what is wrong."""
    if body.lstrip()[:1] == b"[":
        raise BadMessage(
            INVALID_REQUEST, "Invalid request: send one message, batches are not part of MCP", None
        )
    try:
        envelope = rawjson.decode(body, _Envelope)
    except WrongShape:
        raise BadMessage(
            INVALID_REQUEST, "Invalid request: the body must be an object", None
        ) from None
    rpc_id = _id(envelope.id)
    if envelope.method is UNSET and rpc_id is not None and envelope.jsonrpc == _TWO:
        if envelope.error is UNSET and envelope.result is not UNSET:
            if rawjson.is_object(envelope.result):
                return Response(rpc_id, rawjson.text(envelope.result))
        elif envelope.error is not UNSET and envelope.result is UNSET:
            return Response(rpc_id, None)
    raise BadMessage(
        INVALID_REQUEST,
        'Invalid request: "jsonrpc" and "method" must be present, and texts',
        rpc_id,
    )


def result_body(rpc_id: bytes, result: str) -> bytes:
    """A response with a result that is JSON text already."""
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (rpc_id, result.encode())


def request_body(rpc_id: str, method: str, params: str) -> bytes:
    """A request of the broker's to a client."""
    head = f'{{"jsonrpc":"2.0","id":{json.dumps(rpc_id)},"method":{json.dumps(method)}'
    return f'{head},"params":{params}}}'.encode()


def notification_body(method: str, params: str) -> bytes:
    """A notification of the broker's."""
    return f'{{"jsonrpc":"2.0","method":{json.dumps(method)},"params":{params}}}'.encode()


def error_body(rpc_id: bytes | None, failure: RpcFailure) -> bytes:
    """An error response; without an id where the request's could not be read."""
    head = b"" if rpc_id is None else b'"id":%b,' % rpc_id
    if isinstance(failure, StoredFailure):
        return b'{"jsonrpc":"2.0",%b"error":%b}' % (head, failure.text.encode())
    data = "" if failure.data is None else f',"data":{failure.data}'
    error = f'{{"code":{failure.code},"message":{json.dumps(failure.message)}{data}}}'
    return b'{"jsonrpc":"2.0",%b"error":%b}' % (head, error.encode())
