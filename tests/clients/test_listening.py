"""MCP client libraries that nobody here wrote are told of their tasks (see `drivers.py`)."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.mcp import streams
from tests.clients.drivers import EXT_TASKS, LISTENERS, MCP, Driver, Outcome, leave, listen
from tests.support.clock import ShiftedClock
from tests.support.listening import listening
from tests.support.processes import BrokerProcess, running_broker
from tests.support.secrecy import secret
from tests.support.servers import answer_with_result, running_upstream
from tests.support.service import (
    TASKS,
    VERSION,
    CreatedTask,
    McpClient,
    Service,
    ToolServer,
    networked_service,
    test_settings,
)
from tests.support.waiting import eventually

pytestmark = pytest.mark.clients

RARELY = 3_600_000
"""An interval of polls at which nobody hears of anything."""


@pytest.fixture(params=LISTENERS, ids=lambda each: each.name)
def driver(request: pytest.FixtureRequest) -> Driver:
    driver: Driver = request.param
    return driver


class Replicas:
    """Two of one broker: tool servers report to one, clients listen to the other."""

    def __init__(self, here: Service, there: Service, tools: ToolServer, folder: Path) -> None:
        self.here = here
        self.there = there
        self.tools = tools
        self.told = folder / "told"

    async def task(self, client: McpClient, **members: int) -> CreatedTask:
        return await self.tools.create(client, pollIntervalMs=RARELY, **members)

    def listening(
        self, driver: Driver, task: str, client: McpClient, door: str = "/mcp"
    ) -> asyncio.Task[dict[str, Outcome]]:
        url = f"{self.there.http.base_url}{door}"
        acts = {"task": listen(task, self.told)}
        return asyncio.create_task(driver.play(url, acts, token=client.token))

    async def have_told(self, *statuses: str) -> None:
        await eventually(
            lambda: self.told.exists() and self.told.read_text().split() == [*statuses]
        )


@pytest.fixture
async def replicas(
    database_url: str, clock: ShiftedClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Replicas]:
    monkeypatch.setattr(streams, "KEEP_ALIVE_SECONDS", 0.05)  # comments between all notifications
    settings = test_settings(database_url, max_streams_per_owner=1)
    async with (
        running_upstream() as upstream,
        networked_service(settings, clock) as here,
        networked_service(settings, clock) as there,
    ):
        upstream.behaviour = answer_with_result(
            {
                "resultType": "complete",
                "supportedVersions": [VERSION],
                "capabilities": {"extensions": {TASKS: {}}},
                "ttlMs": 0,
                "cacheScope": "private",
            }
        )
        tools = await here.tool_server(mcp_url=upstream.url, allow_anonymous=True)
        yield Replicas(here, there, tools, tmp_path)


@pytest.mark.parametrize("door", ["/mcp", "/mcp/tools"])
@pytest.mark.parametrize("anonymous", [False, True], ids=["by key", "anonymously"])
async def test_a_client_is_told_all_that_happens_to_its_task(
    replicas: Replicas, driver: Driver, door: str, anonymous: bool
) -> None:
    client = replicas.here.anonymous() if anonymous else await replicas.here.keyed_client()
    task = await replicas.task(client)

    playing = replicas.listening(driver, task.id, client, door)
    await replicas.have_told("working")
    await replicas.tools.ask(task, "sure")
    await replicas.have_told("working", "input_required", "working")
    result = {"content": [{"type": "text", "text": "done"}]}
    await replicas.tools.complete(task, result)
    outcome = (await playing)["task"]

    await replicas.have_told("working", "input_required", "working", "completed")
    assert outcome["asked"] == ["Really?"]
    assert (outcome["status"], outcome["text"]) == ("completed", "done")
    assert outcome["end"] == "graceful"
    if driver is MCP:  # the other library leaves out what it does not know
        assert outcome["acknowledged"] is True


async def test_a_client_is_told_that_the_time_of_its_task_is_over(
    replicas: Replicas, driver: Driver, clock: ShiftedClock
) -> None:
    client = await replicas.here.keyed_client()
    task = await replicas.task(client, ttlMs=60_000)

    playing = replicas.listening(driver, task.id, client)
    await replicas.have_told("working")
    clock.advance(seconds=61)
    outcome = (await playing)["task"]

    await replicas.have_told("working", "failed")
    assert outcome["status"] == "failed"
    assert outcome["error"] == await client.error("tasks/get", task.id)
    assert outcome["end"] == "graceful"


async def test_of_a_task_of_somebody_else_nothing_is_told(
    replicas: Replicas, driver: Driver
) -> None:
    task = await replicas.task(await replicas.here.keyed_client())
    outcome = (await replicas.listening(driver, task.id, replicas.here.client()))["task"]
    assert outcome["end"] == "graceful"
    assert not outcome.get("acknowledged")
    assert not replicas.told.exists()


async def test_a_client_with_too_many_streams_is_refused(
    replicas: Replicas, driver: Driver
) -> None:
    client = await replicas.here.keyed_client()
    task = await replicas.task(client)
    there = replicas.there
    async with listening(there.http, client.at(there), [task.id]) as stream:
        await stream.acknowledged()
        outcome = (await replicas.listening(driver, task.id, client))["task"]
    assert outcome["end"] == (429 if driver is EXT_TASKS else -32603)
    assert not replicas.told.exists()


# --- The end of the broker ------------------------------------------------------------------------


@pytest.mark.parametrize("killed", [False, True], ids=["SIGTERM", "SIGKILL"])
async def test_a_client_learns_that_the_broker_ends(killed: bool, tmp_path: Path) -> None:
    with running_broker("listening") as broker:
        async with broker.tool_server("tools") as tools:
            key = secret(json.loads(await broker.run("client add desktop --json"))["apiKey"])
            owner = {"authorization": f"Bearer {key}"}
            task = await tools.create(owner, pollIntervalMs=RARELY)

            async def play(driver: Driver) -> Outcome:
                acts = {"task": listen(task.id, tmp_path / driver.name)}
                return (await driver.play(f"{broker.url}/mcp", acts, token=key))["task"]

            plays = {each.name: asyncio.create_task(play(each)) for each in LISTENERS}
            for name in plays:
                await eventually((tmp_path / name).exists)
            await asyncio.to_thread(broker.kill if killed else broker.terminate)
            outcomes = {name: await playing for name, playing in plays.items()}
    assert {outcome["status"] for outcome in outcomes.values()} == {"working"}
    ends = {name: outcome["end"] for name, outcome in outcomes.items()}
    lost = {EXT_TASKS.name: "remote", MCP.name: -32000}
    assert ends == (lost if killed else dict.fromkeys(lost, "graceful"))


# --- With a tool server that is one ---------------------------------------------------------------


async def test_a_client_is_told_of_a_task_that_its_call_has_become(
    broker: BrokerProcess, driver: Driver, tmp_path: Path
) -> None:
    url, id_file, told = f"{broker.url}/mcp/demo", tmp_path / "id", tmp_path / "told"
    await driver.play(url, {"left": leave(id_file, "confirm_delete", filename="old.txt")})
    task = secret(id_file.read_text())

    outcome = (await driver.play(url, {"task": listen(task, told)}))["task"]

    assert told.read_text().split()[-1] == "completed"
    assert outcome["asked"] == ["Delete old.txt?"]
    assert outcome["text"] == "old.txt is deleted."
    assert outcome["end"] == "graceful"
