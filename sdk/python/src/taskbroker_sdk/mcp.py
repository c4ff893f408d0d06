"""Durable tools for servers made with the official Python SDK, `mcp` (install `[mcp]`).

durable = DurableTools(broker)
server = MCPServer("tools", extensions=[durable])

@server.tool()
@durable
async def index(folder: str) -> str: ...
"""

from collections.abc import Callable
from typing import Any, TypeVar, overload

from mcp import MCPError
from mcp.server import ServerRequestContext
from mcp.server.context import CallNext, HandlerResult
from mcp.server.extension import Extension
from mcp_types import MISSING_REQUIRED_CLIENT_CAPABILITY, CallToolRequestParams
from pydantic import BaseModel

from taskbroker_sdk import AsyncTask, AsyncTaskBroker, TaskFailed, owner_from

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
            return tool

        return mark if tool is None else mark(tool)

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
                raise TaskFailed(error.code, error.message, error.data) from error
            assert isinstance(result, BaseModel)
            return result.model_dump(mode="json", by_alias=True, exclude_none=True)

        owner = owner_from(getattr(ctx.request, "headers", {}))
        task = await self._broker.start(owner, work, tool=params.name, **self._terms)
        return task.create_task_result

    def _known_to_client(self, ctx: ServerRequestContext[Any, Any]) -> bool:
        capabilities = ctx.session.client_capabilities
        return capabilities is not None and self.identifier in (capabilities.extensions or {})


def _always(_: CallToolRequestParams) -> bool:
    return True
