"""`DurableTools`: a server of the official Python SDK in this process, its broker beside it."""

import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from mcp import MCPError
from mcp.server import ServerRequestContext
from mcp.server.context import CallNext, HandlerResult
from mcp.server.extension import Extension
from mcp.server.mcpserver import Context, MCPServer
from mcp_types import (
    CallToolRequestParams,
    ElicitRequest,
    ElicitRequestFormParams,
    InputRequiredResult,
)

from taskbroker_sdk import AsyncTaskBroker, CancelRequested, TaskFailed, current_task, elicitation
from taskbroker_sdk.mcp import DurableTools
from tests.support.secrecy import new_token, secret
from tests.support.service import (
    CAPABILITIES_KEY,
    META,
    TASKS,
    McpClient,
    Service,
    ToolServer,
    lifespan,
)
from tests.support.waiting import eventually

SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}}
YES = {"action": "accept", "content": {"sure": True}}
WITHOUT_TASKS = {**META, CAPABILITIES_KEY: {}}
ERRORS = {
    "by TaskFailed": TaskFailed(-32050, "no disk left", {"free": 0}),
    "by MCPError": MCPError(-32051, "no network left", {"hosts": []}),
    "by a crash": RuntimeError("the door code is 4711"),
    "by cancelling": CancelRequested("the user said no"),
}


class Outcome(Extension):
    """Ends a call as an extension may: with an object or with nothing."""

    identifier = "com.example/outcome"

    async def intercept_tool_call(
        self,
        params: CallToolRequestParams,
        ctx: ServerRequestContext[Any, Any],
        call_next: CallNext,
    ) -> HandlerResult:
        if params.name == "resize":
            wanted = (params.arguments or {}).get("outcome")
            if wanted == "an object":
                return {"content": [{"type": "text", "text": "made by an extension"}]}
            if wanted == "nothing":
                return None
        return await call_next(ctx)


def server_with(durable: DurableTools) -> MCPServer[Any]:
    server: MCPServer[Any] = MCPServer(
        "tools", extensions=[durable, Outcome()], lifespan=durable.lifespan
    )

    @server.tool()
    @durable
    async def resize(outcome: str = "a text") -> str:
        """Clients without tasks wait for it."""
        return f"resized: {outcome}"

    @server.tool()
    @durable
    def resize_in_a_thread() -> str:
        assert threading.current_thread() is not threading.main_thread()
        return "resized"

    @server.tool(name="follow-me")
    @durable(name="follow-me", required=True)
    async def follow() -> str:
        """Tells how it goes, until it is told to stop."""
        while True:
            await current_task().progress("half way")

    @server.tool()
    @durable(required=True)
    async def ask() -> str:
        answers = await current_task().ask({"sure": elicitation("Sure?", SCHEMA)})
        return f"sure: {answers['sure']['content']['sure']}"

    @server.tool()
    @durable
    async def fail(how: str) -> str:
        raise ERRORS[how]

    @server.tool()
    @durable
    def fail_in_a_thread() -> str:
        raise ERRORS["by TaskFailed"]

    @server.tool()
    @durable(when=lambda params: bool(params.input_responses))
    async def ask_in_the_call(ctx: Context) -> str | InputRequiredResult:
        """Becomes a task when it has its answer."""
        return "answered" if ctx.input_responses else question()

    @server.tool()
    @durable(required=True)
    async def ask_too_late() -> str | InputRequiredResult:
        return question()

    return server


def question() -> InputRequiredResult:
    params = ElicitRequestFormParams(message="Sure?", requested_schema=SCHEMA)
    return InputRequiredResult(input_requests={"sure": ElicitRequest(params=params)})


