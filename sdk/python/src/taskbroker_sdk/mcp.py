"""Durable tools for servers made with the official Python SDK, `mcp` (install `[mcp]`).

durable = DurableTools(broker)
server = MCPServer("tools", extensions=[durable], lifespan=durable.lifespan)

@server.tool()
@durable
async def index(folder: str) -> str: ...
"""

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast, overload

from mcp import MCPError
from mcp.server import ServerRequestContext
from mcp.server.context import CallNext, HandlerResult
from mcp.server.extension import Extension
from mcp_types import INTERNAL_ERROR, MISSING_REQUIRED_CLIENT_CAPABILITY, CallToolRequestParams
from pydantic import BaseModel

from taskbroker_sdk import AsyncTask, AsyncTaskBroker, CancelRequested, TaskFailed, owner_from

Tool = TypeVar("Tool", bound=Callable[..., Any])
Condition = Callable[[CallToolRequestParams], bool]


class DurableTools(Extension):
    """Turns calls of the marked tools into tasks of the broker, for clients that know tasks.

    `terms` are those of `AsyncTaskBroker.start`, for instance `stall_after_ms`.
    """

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(self, broker: AsyncTaskBroker, **terms: Any) -> None:
        self._broker = broker
        self._terms = terms
        self._required: dict[str, bool] = {}
        self._conditions: dict[str, Condition] = {}

    @overload
    def __call__(self, tool: Tool) -> Tool: ...
    @overload
    def __call__(
        self, *, required: bool = False, when: Condition | None = None
    ) -> Callable[[Tool], Tool]: ...
    def __call__(
        self, tool: Any = None, *, required: bool = False, when: Condition | None = None
    ) -> Any:
        """Marks a tool. `required`: clients without tasks are refused, instead of kept waiting;
        `when`: only calls that fulfil it become tasks.
        """

        def mark(tool: Tool) -> Tool:
            self._required[tool.__name__] = required
            self._conditions[tool.__name__] = when or _always
            return _ending_in_mcp_errors(tool)

        return mark if tool is None else mark(tool)

    @asynccontextmanager
    async def lifespan(self, _server: Any) -> AsyncIterator[None]:
        """For MCPServer: closes the broker's client when the server ends.

        uvicorn ends the process by the signal that it was sent, so nobody would after it.
        """
        async with self._broker:
            yield

    async def intercept_tool_call(
        self,
        params: CallToolRequestParams,
        ctx: ServerRequestContext[Any, Any],
        call_next: CallNext,
    ) -> HandlerResult:
        if params.name not in self._required or not self._conditions[params.name](params):
            return await call_next(ctx)
        if not self._known_to_client(ctx):
            if self._required[params.name]:
                raise MCPError(
                    MISSING_REQUIRED_CLIENT_CAPABILITY,
                    f"{params.name} needs a client with the extension {self.identifier}",
                    {"requiredCapabilities": {"extensions": {self.identifier: {}}}},
                )
            return await call_next(ctx)

        async def work(_: AsyncTask) -> dict[str, Any]:
            try:
                result = await call_next(ctx)
            except MCPError as error:
                if isinstance(error.__cause__, CancelRequested):
                    raise error.__cause__ from None
                raise TaskFailed(error.code, error.message, error.data) from error
            assert isinstance(result, BaseModel)
            return result.model_dump(mode="json", by_alias=True, exclude_none=True)

        owner = owner_from(getattr(ctx.request, "headers", {}))
        task = await self._broker.start(owner, work, tool=params.name, **self._terms)
        return task.create_task_result

    def _known_to_client(self, ctx: ServerRequestContext[Any, Any]) -> bool:
        capabilities = ctx.session.client_capabilities
        return capabilities is not None and self.identifier in (capabilities.extensions or {})


def _ending_in_mcp_errors(tool: Tool) -> Tool:
    """The tool, with the ends of its task as errors that MCPServer does not take for crashes."""

    @wraps(tool)
    async def run_async(*args: Any, **kwargs: Any) -> Any:
        with _mcp_errors():
            return await tool(*args, **kwargs)

    @wraps(tool)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _mcp_errors():
            return tool(*args, **kwargs)

    return cast("Tool", run_async if iscoroutinefunction(tool) else run)


@contextmanager
def _mcp_errors() -> Iterator[None]:
    try:
        yield
    except TaskFailed as failure:
        raise MCPError(failure.code, failure.message, failure.data) from failure
    except CancelRequested as wish:
        raise MCPError(INTERNAL_ERROR, str(wish)) from wish


def _always(_: CallToolRequestParams) -> bool:
    return True
