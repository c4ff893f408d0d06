"""Durable tools for servers made with the official Python SDK, `mcp` (install `[mcp]`).

durable = DurableTools(broker)
server = MCPServer("tools", extensions=[durable], lifespan=durable.lifespan)

@server.tool()
@durable
async def index(folder: str) -> str: ...
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar, Unpack, cast, overload

from mcp import MCPError
from mcp.server import MCPServer, ServerRequestContext
from mcp.server.context import CallNext, HandlerResult
from mcp.server.extension import Extension
from mcp_types import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    CallToolRequestParams,
    TaskMetadata,
)
from pydantic import BaseModel

from taskbroker_sdk import (
    AsyncCreatedTask,
    AsyncTask,
    AsyncTaskBroker,
    CancelRequested,
    NewTask,
    TaskFailed,
    owner_from,
)
from taskbroker_sdk._handle import running

LEGACY = "2025-11-25"
MODERN = "2026-07-28"  # versions are dates, so they compare as strings
_judged: ContextVar[bool] = ContextVar("judged", default=False)
"""Whether `middleware` has decided about the call that is being handled."""

Tool = TypeVar("Tool", bound=Callable[..., Any])
Condition = Callable[[CallToolRequestParams], bool]


@dataclass(frozen=True)
class _Mark:
    """What was said of a tool by `@durable`."""

    required: bool
    when: Condition | None

    def becomes_task(self, params: CallToolRequestParams) -> bool:
        return self.when is None or self.when(params)


class DurableTools(Extension):
    """Turns calls of the marked tools into tasks of the broker, for clients that know tasks.

    `terms` are those of `AsyncTaskBroker.start`, for instance `stall_after_ms`.
    """

    identifier = "io.modelcontextprotocol/tasks"

    def __init__(self, broker: AsyncTaskBroker, **terms: Unpack[NewTask]) -> None:
        self._broker = broker
        self._terms = terms
        self._marks: dict[str, _Mark] = {}

    @overload
    def __call__(self, tool: Tool) -> Tool: ...
    @overload
    def __call__(
        self, *, name: str | None = None, required: bool = False, when: Condition | None = None
    ) -> Callable[[Tool], Tool]: ...
    def __call__(
        self,
        tool: Any = None,
        *,
        name: str | None = None,
        required: bool = False,
        when: Condition | None = None,
    ) -> Any:
        """Marks a tool. `name`: that of the tool, where its function has another; `required`:
        clients without tasks are refused, instead of kept waiting; `when`: only calls that fulfil
        it become tasks.
        """

        def mark(tool: Tool) -> Tool:
            self._marks[name or tool.__name__] = _Mark(required, when)
            return _failing_as_it_says(tool)

        return mark if tool is None else mark(tool)

    @asynccontextmanager
    async def lifespan(self, server: MCPServer[Any]) -> AsyncIterator[None]:
        """For MCPServer: closes the broker's client when the server ends.

        uvicorn ends the process by the signal that it was sent, so nobody would after it.
        ValueError if something that is no tool of the server is marked as durable.
        """
        tools = {tool.name for tool in await server.list_tools()}
        if strangers := self._marks.keys() - tools:
            raise ValueError(
                f"durable, but no tools of this server: {', '.join(sorted(strangers))}. "
                'Where a tool is not called as its function, give its name: @durable(name="…")'
            )
        async with self._broker:
            yield

    async def middleware(
        self, ctx: ServerRequestContext[Any, Any], call_next: CallNext
    ) -> HandlerResult:
        """For MCPServer, if clients of MCP 2025-11-25 shall have tasks as well."""
        if ctx.protocol_version != LEGACY:
            return await call_next(ctx)
        if ctx.method == "tools/list":
            return self._with_task_support(await call_next(ctx))
        if ctx.method != "tools/call":
            return await call_next(ctx)
        params = CallToolRequestParams.model_validate(ctx.params or {}, by_name=False)
        mark = self._marks.get(params.name)
        if mark is None or not mark.becomes_task(params):
            return await call_next(ctx)
        if params.task is None and mark.required:
            raise MCPError(METHOD_NOT_FOUND, f"{params.name} can be called as a task only")
        judged = _judged.set(True)
        try:
            if params.task is None:
                return await call_next(ctx)
            started = await self._start(params.name, ctx, call_next, ttl_ms=_ttl(params.task))
            return started.create_task_result_legacy
        finally:
            _judged.reset(judged)

    def _with_task_support(self, result: HandlerResult) -> HandlerResult:
        """A list of tools that says of each durable one how it may be called."""
        listed = _as_dict(result)
        for tool in listed.get("tools", ()):
            if (mark := self._marks.get(tool["name"])) is not None:
                tool["execution"] = {"taskSupport": "required" if mark.required else "optional"}
        return listed

    async def intercept_tool_call(
        self,
        params: CallToolRequestParams,
        ctx: ServerRequestContext[Any, Any],
        call_next: CallNext,
    ) -> HandlerResult:
        mark = self._marks.get(params.name)
        if mark is None or not mark.becomes_task(params) or _judged.get():
            return await _unless_cancelled(call_next(ctx))
        if self._known_to_client(ctx):
            return (await self._start(params.name, ctx, call_next)).create_task_result
        if mark.required:
            raise MCPError(
                MISSING_REQUIRED_CLIENT_CAPABILITY,
                f"{params.name} needs MCP {MODERN} with the extension {self.identifier}",
                {"requiredCapabilities": {"extensions": {self.identifier: {}}}},
            )
        return await _unless_cancelled(call_next(ctx))

    async def _start(
        self,
        tool: str,
        ctx: ServerRequestContext[Any, Any],
        call_next: CallNext,
        ttl_ms: int | None = None,
    ) -> AsyncCreatedTask:
        """Lets a call go on as a task."""

        async def work(_: AsyncTask) -> dict[str, Any]:
            try:
                return _final(await call_next(ctx))
            except MCPError as error:
                raise TaskFailed(error.code, error.message, error.data) from error

        terms: NewTask = {**self._terms, "tool": tool}
        if ttl_ms is not None:
            terms["ttl_ms"] = ttl_ms
        owner = owner_from(getattr(ctx.request, "headers", {}))
        return await self._broker.start(owner, work, **terms)

    def _known_to_client(self, ctx: ServerRequestContext[Any, Any]) -> bool:
        if ctx.protocol_version < MODERN:  # it may know the extension, but not in this session
            return False
        capabilities = ctx.session.client_capabilities
        return capabilities is not None and self.identifier in (capabilities.extensions or {})


def _final(result: HandlerResult) -> dict[str, Any]:
    """A result as JSON. TaskFailed if it is no end, but a question of the call."""
    final = _as_dict(result)
    if final.get("resultType") == "input_required":
        raise TaskFailed(INTERNAL_ERROR, "a durable tool asks with current_task().ask")
    return final


def _as_dict(result: HandlerResult) -> dict[str, Any]:
    if isinstance(result, BaseModel):
        return result.model_dump(mode="json", by_alias=True, exclude_none=True)
    return result or {}


async def _unless_cancelled(result: Awaitable[HandlerResult]) -> HandlerResult:
    try:
        return await result
    except CancelRequested as wish:
        if running.get() is not None:
            raise
        raise MCPError(INTERNAL_ERROR, str(wish)) from None  # there is no task to cancel


def _ttl(asked: TaskMetadata) -> int | None:
    if asked.ttl is None:
        return None
    if asked.ttl < 1:
        raise MCPError(INVALID_PARAMS, "task.ttl must be at least 1 (milliseconds)")
    return int(asked.ttl)


def _failing_as_it_says(tool: Tool) -> Tool:
    """The tool, with TaskFailed as an error that MCPServer does not take for a crash."""

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