class Caller(McpClient):
    """A client that calls the tools, and polls the broker for what becomes of the calls."""

    def __init__(self, tools: httpx.AsyncClient, service: Service) -> None:
        super().__init__(tools, new_token())
        self.tasks = McpClient(service.http, self.token)

    async def call(self, tool: str, *, meta: Any = META, **params: Any) -> dict[str, Any]:
        """The answer to `tools/call`."""
        response = await self.request(
            "tools/call",
            {"name": tool, "arguments": {}, **params},
            headers={"mcp-name": tool},
            meta=meta,
        )
        answer: dict[str, Any] = response.json()
        return answer

    async def start(self, tool: str, **params: Any) -> str:
        """The id of the task that a call becomes."""
        result = (await self.call(tool, **params))["result"]
        assert result["resultType"] == "task", result
        return secret(result["taskId"])

    async def comes_to(self, task_id: str, status: str) -> dict[str, Any]:
        """The task as it is seen when it has this status."""
        seen: dict[str, Any] = {}

        async def there() -> bool:
            seen.update(await self.tasks.get(task_id))
            return bool(seen["status"] == status)

        await eventually(there)
        return seen

    async def outcome(self, tool: str, status: str, **params: Any) -> dict[str, Any]:
        return await self.comes_to(await self.start(tool, **params), status)


@pytest.fixture
async def tools(service: Service) -> ToolServer:
    """A registered backend."""
    return await service.tool_server()


def durable_tools(service: Service, tools: ToolServer, **terms: Any) -> DurableTools:
    broker = AsyncTaskBroker(
        str(service.http.base_url),
        tools.name,
        tools.key,
        tools.webhook_secret,
        heartbeat=0.02,
        grace=1,
        http=service.http,
    )
    return DurableTools(broker, **terms)


@pytest.fixture
async def caller(service: Service, tools: ToolServer) -> AsyncIterator[Caller]:
    app = server_with(durable_tools(service, tools, ttl_ms=60_000)).streamable_http_app()
    async with (
        lifespan(app),
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1:9"
        ) as http,
    ):
        yield Caller(http, service)


def text_of(result: dict[str, Any]) -> str:
    text: str = result["content"][0]["text"]
    return text


# --- calls that become tasks ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "said"), [("resize", "resized: a text"), ("resize_in_a_thread", "resized")]
)
async def test_what_a_tool_returns_completes_its_task(
    caller: Caller, tools: ToolServer, tool: str, said: str
) -> None:
    seen = await caller.outcome(tool, "completed")
    assert text_of(seen["result"]) == said
    assert seen["ttlMs"] == 60_000
    [listed] = (await tools.list()).json()["tasks"]
    assert listed["tool"] == tool


async def test_a_tool_under_a_name_of_its_own_tells_how_it_goes_until_it_is_cancelled(
    caller: Caller,
) -> None:
    task_id = await caller.start("follow-me")

    async def tells() -> bool:
        return (await caller.tasks.get(task_id)).get("statusMessage") == "half way"

    await eventually(tells)
    await caller.tasks.cancel(task_id)
    seen = await caller.comes_to(task_id, "cancelled")
    assert seen["statusMessage"] == "stopped, as the client asked"


async def test_a_tool_asks_and_goes_on_with_the_answer(caller: Caller) -> None:
    task_id = await caller.start("ask")
    asking = await caller.comes_to(task_id, "input_required")
    assert asking["inputRequests"] == {"sure": elicitation("Sure?", SCHEMA)}
    await caller.tasks.update(task_id, {"sure": YES})
    assert text_of((await caller.comes_to(task_id, "completed"))["result"]) == "sure: True"


@pytest.mark.parametrize(
    ("tool", "arguments", "error"),
    [
        (
            "fail",
            {"how": "by TaskFailed"},
            {"code": -32050, "message": "no disk left", "data": {"free": 0}},
        ),
        (
            "fail",
            {"how": "by MCPError"},
            {"code": -32051, "message": "no network left", "data": {"hosts": []}},
        ),
        (
            "fail_in_a_thread",
            {},
            {"code": -32050, "message": "no disk left", "data": {"free": 0}},
        ),
        (
            "ask_too_late",
            {},
            {"code": -32603, "message": "a durable tool asks with current_task().ask"},
        ),
    ],
)
async def test_an_error_that_a_tool_chose_fails_its_task(
    caller: Caller, tool: str, arguments: dict[str, Any], error: dict[str, Any]
) -> None:
    assert (await caller.outcome(tool, "failed", arguments=arguments))["error"] == error


