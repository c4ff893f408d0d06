"""One task, two eras: begun by a client of one, read and ended by a client of the other."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.clients.drivers import (
    EXT_TASKS,
    EXT_TASKS_LEGACY,
    FASTMCP,
    INSPECTOR,
    INSPECTOR_LEGACY,
    MCP,
    MCP_1,
    SDK_1,
    Driver,
    Outcome,
    leave,
    resume,
    withdraw,
)
from tests.support.processes import BrokerProcess
from tests.support.secrecy import secret

pytestmark = pytest.mark.clients

BEGUN_AND_READ_BY = [
    (FASTMCP, MCP_1),
    (EXT_TASKS, SDK_1),
    (MCP, EXT_TASKS_LEGACY),
    (MCP, INSPECTOR_LEGACY),
    (MCP_1, FASTMCP),
    (SDK_1, EXT_TASKS),
    (EXT_TASKS_LEGACY, MCP),
    (MCP_1, INSPECTOR),
]


Outcomes = dict[str, Outcome]
Crossing = asyncio.Task[tuple[Outcomes, Outcomes]]


@pytest.fixture(scope="module")
async def crossings(
    broker: BrokerProcess, tools: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[tuple[Driver, Driver], Crossing]]:
    """What all pairs do meanwhile: they wait for tasks most of the time.

    They have one key: tasks belong to who has it, in whichever era they are asked for.
    """
    key = secret(json.loads(await broker.run("client add both-eras --json"))["apiKey"])
    crossings = {
        pair: asyncio.create_task(_cross(*pair, tools, key, tmp_path_factory.mktemp("ids")))
        for pair in BEGUN_AND_READ_BY
    }
    yield crossings
    await asyncio.gather(*crossings.values(), return_exceptions=True)


async def _cross(
    beginner: Driver, reader: Driver, tools: str, key: str, ids: Path
) -> tuple[Outcomes, Outcomes]:
    """What the reader sees of tasks that the beginner has left, and then the beginner."""
    begun = {
        "slow": leave(ids / "slow", "slow_compute", seconds=1, label="crossed over"),
        "tool error": leave(ids / "tool error", "failing_job"),
        "protocol error": leave(ids / "protocol error", "protocol_error_job"),
        "cancelled": leave(ids / "cancelled", "slow_compute", seconds=60),
        "question": leave(ids / "question", "confirm_delete", filename="old.txt"),
    }
    await beginner.play(tools, begun, token=key)
    known = {name: secret((ids / name).read_text()) for name in begun}
    reread = {name: resume(task) for name, task in known.items()}
    read = reread | {"cancelled": withdraw(known["cancelled"])}
    if reader is INSPECTOR_LEGACY:  # it does not ask its user what a task of 2025 wants to know
        del read["question"]
    return (
        await reader.play(tools, read, token=key),
        await beginner.play(tools, reread, token=key),
    )


@pytest.mark.parametrize(("beginner", "reader"), BEGUN_AND_READ_BY, ids=lambda each: each.name)
async def test_a_task_ends_for_both_eras_alike(
    crossings: dict[tuple[Driver, Driver], Crossing], beginner: Driver, reader: Driver
) -> None:
    read, reread = await crossings[beginner, reader]

    _ended_in(reader.era, read)
    _ended_in(beginner.era, reread)
    assert reread["question"]["text"] == "old.txt is deleted."
    asked_by = reread if reader is INSPECTOR_LEGACY else read
    assert asked_by["question"]["asked"] == ["Delete old.txt?"]


def _ended_in(era: str, outcomes: Outcomes) -> None:
    assert outcomes["slow"]["status"] == "completed"
    assert outcomes["slow"]["text"].startswith("crossed over: the largest of")
    assert outcomes["tool error"]["status"] == ("completed" if era == "modern" else "failed")
    assert outcomes["protocol error"]["status"] == "failed"
    assert outcomes["protocol error"]["error"]["message"] == "The job broke down"
    assert outcomes["cancelled"]["status"] == "cancelled"
