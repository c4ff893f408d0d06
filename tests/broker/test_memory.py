"""What a process keeps in memory is bounded."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime
from uuid import UUID, uuid4

import pytest

from app.auth.remembered import Remembered
from app.broker.context import TerminalTasks
from app.domain import tasks
from app.domain.tasks import InputRequest, Task, ToolResult
from app.errors import StorageUnavailable
from tests.support.service import Service

NOW = datetime(2026, 11, 30, tzinfo=UTC)


def ended(result: str = "{}", message: str | None = None) -> Task:
    task = tasks.begin(
        ref=uuid4(), backend_id=1, owner=bytes(32), key_id=0, external_id=None, tool=None,
        poll_interval_ms=None, now=NOW,
    )  # fmt: skip
    done = tasks.complete(task, ToolResult(result, typed=False, is_error=False), NOW)
    return replace(done, status_message=message)


def test_remembered_tasks_stay_within_their_bytes() -> None:
    memory = TerminalTasks(max_bytes=100_000)
    several = [ended('"' + "ß" * 10_000 + '"', '"' + "x" * 10_000 + '"') for _ in range(20)]
    for task in several:
        memory.add(task)
    kept = [task for task in several if memory.get(task.ref)]
    assert 1 <= len(kept) <= 4
    assert kept == several[-len(kept) :]  # the newest


def test_a_task_that_is_too_large_is_not_remembered() -> None:
    memory = TerminalTasks(max_bytes=10_000)
    large = ended('"' + "x" * 10_000 + '"')
    memory.add(large)
    assert memory.get(large.ref) is None


def test_live_tasks_are_not_remembered_and_questions_are_dropped() -> None:
    memory = TerminalTasks(max_bytes=100_000)
    live = tasks.begin(
        ref=UUID(int=1), backend_id=1, owner=bytes(32), key_id=0, external_id=None, tool=None,
        poll_interval_ms=None, now=NOW,
    )  # fmt: skip
    memory.add(live)
    assert memory.get(live.ref) is None
    done = replace(ended(), inputs=(InputRequest("q", "{}" * 10_000, response="{}"),))
    memory.add(done)
    assert memory.get(done.ref) == replace(done, inputs=())


async def test_headers_over_the_limit_are_refused(service: Service) -> None:
    large = "x" * 70_000
    refused = await service.client().request("tasks/get", headers={"accept": large})
    assert refused.status_code == 431
    tools = await service.tool_server()
    event = await tools.post_event(b"{}", {"webhook-id": large})
    assert event.status_code == 413


# --- looking keys up --------------------------------------------------------------------------


async def test_those_who_ask_together_share_one_look_up() -> None:
    asked, ready = [], asyncio.Event()

    async def look_up(key: str) -> str:
        asked.append(key)
        await ready.wait()
        return key.upper()

    remembered = Remembered(look_up)
    answers = [asyncio.create_task(remembered.get("a")) for _ in range(5)]
    answers[0].cancel()  # and who goes away takes nothing from the others
    asyncio.get_running_loop().call_soon(ready.set)
    assert await asyncio.gather(*answers[1:]) == ["A"] * 4
    assert await remembered.get("a") == "A"
    assert asked == ["a"]


async def test_a_failed_look_up_is_made_again() -> None:
    failures = [StorageUnavailable(), None]

    async def look_up(_: str) -> str:
        if failure := failures.pop(0):
            raise failure
        return "found"

    remembered = Remembered(look_up)
    with pytest.raises(StorageUnavailable):
        await remembered.get("a")
    assert await remembered.get("a") == "found"