async def test_a_tool_that_crashes_completes_its_task_as_it_would_its_call(caller: Caller) -> None:
    result = (await caller.outcome("fail", "completed", arguments={"how": "by a crash"}))["result"]
    assert result["isError"] is True
    assert "4711" not in str(result)


async def test_a_tool_may_decide_that_nobody_needs_it(caller: Caller) -> None:
    seen = await caller.outcome("fail", "cancelled", arguments={"how": "by cancelling"})
    assert seen["statusMessage"] == "the user said no"


@pytest.mark.parametrize(
    ("outcome", "result"),
    [
        ("an object", {"content": [{"type": "text", "text": "made by an extension"}]}),
        ("nothing", {}),
    ],
)
async def test_a_result_that_another_extension_made_completes_the_task(
    caller: Caller, outcome: str, result: dict[str, Any]
) -> None:
    seen = await caller.outcome("resize", "completed", arguments={"outcome": outcome})
    assert seen["result"] == {**result, "resultType": "complete"}


async def test_only_calls_that_fulfil_the_condition_become_tasks(caller: Caller) -> None:
    asked = (await caller.call("ask_in_the_call"))["result"]
    assert asked["resultType"] == "input_required"
    seen = await caller.outcome("ask_in_the_call", "completed", inputResponses={"sure": YES})
    assert text_of(seen["result"]) == "answered"


# --- clients without tasks -----------------------------------------------------------------------


async def test_a_client_without_tasks_waits_for_the_plain_result(
    caller: Caller, tools: ToolServer
) -> None:
    result = (await caller.call("resize", meta=WITHOUT_TASKS))["result"]
    assert text_of(result) == "resized: a text"
    assert (await tools.list()).json()["tasks"] == []


async def test_a_tool_that_needs_tasks_refuses_clients_without(caller: Caller) -> None:
    error = (await caller.call("follow-me", meta=WITHOUT_TASKS))["error"]
    assert error["code"] == -32021
    assert error["data"] == {"requiredCapabilities": {"extensions": {TASKS: {}}}}


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        ("by TaskFailed", -32050, "no disk left"),
        ("by MCPError", -32051, "no network left"),
        ("by cancelling", -32603, "the user said no"),
    ],
)
async def test_what_would_end_a_task_is_the_error_of_a_call_without_one(
    caller: Caller, how: str, code: int, message: str
) -> None:
    error = (await caller.call("fail", arguments={"how": how}, meta=WITHOUT_TASKS))["error"]
    assert (error["code"], error["message"]) == (code, message)


# --- the server's life ---------------------------------------------------------------------------


async def test_the_end_of_the_server_is_the_end_of_its_tasks(
    service: Service, tools: ToolServer
) -> None:
    app = server_with(durable_tools(service, tools)).streamable_http_app()
    transport = httpx.ASGITransport(app)
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:9") as http,
        lifespan(app),
    ):
        caller = Caller(http, service)
        task_id = await caller.start("ask")
        await caller.comes_to(task_id, "input_required")

    seen = await caller.tasks.get(task_id)
    assert seen["error"] == {"code": -32603, "message": "the tool server was stopped"}


async def test_a_server_does_not_start_when_something_durable_is_no_tool(
    service: Service, tools: ToolServer
) -> None:
    durable = durable_tools(service, tools)
    server: MCPServer[Any] = MCPServer("tools", extensions=[durable])

    @server.tool(name="resize-images")
    @durable(required=True)
    async def resize() -> str:
        return "resized"

    with pytest.raises(ValueError, match=r'no tools of this server: resize\..*@durable\(name="'):
        async with durable.lifespan(server):
            pytest.fail("it started")
