"""What only clients of 2025 do. What all clients do is in `test_libraries.py`."""

import json
from pathlib import Path
from secrets import token_hex

import pytest

from tests.clients.drivers import (
    INSPECTOR,
    INSPECTOR_LEGACY,
    LEGACY,
    MCP_1,
    TOOLS,
    Driver,
    GaveUp,
    call,
    ext_tasks_of,
    find,
    follow,
    leave,
    probe,
    resume,
    wait,
)
from tests.support.processes import BrokerProcess
from tests.support.secrecy import secret

pytestmark = pytest.mark.clients


@pytest.fixture(scope="module", params=LEGACY, ids=lambda each: each.name)
def driver(request: pytest.FixtureRequest) -> Driver:
    driver: Driver = request.param
    return driver


@pytest.fixture
async def key(broker: BrokerProcess) -> str:
    """A key of a client that has no tasks yet."""
    name = f"client-{token_hex(4)}"
    return secret(json.loads(await broker.run(f"client add {name} --json"))["apiKey"])


# --- Tasks of 2025-11-25 --------------------------------------------------------------------------


async def test_who_waits_for_the_result_gets_it_and_is_asked_meanwhile(
    driver: Driver, broker: BrokerProcess
) -> None:
    acts = {
        "slow": wait("slow_compute", seconds=1, label="waited for"),
        "questions": wait("multi_input"),
        "tool error": wait("failing_job"),
    }

    outcomes = await driver.play(f"{broker.url}/mcp/demo", acts)

    assert outcomes["slow"]["text"].startswith("waited for: the largest of")
    assert sorted(outcomes["questions"]["asked"]) == ["What is your name?", "Where do you live?"]
    assert outcomes["questions"]["text"] == "name: accept, city: accept"
    assert outcomes["tool error"]["status"] == "failed"


async def test_a_client_with_a_key_finds_its_tasks_page_by_page(
    driver: Driver, tools: str, key: str, tmp_path: Path
) -> None:
    files = [tmp_path / str(number) for number in range(51)]
    left = {file.name: leave(file, "slow_compute", seconds=0) for file in files}
    await driver.play(tools, left, token=key)
    oldest = secret(files[0].read_text())

    outcomes = await driver.play(
        tools,
        {"its own": find(oldest), "no task": find("x"), "ended": probe(oldest)},
        token=key,
    )

    assert outcomes["its own"] == {"pages": 2, "found": True, "asked": []}
    assert outcomes["no task"] == {"pages": 2, "found": False, "asked": []}
    ended = {"get": None, "result": None, "cancel": -32602}
    assert outcomes["ended"] == ended | {"asked": []}


async def test_nobody_is_shown_the_tasks_of_the_nameless(
    driver: Driver, broker: BrokerProcess
) -> None:
    with pytest.raises(GaveUp):
        await driver.play(f"{broker.url}/mcp/demo", {"all": find("x")})


# --- Versions without tasks -----------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2025-06-18", "2025-03-26"])
async def test_a_client_of_a_version_without_tasks_waits_for_its_calls(
    broker: BrokerProcess, version: str
) -> None:
    driver = ext_tasks_of(version)
    acts = {
        "sync": call("greet", name="Ada"),
        "slow": call("slow_compute", seconds=1, label="waited for"),
    }

    outcomes = await driver.play(f"{broker.url}/mcp/demo", acts)

    assert outcomes["sync"]["text"] == "Hello, Ada!"
    assert outcomes["slow"]["text"].startswith("waited for: the largest of")
    with pytest.raises(GaveUp, match="did not become a task"):
        await driver.play(f"{broker.url}/mcp/demo", {"slow": follow("slow_compute", seconds=0)})


# --- The Inspector, in both eras ------------------------------------------------------------------


@pytest.mark.parametrize("inspector", [INSPECTOR, INSPECTOR_LEGACY], ids=lambda each: each.name)
async def test_the_inspector_calls_tools_as_tasks(inspector: Driver, tools: str, key: str) -> None:
    acts = {
        "tools": TOOLS,
        "sync": call("greet", name="Ada"),
        "slow": call("slow_compute", seconds=0, label="waited for"),
        "followed": follow("slow_compute", seconds=0, label="followed"),
        "tool error": follow("failing_job"),
    }

    outcomes = await inspector.play(tools, acts, token=key)

    assert outcomes["sync"]["text"] == "Hello, Ada!"
    assert outcomes["slow"]["text"].startswith("waited for: the largest of")
    assert outcomes["followed"]["text"].startswith("followed: the largest of")
    support = outcomes["tools"]["tools"]
    if inspector.era == "modern":
        assert outcomes["tool error"]["text"] == "The job failed."
        assert set(support.values()) == {None}
    else:
        assert outcomes["tool error"]["error"]["message"] == "The job failed."
        assert support["greet"] is None
        assert (support["slow_compute"], support["failing_job"]) == ("optional", "required")


async def test_the_inspector_finds_the_tasks_that_its_key_has_made(
    tools: str, key: str, tmp_path: Path
) -> None:
    id_file = tmp_path / "id"
    await MCP_1.play(tools, {"left": leave(id_file, "slow_compute", seconds=0)}, token=key)
    task = secret(id_file.read_text())

    outcomes = await INSPECTOR_LEGACY.play(
        tools, {"found": find(task), "resumed": resume(task)}, token=key
    )

    assert outcomes["found"]["found"] is True
    assert outcomes["resumed"]["status"] == "completed"
