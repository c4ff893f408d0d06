"""MCP client libraries that nobody here wrote, as judges of the wire (see `drivers.py`)."""

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.clients.drivers import (
    EXT_TASKS,
    FASTMCP,
    MCP,
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
from tests.clients.tool_servers import demo_tools, fastmcp_tools
from tests.support.processes import BrokerProcess, running_broker
from tests.support.secrecy import LOGS, issued, new_token, secret

pytestmark = pytest.mark.clients

NOT_FOUND = dict.fromkeys(("get", "update", "cancel"), -32602)


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with running_broker("clients", demo=True) as broker:
        yield broker


@pytest.fixture(scope="module", params=(EXT_TASKS, FASTMCP, MCP), ids=lambda each: each.name)
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
async def outcomes(broker: BrokerProcess, driver: Driver) -> dict[str, Outcome]:
    return await driver.play(f"{broker.url}/mcp/demo", ACTS)


def test_a_tool_without_a_task_is_passed_through(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["sync"]["text"] == "Hello, Ada!"


def test_the_result_of_a_slow_tool_arrives(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["slow"]["text"].startswith("waited for: the largest of")
    assert outcomes["followed"]["status"] == "completed"
    assert outcomes["followed"]["text"].startswith("followed: the largest of")


def test_a_tool_that_reports_a_failure_has_completed(outcomes: dict[str, Outcome]) -> None:
    outcome = {"status": "completed", "text": "The job failed.", "isError": True, "asked": []}
    assert outcomes["tool error"] == outcome


def test_a_protocol_error_fails_the_task(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["protocol error"]["status"] == "failed"
    error = {"code": -32603, "message": "The job broke down"}
    assert outcomes["protocol error"]["error"] == error


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


# --- With a key, and over a crash -----------------------------------------------------------------


@pytest.fixture(scope="module")
async def tools(broker: BrokerProcess) -> AsyncIterator[str]:
    """The URL of the gateway to tools that are not for everybody."""
    async with demo_tools(broker, "tools"):
        yield f"{broker.url}/mcp/tools"


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


async def test_a_task_that_was_left_is_resumed_by_its_id_after_a_crash_of_the_broker(
    driver: Driver, broker: BrokerProcess, tools: str, key: str, tmp_path: Path
) -> None:
    slow, question = tmp_path / "slow", tmp_path / "question"
    left = {
        "slow": leave(slow, "slow_compute", seconds=3, label="survived"),
        "question": leave(question, "confirm_delete", filename="old.txt"),
    }
    await driver.play(tools, left, token=key)

    broker.kill()
    broker.start()

    resumed = {"slow": resume(secret(slow.read_text()))}
    outcomes = await driver.play(tools, resumed, token=key)
    assert outcomes["slow"]["status"] == "completed"
    assert outcomes["slow"]["text"].startswith("survived: the largest of")

    # The broker's own endpoint knows the task as well.
    resumed = {"question": resume(secret(question.read_text()))}
    outcomes = await driver.play(f"{broker.url}/mcp", resumed, token=key)
    assert outcomes["question"]["asked"] == ["Delete old.txt?"]
    assert outcomes["question"]["text"] == "old.txt is deleted."


async def test_a_task_of_somebody_else_is_not_found(
    driver: Driver, tools: str, key: str, tmp_path: Path
) -> None:
    id_file = tmp_path / "id"
    await driver.play(tools, {"left": leave(id_file, "slow_compute", seconds=0)}, token=key)
    task = secret(id_file.read_text())

    outcomes = await driver.play(tools, {"foreign": probe(task)}, token=new_token())

    assert outcomes["foreign"] == NOT_FOUND | {"asked": []}


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
    assert elsewhere["left"] == NOT_FOUND | {"asked": []}


# --- At last --------------------------------------------------------------------------------------


def test_no_log_has_a_key_or_the_id_of_a_task(broker: BrokerProcess) -> None:
    logs = "\n".join(path.read_text(errors="replace") for path in LOGS.glob("*.log"))
    assert "request handled" in logs
    assert len(issued()) > 4
    assert not [each for each in issued() if each in logs]
