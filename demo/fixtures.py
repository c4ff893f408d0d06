"""Tools that the official conformance suite asks for, beside those of `tool_server`."""

import asyncio

from mcp import MCPError
from mcp.server.mcpserver import Context
from mcp_types import (
    INTERNAL_ERROR,
    MISSING_REQUIRED_CLIENT_CAPABILITY,
    CallToolRequestParams,
    CallToolResult,
    ElicitRequest,
    ElicitRequestFormParams,
    ElicitResult,
    InputRequiredResult,
    TextContent,
)

from demo.tool_server import app, durable, server
from taskbroker_sdk import current_task, elicitation

__all__ = ["app"]

NAME_SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}}


@server.tool()
@durable(required=True)
async def failing_job() -> CallToolResult:
    """Runs, and reports that it failed."""
    await asyncio.sleep(1)
    return CallToolResult(content=[TextContent(text="The job failed.")], is_error=True)


@server.tool()
@durable(required=True)
async def protocol_error_job() -> str:
    """Ends with a JSON-RPC error."""
    raise MCPError(INTERNAL_ERROR, "The job broke down")


@server.tool()
@durable(required=True)
async def multi_input() -> str:
    """Asks two questions at once."""
    questions = {
        "name": elicitation("What is your name?", NAME_SCHEMA),
        "city": elicitation("Where do you live?", NAME_SCHEMA),
    }
    answers = await current_task().ask(questions)
    return ", ".join(f"{key}: {answer['action']}" for key, answer in answers.items())


def _has_answers(params: CallToolRequestParams) -> bool:
    return bool(params.input_responses)


@server.tool()
@durable(required=True, when=_has_answers)
async def test_tool_with_task(ctx: Context) -> str | InputRequiredResult:
    """Asks for a name in the call itself, and becomes a task when it has it."""
    answer = (ctx.input_responses or {}).get("user_name")
    if answer is None:
        question = ElicitRequestFormParams(
            message="What is your name?", requested_schema=NAME_SCHEMA
        )
        return InputRequiredResult(input_requests={"user_name": ElicitRequest(params=question)})
    content = answer.content if isinstance(answer, ElicitResult) else None
    return f"Hello, {(content or {}).get('name', 'stranger')}!"


@server.tool()
async def test_missing_capability(ctx: Context) -> str:
    """Needs a client that can sample."""
    capabilities = ctx.client_capabilities
    if capabilities is None or capabilities.sampling is None:
        raise MCPError(
            MISSING_REQUIRED_CLIENT_CAPABILITY,
            "This tool needs a client with the capability sampling",
            {"requiredCapabilities": {"sampling": {}}},
        )
    return "The client can sample."


@server.tool()
async def test_streaming_elicitation(ctx: Context) -> str | InputRequiredResult:
    """Asks within the call, and never by a request of its own."""
    return await test_tool_with_task(ctx)


@server.tool()
async def test_logging_tool(ctx: Context) -> str:
    """Says something to the log of a client that has asked to hear it."""
    await ctx.info("working")
    return "done"


@server.tool()
async def test_trigger_tool_change(ctx: Context) -> str:
    """Tells whoever listens that the tools have changed."""
    await ctx.notify_tools_changed()
    return "told"


@server.tool()
async def test_trigger_prompt_change(ctx: Context) -> str:
    """Tells whoever listens that the prompts have changed."""
    await ctx.notify_prompts_changed()
    return "told"
