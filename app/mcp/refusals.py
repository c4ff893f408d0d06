"""Tasks that are not there, in the words of the specification: the same for every reason."""

from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import Expired, NotFound
from app.mcp.jsonrpc import INVALID_PARAMS, RpcFailure


@contextmanager
def refusals() -> Iterator[None]:
    try:
        yield
    except NotFound:
        raise RpcFailure(INVALID_PARAMS, "Failed to retrieve task: Task not found", 200) from None
    except Expired:
        raise RpcFailure(INVALID_PARAMS, "Failed to retrieve task: Task has expired", 200) from None
