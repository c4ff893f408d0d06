"""Which protocol era a request belongs to, decided before anything is looked up.

modern   `params._meta` names a protocol version, or the header `MCP-Protocol-Version` says
         2026-07-28: the request stands alone, with its version and capabilities inside
legacy   everything else: the eras that begin with `initialize`

(MCP 2026-07-28: "Versioning", "Streamable HTTP / Server Validation", "General fields / _meta".)
"""

import binascii
import json
import re
from base64 import b64decode
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from msgspec import UNSET, Raw, Struct, UnsetType

from app import rawjson
from app.asgi import Headers, text_header
from app.errors import Invalid
from app.mcp.jsonrpc import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    UNSUPPORTED_VERSION,
    Request,
    RpcFailure,
)
from app.views import modern

VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
CAPABILITIES_KEY = "io.modelcontextprotocol/clientCapabilities"

_SENTINEL = re.compile(r"=\?base64\?(.*)\?=", re.DOTALL)
_NOTHING = Raw(b"{}")
T = TypeVar("T")


class Params(Struct, rename={"meta": "_meta", "task_id": "taskId"}):
    """The members of `params` that the broker looks at; any other is allowed."""

    meta: Raw | UnsetType = UNSET
    task_id: Raw | UnsetType = UNSET
    inputResponses: Raw | UnsetType = UNSET  # noqa: N815 - the wire's name
    protocolVersion: Raw | UnsetType = UNSET  # noqa: N815 - the wire's name
    notifications: Raw | UnsetType = UNSET
    cursor: Raw | UnsetType = UNSET
    requestId: Raw | UnsetType = UNSET  # noqa: N815 - the wire's name


class _Meta(Struct, rename={"version": VERSION_KEY, "capabilities": CAPABILITIES_KEY}):
    version: Raw | UnsetType = UNSET
    capabilities: Raw | UnsetType = UNSET


class _Capabilities(Struct):
    extensions: Raw | UnsetType = UNSET


MODERN, LEGACY = "modern", "legacy"
"""What the eras are called in metrics."""


class Modern(NamedTuple):
    """A request of 2026-07-28 whose version and routing headers are in order."""

    params: Params
    extensions: frozenset[str]
    """The extensions that the client declared on this very request."""

    @property
    def name(self) -> str:
        return MODERN


class Legacy(NamedTuple):
    """A request of the eras before."""

    params: Params

    @property
    def name(self) -> str:
        return LEGACY


def classify(request: Request, headers: Headers) -> Modern | Legacy:
    """The era of a request. Raises RpcFailure or UnsupportedVersion."""
    method = text_header(headers, b"mcp-method")
    params = part(request.params or _NOTHING, Params, "params")
    meta = b"" if params.meta is UNSET else bytes(params.meta)
    judge = _judge_again if len(meta) <= _REPEATED_BYTES else _judge
    extensions = judge(
        meta,
        text_header(headers, b"mcp-protocol-version"),
        None if method is None else method == request.method,
    )
    return Legacy(params) if extensions is None else Modern(params, extensions)


def _judge(raw: bytes, header: str | None, named: bool | None) -> frozenset[str] | None:
    """The extensions that a modern request declares, `None` for a legacy request.

    From its `_meta`, the version in its header, and whether Mcp-Method names its method.
    """
    meta = part(Raw(raw), _Meta, "params._meta") if raw else _Meta()
    if meta.version is UNSET and header != modern.VERSION:
        return None
    if header is None:
        raise mismatch("the MCP-Protocol-Version header is missing")
    if meta.version is UNSET:
        raise invalid_params(f'params._meta needs "{VERSION_KEY}"')
    version = part(meta.version, str, f"params._meta[{VERSION_KEY}]")
    if version != header:
        raise mismatch("the MCP-Protocol-Version header differs from the version in params._meta")
    if version != modern.VERSION:
        raise UnsupportedVersion(version)
    if named is None:
        raise mismatch("the Mcp-Method header is missing")
    if not named:
        raise mismatch("the Mcp-Method header differs from the method in the body")
    if meta.capabilities is UNSET:
        raise invalid_params(f'params._meta needs "{CAPABILITIES_KEY}"')
    return _extensions(meta.capabilities)


_judge_again = lru_cache(maxsize=256)(_judge)  # a client repeats its `_meta`, byte for byte
_REPEATED_BYTES = 1024


def _extensions(raw: Raw) -> frozenset[str]:
    where = f"params._meta[{CAPABILITIES_KEY}]"
    capabilities = part(raw, _Capabilities, where)
    if capabilities.extensions is UNSET:
        return frozenset()
    extensions = part(capabilities.extensions, dict[str, Raw], f"{where}.extensions")
    return frozenset(name for name, value in extensions.items() if rawjson.is_object(value))


def check_name(headers: Headers, task_id: str) -> bool:
    """Whether `Mcp-Name` is there; raises a HeaderMismatch when it names something else."""
    value = text_header(headers, b"mcp-name")
    if value is None:
        return False
    if decode_header_value(value) != task_id:
        raise mismatch("the Mcp-Name header differs from params.taskId")
    return True


def decode_header_value(value: str) -> str | None:
    """The text in a header that may be wrapped as `=?base64?…?=`; `None` if that is malformed."""
    wrapped = _SENTINEL.fullmatch(value)
    if wrapped is None:
        return value
    try:
        return b64decode(wrapped[1], validate=True).decode()
    except (binascii.Error, ValueError):
        return None


def part(raw: Raw, shape: type[T], where: str) -> T:
    """A part of the params as `shape`; the wrong type is an Invalid params."""
    try:
        return rawjson.decode(raw, shape)
    except Invalid as error:
        details = "; ".join(fault.detail for fault in error.faults) or error.detail
        raise invalid_params(f"{where}: {details}") from None


def invalid_params(detail: str) -> RpcFailure:
    return RpcFailure(INVALID_PARAMS, f"Invalid params: {detail}", 400)


def mismatch(detail: str) -> RpcFailure:
    return RpcFailure(HEADER_MISMATCH, f"Header mismatch: {detail}", 400)


class UnsupportedVersion(Exception):
    """A version that is not spoken here was asked for."""

    def __init__(self, requested: str) -> None:
        self.requested = requested
        super().__init__()

    def failure(self, supported: Sequence[str]) -> RpcFailure:
        # A version of another era may be spoken, but not in the form in which it was asked for.
        spoken = [version for version in supported if version != self.requested]
        data = json.dumps({"supported": spoken, "requested": self.requested})
        message = f"Unsupported protocol version; this server speaks {', '.join(spoken)}"
        return RpcFailure(UNSUPPORTED_VERSION, message, 400, data)
