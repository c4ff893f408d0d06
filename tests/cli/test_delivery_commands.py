"""What an operator sees of signals on their way, and can do about them."""

import asyncio
import json
from typing import Any

from tests.cli.test_commands import Command, taskbroker
from tests.cli.test_task_commands import run
from tests.support.clock import ShiftedClock
from tests.support.service import Service
from tests.support.waiting import eventually

__all__ = ["taskbroker"]  # the fixture

NOWHERE = "http://127.0.0.1:1/signals"


async def listed(taskbroker: Command, *filters: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = await run(taskbroker, "delivery", "list", *filters, "--json")
    return found


async def test_deliveries_are_listed_without_what_they_carry(
    service: Service, taskbroker: Command
) -> None:
    """These go to a callback that the service may not call: it is not allowed to."""
    tools = await service.tool_server("tools", callback_url=NOWHERE)
    other, client = await service.tool_server("other"), service.client()
    first, second, third = [await who.create(client) for who in (tools, other, tools)]
    await tools.ask(first, "name")
    await client.update(first.id, {"name": {"content": "canary-answer"}})
    await client.cancel(second.id)
    await client.cancel(third.id)

    async def tried() -> bool:
        return [one["attempts"] for one in await listed(taskbroker)] == [1, 0, 1]

    await eventually(tried)
    everything = await listed(taskbroker)
    assert [(one["backend"], one["type"], one["status"]) for one in everything] == [
        ("tools", "task.cancel_requested", "pending"),
        ("other", "task.cancel_requested", "pending"),
        ("tools", "task.input_received", "pending"),
    ]
    assert everything[0]["lastOutcome"] == "forbidden"
    assert everything[0]["nextAttemptAt"] > everything[0]["lastAttemptAt"]
    assert "canary" not in json.dumps(everything)
    assert [one["taskRef"] for one in await listed(taskbroker, "--backend", "other")] == [
        second.ref
    ]
    assert [one["taskRef"] for one in await listed(taskbroker, "--task", first.ref)] == [first.ref]
    assert len(await listed(taskbroker, "--limit", "2")) == 2
    assert await listed(taskbroker, "--status", "dead") == []
    assert "No such deliveries" in await run(taskbroker, "delivery", "list", "--status", "dead")


async def test_dead_signals_are_sent_again(
    service: Service, taskbroker: Command, clock: ShiftedClock
) -> None:
    tools = await service.tool_server("tools", callback_url=NOWHERE)
    client = service.client()
    tasks = [await tools.create(client) for _ in range(3)]
    for task in tasks:
        await client.cancel(task.id)
    async with service.broker.db.transaction() as connection:
        await connection.exec_driver_sql(
            "UPDATE signals SET status = 'dead', due_at = NULL, ended_at = now(), attempts = 9"
        )
    dead = sorted(one["id"] for one in await listed(taskbroker, "--status", "dead"))
    assert len(dead) == 3
    findings = await asyncio.to_thread(taskbroker, "doctor")
    assert findings.exit_code == 1
    assert "of the signals for tools, 3 are dead and 0 have failed" in findings.output
    assert "taskbroker delivery redeliver --backend tools" in findings.output

    again = await run(taskbroker, "delivery", "redeliver", str(dead[0]), "--json")
    assert again == {"redelivered": [dead[0]]}
    nothing = await asyncio.to_thread(taskbroker, "delivery", "redeliver", "999")
    assert nothing.exit_code == 1
    assert "There are no such deliveries: 999." in nothing.stderr
    rest = await run(taskbroker, "delivery", "redeliver", "--backend", "tools", "--json")
    assert rest == {"redelivered": dead[1:]}
    assert await listed(taskbroker, "--status", "dead") == []


async def test_what_to_send_again_has_to_be_named(service: Service, taskbroker: Command) -> None:
    for arguments in (
        [],
        ["1", "--backend", "tools"],
        ["--backend", "nobody"],
        ["one"],
        ["9" * 20],
        ["0"],
    ):
        result = await asyncio.to_thread(taskbroker, "delivery", "redeliver", *arguments)
        assert result.exit_code != 0


async def test_an_operator_sees_how_a_backend_gets_its_signals(
    service: Service, taskbroker: Command, clock: ShiftedClock
) -> None:
    await service.tool_server("fetching")
    await service.tool_server("called", callback_url=NOWHERE)
    gone = await service.tool_server("gone", callback_url=NOWHERE)
    async with service.broker.db.transaction() as connection:
        await connection.exec_driver_sql(
            "UPDATE backends SET callback_gone_at = now() WHERE name = 'gone'"
        )
    rows = await run(taskbroker, "backend", "list", "--json")
    assert {row["name"]: row["signals"] for row in rows} == {
        "fetching": "fetches",
        "called": "callback",
        "gone": "callback gone",
    }
    findings = (await asyncio.to_thread(taskbroker, "doctor")).output
    assert "gone answered 410 and gets no more signals" in findings
    assert "TASKBROKER_ALLOW_PRIVATE_CALLBACKS" in findings, "for the one that is called"

    await run(taskbroker, "backend", "enable", gone.name)
    shown = await run(taskbroker, "backend", "show", gone.name, "--json")
    assert shown["callbackGoneAt"] is None
