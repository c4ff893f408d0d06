"""What an operator sees of tasks, and can do to them."""

import asyncio
import json
from typing import Any

from tests.cli.test_commands import Command, taskbroker
from tests.support.service import Service

__all__ = ["taskbroker"]  # the fixture


async def run(taskbroker: Command, *arguments: str) -> Any:
    """The output of a command beside the running service."""
    result = await asyncio.to_thread(taskbroker, *arguments)
    assert result.exit_code == 0, result.exception or result.output
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


async def test_tasks_are_found_by_backend_status_and_job(
    service: Service, taskbroker: Command
) -> None:
    tools, other = await service.tool_server("tools"), await service.tool_server("other")
    client = service.client()
    done = await tools.create(client, externalId="job-1", tool="resize")
    live = await tools.create(client, externalId="job-2")
    await other.create(client)
    await tools.complete(done, {"content": [], "secret": "canary-result"})

    everything = await run(taskbroker, "task", "list", "--json")
    assert len(everything) == 3
    mine = await run(taskbroker, "task", "list", "--backend", "tools", "--json")
    assert [task["taskRef"] for task in mine] == [live.ref, done.ref]
    completed = await run(taskbroker, "task", "list", "--status", "completed", "--json")
    assert [(task["taskRef"], task["tool"]) for task in completed] == [(done.ref, "resize")]
    job = await run(taskbroker, "task", "list", "--external-id", "job-2")
    assert live.ref in job


async def test_one_task_is_shown_with_its_history_and_without_its_secrets(
    service: Service, taskbroker: Command
) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await tools.ask(task, "name")
    await client.update(task.id, {"name": {"content": "canary-answer"}})
    await client.cancel(task.id)
    await tools.complete(task, {"content": [], "secret": "canary-result"})

    shown = await run(taskbroker, "task", "show", task.ref, "--json")

    assert [(entry["what"], entry["to"], entry["by"]) for entry in shown["history"]] == [
        ("created", "working", "backend"),
        ("report", "input_required", "backend"),
        ("answer", "working", "owner"),
        ("cancel requested", "working", "owner"),
        ("report", "completed", "backend"),
    ]
    text = await run(taskbroker, "task", "show", task.ref)
    assert "completed" in text
    for output in (json.dumps(shown), text):
        assert "canary" not in output
        assert task.id not in output


async def test_the_operator_can_end_a_task_at_once(service: Service, taskbroker: Command) -> None:
    tools, client = await service.tool_server(), service.client()
    cancelled, failed = await tools.create(client), await tools.create(client)

    await run(taskbroker, "task", "cancel", cancelled.ref)
    await run(taskbroker, "task", "fail", failed.ref, "--message", "lost in the fire")

    assert (await client.get(cancelled.id))["status"] == "cancelled"
    shown = await client.get(failed.id)
    assert (shown["status"], shown["error"]["code"]) == ("failed", -32603)
    assert shown["statusMessage"] == "lost in the fire"


async def test_a_terminal_or_unknown_task_cannot_be_ended(
    service: Service, taskbroker: Command
) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await tools.complete(task)
    for ref in (task.ref, "00000000-0000-7000-8000-000000000000"):
        result = await asyncio.to_thread(taskbroker, "task", "cancel", ref)
        assert result.exit_code == 1
    assert (await client.get(task.id))["status"] == "completed"


async def test_a_backend_with_live_tasks_is_removed_only_by_force(
    service: Service, taskbroker: Command
) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    refused = await asyncio.to_thread(taskbroker, "backend", "remove", tools.name)
    assert "1 live tasks" in str(refused.exception)

    assert "with 1 tasks" in await run(taskbroker, "backend", "remove", tools.name, "--force")
    assert "not found" in (await client.error("tasks/get", task.id))["message"]


async def test_a_disabled_backend_is_let_in_again(service: Service, taskbroker: Command) -> None:
    tools = await service.tool_server()
    await service.disable(tools)
    await run(taskbroker, "backend", "enable", tools.name)
    async with asyncio.timeout(10):
        while (await tools.list()).status_code == 403:
            pass
    assert (await tools.list()).status_code == 200
