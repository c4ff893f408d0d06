"""Tasks that are not there, in the words of the specification: the same for every reason."""

from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import Expired, NotFound
from app.mcp.jsonrpc import INVALID_PARAMS, RpcFailure

NOT_FOUND = "Failed to retrieve task: Task not found"
EXPIRED = "Failed to retrieve task: Task has expired"


@contextmanager
def refusals() -> Iterator[None]:
    try:
        yield
    except NotFound:
        raise RpcFailure(INVALID_PARAMS, NOT_FOUND, 200) from None
    except Expired:
        raise RpcFailure(INVALID_PARAMS, EXPIRED, 200) from None
