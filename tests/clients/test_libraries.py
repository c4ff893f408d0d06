"""MCP client libraries that nobody here wrote, as judges of the wire (see `drivers.py`)."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.clients.drivers import (
    FASTMCP,
    LEGACY,
    MODERN,
    Driver,
    GaveUp,
    Outcome,
    call,
    cancel,
    follow,
    leave,
    probe,
    resume,
)
from tests.clients.tool_servers import fastmcp_tools
from tests.support.processes import BrokerProcess
from tests.support.secrecy import new_token, secret

pytestmark = pytest.mark.clients

Play = asyncio.Task[dict[str, Outcome]]

NOT_FOUND = {
    "modern": dict.fromkeys(("get", "update", "cancel"), -32602),
    "legacy": dict.fromkeys(("get", "result", "cancel"), -32602),
}


DRIVERS = MODERN + LEGACY


@pytest.fixture(scope="module", params=DRIVERS, ids=lambda each: each.name)
def driver(request: pytest.FixtureRequest) -> Driver:
    driver: Driver = request.param
    return driver


# --- What each library makes of the demo's tools, as anybody --------------------------------------

ACTS = {
    "sync": call("greet", name="Ada"),
    "slow": call("slow_compute", seconds=1, label="waited for"),
    "followed": follow("slow_compute", seconds=1, label="followed"),
    "tool error": follow("failing_job"),
    "protocol error": follow("protocol_error_job"),
    "question": follow("confirm_delete", filename="old.txt"),
    "two questions": follow("multi_input"),
    "cancelled": cancel("slow_compute", seconds=60),
}


@pytest.fixture(scope="module")
async def plays(broker: BrokerProcess) -> AsyncIterator[dict[str, Play]]:
    """What every driver does meanwhile: they wait for tasks most of the time."""
    url = f"{broker.url}/mcp/demo"
    plays = {each.name: asyncio.create_task(each.play(url, ACTS)) for each in DRIVERS}
    yield plays
    await asyncio.gather(*plays.values(), return_exceptions=True)


@pytest.fixture(scope="module")
async def outcomes(plays: dict[str, Play], driver: Driver) -> dict[str, Outcome]:
    return await plays[driver.name]


def test_a_tool_without_a_task_is_passed_through(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["sync"]["text"] == "Hello, Ada!"


def test_the_result_of_a_slow_tool_arrives(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["slow"]["text"].startswith("waited for: the largest of")
    assert outcomes["followed"]["status"] == "completed"
    assert outcomes["followed"]["text"].startswith("followed: the largest of")


def test_a_tool_that_reports_a_failure_has_completed_or_of_old_failed(
    driver: Driver, outcomes: dict[str, Outcome]
) -> None:
    outcome = outcomes["tool error"]
    if driver.era == "modern":
        text = {"text": "The job failed.", "isError": True}
        assert outcome == {"status": "completed", **text, "asked": []}
    else:
        assert outcome["status"] == "failed"
        assert outcome["error"]["message"] == "The job failed."


def test_a_protocol_error_fails_the_task(driver: Driver, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes["protocol error"]
    assert outcome["status"] == "failed"
    assert outcome["error"]["message"] == "The job broke down"
    if driver.era == "modern":  # of old, not every library asks for more than the message
        assert outcome["error"]["code"] == -32603


def test_a_question_reaches_the_user_and_the_answer_the_tool(
    outcomes: dict[str, Outcome],
) -> None:
    assert outcomes["question"]["asked"] == ["Delete old.txt?"]
    assert outcomes["question"]["text"] == "old.txt is deleted."


def test_two_questions_at_once_are_both_answered(outcomes: dict[str, Outcome]) -> None:
    questions = ["What is your name?", "Where do you live?"]
    assert sorted(outcomes["two questions"]["asked"]) == questions
    assert outcomes["two questions"]["text"] == "name: accept, city: accept"


def test_a_cancelled_task_ends_cancelled(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["cancelled"]["status"] == "cancelled"


# --- With a key -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
async def key(broker: BrokerProcess, driver: Driver) -> str:
    """A client key of the broker."""
    shown = json.loads(await broker.run(f"client add {driver.name} --json"))
    return secret(shown["apiKey"])


async def test_where_anonymous_is_not_allowed_a_key_is(
    driver: Driver, tools: str, key: str
) -> None:
    acts = {"sync": call("greet", name="Ada"), "slow": follow("slow_compute", seconds=0)}

    with pytest.raises(GaveUp):
        await driver.play(tools, acts)
    outcomes = await driver.play(tools, acts, token=key)

    assert outcomes["sync"]["text"] == "Hello, Ada!"
    assert outcomes["slow"]["status"] == "completed"


async def test_a_task_of_somebody_else_is_not_found(
    driver: Driver, tools: str, key: str, tmp_path: Path
) -> None:
    id_file = tmp_path / "id"
    await driver.play(tools, {"left": leave(id_file, "slow_compute", seconds=0)}, token=key)
    task = secret(id_file.read_text())

    outcomes = await driver.play(tools, {"foreign": probe(task)}, token=new_token())

    assert outcomes["foreign"] == NOT_FOUND[driver.era] | {"asked": []}


# --- Over a crash ---------------------------------------------------------------------------------


async def test_tasks_that_were_left_are_resumed_by_their_ids_after_a_crash_of_the_broker(
    broker: BrokerProcess, tools: str, tmp_path: Path
) -> None:
    key = secret(json.loads(await broker.run("client add survivor --json"))["apiKey"])

    async def leave_tasks(driver: Driver) -> None:
        slow = leave(tmp_path / f"{driver.name}-slow", "slow_compute", seconds=6, label="survived")
        question = leave(tmp_path / f"{driver.name}-question", "confirm_delete", filename="old.txt")
        await driver.play(tools, {"slow": slow, "question": question}, token=key)

    async def resume_tasks(driver: Driver) -> None:
        slow = secret((tmp_path / f"{driver.name}-slow").read_text())
        outcomes = await driver.play(tools, {"slow": resume(slow)}, token=key)
        assert outcomes["slow"]["status"] == "completed"
        assert outcomes["slow"]["text"].startswith("survived: the largest of")

        # The broker's own endpoint knows the tasks as well.
        question = secret((tmp_path / f"{driver.name}-question").read_text())
        url = f"{broker.url}/mcp"
        outcomes = await driver.play(url, {"question": resume(question)}, token=key)
        assert outcomes["question"]["asked"] == ["Delete old.txt?"]
        assert outcomes["question"]["text"] == "old.txt is deleted."

    await asyncio.gather(*map(leave_tasks, DRIVERS))
    broker.kill()
    broker.start()
    await asyncio.gather(*map(resume_tasks, DRIVERS))


# --- Servers with tasks of their own --------------------------------------------------------------


async def test_a_server_that_keeps_its_tasks_itself_works_behind_the_gateway(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    with fastmcp_tools() as url:
        add = f"--mcp-url {url} --allow-anonymous"
        await broker.run(f"backend add own-tasks {add} --forward-unknown-tasks")
        await broker.run(f"backend add no-own-tasks {add}")

        acts = {
            "waited for": call("count", to=3),
            "followed": follow("count", to=3),
            "cancelled": cancel("count", to=600),
            "left": leave(tmp_path / "id", "count", to=3),
        }
        outcomes = await FASTMCP.play(f"{broker.url}/mcp/own-tasks", acts)
        task = (tmp_path / "id").read_text()
        elsewhere = await FASTMCP.play(f"{broker.url}/mcp/no-own-tasks", {"left": probe(task)})

    assert outcomes["waited for"]["text"] == "counted to 3"
    assert outcomes["followed"]["text"] == "counted to 3"
    assert outcomes["cancelled"]["status"] == "cancelled"
    assert elsewhere["left"] == NOT_FOUND[FASTMCP.era] | {"asked": []}
