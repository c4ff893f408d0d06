"""The TypeScript SDK, and the example tool server that is written with it, against a real broker.

The example runs as a process of its own and speaks MCP by way of the official server package.
What it does not show is tried in scripts of a few lines, which read like a tool server's code.
"""

import asyncio
import json
import signal
import subprocess
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, BinaryIO

import httpx
import pytest

from tests.support.processes import (
    ROOT,
    BrokerProcess,
    environment,
    free_port,
    listens,
    open_log,
    running_broker,
)
from tests.support.secrecy import LOGS, issued, new_token, secret
from tests.support.service import CAPABILITIES_KEY, META, TASKS, McpClient, ToolServer
from tests.support.waiting import eventually, until

pytestmark = pytest.mark.clients

SDK = ROOT / "sdk/typescript"
EXAMPLE = ROOT / "examples/typescript"
WITHOUT_TASKS = {**META, CAPABILITIES_KEY: {"elicitation": {"form": {}}}}
INTERNAL_ERROR = -32603
ENDLESS = {"limit": 1_000_000_000}


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    for built in (SDK / "dist/index.js", EXAMPLE / "dist/server.js"):
        if not built.exists():
            pytest.fail(f"{built} is not there: run `make clients`")
    with running_broker("sdk-typescript") as broker:
        yield broker


@pytest.fixture(scope="module")
async def tools(broker: BrokerProcess) -> AsyncIterator[ToolServer]:
    async with broker.tool_server("primes") as tools:
        yield tools


def settings(tools: ToolServer, **more: str) -> dict[str, str]:
    """The environment in which a tool server finds its broker."""
    return {
        **environment(),
        "BROKER_URL": str(tools._http.base_url),
        "BROKER_BACKEND": tools.name,
        "BROKER_API_KEY": tools.key,
        "BROKER_WEBHOOK_SECRET": tools.webhook_secret,
        **more,
    }


def log() -> BinaryIO:
    return open_log("tool-server-typescript")


class Example:
    """The example tool server, and one client of it that polls the broker."""

    COMMAND = ("node", EXAMPLE / "dist/server.js")

    def __init__(self, tools: ToolServer) -> None:
        self.port = free_port()
        self.client = McpClient(tools._http, new_token())
        self._settings = settings(tools, PORT=str(self.port))
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=30)
        self.process = self._start()

    def restart(self) -> None:
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        with log() as said:
            process = subprocess.Popen(self.COMMAND, env=self._settings, stdout=said, stderr=said)
        until(lambda: listens(self.port) or process.poll() is not None)
        assert process.poll() is None, f"the example ended, see {said.name}"
        return process

    async def request(self, method: str, params: Any = None, **more: Any) -> dict[str, Any]:
        """The result of a request to the tool server itself, with the client's credential."""
        client = McpClient(self._http, self.client.token)
        response = await client.request(method, params, **more)
        assert response.status_code == 200, response.text
        result: dict[str, Any] = response.json()["result"]
        return result

    async def call(self, tool: str, *, meta: Any = META, **params: Any) -> dict[str, Any]:
        params = {"name": tool, "arguments": {}, **params}
        return await self.request("tools/call", params, headers={"mcp-name": tool}, meta=meta)

    async def task(self, tool: str, arguments: Any = None) -> str:
        """Calls a tool; the id of the task that the call has become."""
        result = await self.call(tool, arguments=arguments or {})
        assert result["resultType"] == "task", result
        return secret(result["taskId"])

    async def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        await self._http.aclose()


@pytest.fixture
async def example(tools: ToolServer) -> AsyncIterator[Example]:
    example = Example(tools)
    yield example
    await example.close()


async def comes_to(client: McpClient, task_id: str, status: str) -> dict[str, Any]:
    """Polls a task until it has this status; the task as the client sees it then."""
    seen: list[dict[str, Any]] = []

    async def there() -> bool:
        seen.append(await client.get(task_id))
        return bool(seen[-1]["status"] == status)

    await eventually(there)
    return seen[-1]


def text_of(result: dict[str, Any]) -> str:
    [content] = result["content"]
    text: str = content["text"]
    return text


# --- the example ------------------------------------------------------------------------------


async def test_the_example_tells_that_it_has_tasks(example: Example) -> None:
    discovered = await example.request("server/discover")
    assert discovered["capabilities"]["extensions"] == {TASKS: {}}
    tools = (await example.request("tools/list"))["tools"]
    assert [tool["name"] for tool in tools] == ["greet", "count_primes", "ask"]


async def test_a_client_without_tasks_waits_for_the_plain_result(example: Example) -> None:
    greeting = await example.call("greet", arguments={"name": "Ada"})
    assert text_of(greeting) == "Hello, Ada!"

    arguments = {"limit": 1_000}
    counted = await example.call("count_primes", arguments=arguments, meta=WITHOUT_TASKS)
    assert counted["resultType"] == "complete"
    assert text_of(counted) == "There are 168 primes below 1000."

    asked = await example.call("ask", meta=WITHOUT_TASKS)
    assert asked["resultType"] == "input_required"
    answers = {"limit": {"action": "accept", "content": {"limit": 100}}}
    answered = await example.call("ask", inputResponses=answers, meta=WITHOUT_TASKS)
    assert text_of(answered) == "There are 25 primes below 100."


async def test_a_client_with_tasks_polls_the_broker_for_the_result(example: Example) -> None:
    created = await example.call("count_primes", arguments={"limit": 100_000})
    task_id = secret(created["taskId"])

    # The package adds an empty `content`; what the broker made is all there, as it was made.
    added = {"content", "_meta"}
    assert {name: value for name, value in created.items() if name not in added} == {
        "resultType": "task",
        "taskId": task_id,
        "status": "working",
        "createdAt": created["createdAt"],
        "lastUpdatedAt": created["createdAt"],
        "ttlMs": created["ttlMs"],
        "pollIntervalMs": 500,
    }
    task = await comes_to(example.client, task_id, "completed")
    assert text_of(task["result"]) == "There are 9592 primes below 100000."


async def test_a_task_shows_its_progress_and_stops_when_it_is_cancelled(example: Example) -> None:
    task_id = await example.task("count_primes", ENDLESS)

    async def progress() -> bool:
        return str((await example.client.get(task_id)).get("statusMessage")).endswith(" %")

    await eventually(progress)
    await example.client.cancel(task_id)
    await comes_to(example.client, task_id, "cancelled")


async def test_a_task_asks_and_goes_on_with_the_answer(example: Example) -> None:
    task_id = await example.task("ask")

    asking = await comes_to(example.client, task_id, "input_required")
    schema = asking["inputRequests"]["limit"]["params"]["requestedSchema"]
    assert schema["properties"]["limit"]["type"] == "integer"
    answer = {"action": "accept", "content": {"limit": 100}}
    await example.client.update(task_id, {"limit": answer})

    task = await comes_to(example.client, task_id, "completed")
    assert text_of(task["result"]) == "There are 25 primes below 100."


async def test_a_question_that_is_declined_ends_in_a_result_that_says_so(example: Example) -> None:
    task_id = await example.task("ask")
    await comes_to(example.client, task_id, "input_required")
    await example.client.update(task_id, {"limit": {"action": "decline"}})
    task = await comes_to(example.client, task_id, "completed")
    assert task["result"]["isError"] is True


async def test_a_tool_server_that_is_killed_leaves_nothing_half(example: Example) -> None:
    task_id = await example.task("count_primes", ENDLESS)
    example.process.kill()
    example.process.wait(10)

    example.restart()
    task = await comes_to(example.client, task_id, "failed")
    assert task["error"] == {
        "code": INTERNAL_ERROR,
        "message": "the tool server stopped reporting",
    }
    after = await example.task("count_primes", {"limit": 100})
    await comes_to(example.client, after, "completed")


async def test_a_tool_server_that_is_stopped_says_so(example: Example) -> None:
    task_id = await example.task("count_primes", ENDLESS)
    example.process.send_signal(signal.SIGTERM)
    assert example.process.wait(10) == 0
    task = await example.client.get(task_id)
    assert task["status"] == "failed"
    assert task["error"] == {"code": INTERNAL_ERROR, "message": "the tool server was stopped"}


# --- the SDK ----------------------------------------------------------------------------------


def test_the_tests_of_the_sdk_pass() -> None:
    command = ("npm", "test")
    run = subprocess.run(command, cwd=SDK, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@asynccontextmanager
async def script(text: str, tools: ToolServer, **more: str) -> AsyncIterator[Process]:
    """Runs the code of a tool server, which finds the SDK as its users do: by its name."""
    beginning = """
        import { ownerFrom, TaskBroker, TaskFailed, textResult } from "taskbroker-sdk";
        const say = (value) => console.log(JSON.stringify(value));
        const broker = TaskBroker.fromEnv({ onError: (error) => console.error("noted:", error) });
        const owner = ownerFrom({ authorization: `Bearer ${process.env.CLIENT_TOKEN}` });
    """
    with log() as said:
        process = await asyncio.create_subprocess_exec(
            *("node", "--input-type=module", "--eval", beginning + text),
            cwd=SDK,
            env=settings(tools, **more),
            stdout=PIPE,
            stderr=said,
        )
    try:
        yield process
        async with asyncio.timeout(30):
            assert await process.wait() == 0, f"the script failed, see {said.name}"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def said_by(process: Process) -> Any:
    """The next line that a script says."""
    assert process.stdout
    async with asyncio.timeout(30):
        return json.loads(await process.stdout.readline())


@pytest.fixture
def client(tools: ToolServer) -> McpClient:
    return McpClient(tools._http, new_token())


async def test_work_that_throws_fails_its_task(tools: ToolServer, client: McpClient) -> None:
    works = """
        const works = [
          () => { throw new TaskFailed(-32050, "no luck", { why: "because" }); },
          () => { throw new Error("cannot read /etc/shadow"); },
          () => textResult("no such file", { isError: true }),
        ];
        const tasks = await Promise.all(works.map((work) => broker.start(owner, work)));
        say(tasks.map((task) => task.createTaskResult.taskId));
    """
    async with script(works, tools, CLIENT_TOKEN=str(client.token)) as process:
        meant, mistake, ran = map(secret, await said_by(process))
        task = await comes_to(client, meant, "failed")
        assert task["error"] == {"code": -32050, "message": "no luck", "data": {"why": "because"}}
        task = await comes_to(client, mistake, "failed")
        error = {"code": INTERNAL_ERROR, "message": "internal error in the tool server"}
        assert task["error"] == error
        task = await comes_to(client, ran, "completed")
        assert task["result"]["isError"] is True
    assert "cannot read /etc/shadow" in (LOGS / "tool-server-typescript.log").read_text()


async def test_silent_work_learns_that_it_is_cancelled(
    tools: ToolServer, client: McpClient
) -> None:
    silent = """
        import { setTimeout as sleep } from "node:timers/promises";
        const task = await broker.start(owner, async ({ signal }) => {
          await sleep(3_600_000, undefined, { signal });
        });
        say(task.createTaskResult.taskId);
    """
    async with script(silent, tools, CLIENT_TOKEN=str(client.token)) as process:
        task_id = secret(await said_by(process))
        await client.cancel(task_id)
        task = await comes_to(client, task_id, "cancelled")
        assert task["statusMessage"] == "stopped, as the client asked"


async def test_a_look_does_not_touch_the_task_and_a_sign_of_life_does(
    tools: ToolServer, client: McpClient
) -> None:
    silent = """
        import { once } from "node:events";
        const looking = TaskBroker.fromEnv({ heartbeatMs: 10 });
        const work = async ({ signal }) => { await once(signal, "abort"); };
        const idle = await looking.start(owner, work, { stallAfterMs: 3_600_000 });
        const lively = await looking.start(owner, work, { stallAfterMs: 3_000 });
        const created = (await lively.read()).lastUpdatedAt;
        while ((await lively.read()).lastUpdatedAt === created);
        const { createdAt, lastUpdatedAt } = await idle.read();
        say(createdAt === lastUpdatedAt);
        await looking.close();
    """
    async with script(silent, tools, CLIENT_TOKEN=str(client.token)) as process:
        assert await said_by(process) is True


async def test_a_cancelled_task_answers_no_more_questions(
    tools: ToolServer, client: McpClient
) -> None:
    asks = """
        const task = await broker.create(owner);
        say(task.createTaskResult.taskId);
        const question = { method: "roots/list" };
        const outcome = await task.ask({ first: question, second: question }).catch((e) => e.name);
        say([outcome, (await task.cancelled("as you like")).status]);
    """
    async with script(asks, tools, CLIENT_TOKEN=str(client.token)) as process:
        task_id = secret(await said_by(process))
        await comes_to(client, task_id, "input_required")
        await client.update(task_id, {"first": {"roots": []}})
        await client.cancel(task_id)
        assert await said_by(process) == ["CancelRequested", "cancelled"]


async def test_a_restarted_tool_server_finds_its_jobs(tools: ToolServer, client: McpClient) -> None:
    before = """
        const tool = "resize";
        await Promise.all(Array.from({ length: 201 }, () => broker.create(owner, { tool })));
        const task = await broker.create(owner, { tool, externalId: "job-81", ttlMs: 3_600_000 });
        const again = await broker.create(owner, { tool, externalId: "job-81" });
        say([task.createTaskResult.taskId, again.ref === task.ref]);
    """
    async with script(before, tools, CLIENT_TOKEN=str(client.token)) as process:
        task_id, same = await said_by(process)
        assert same

    after = """
        const found = await broker.find("job-81");
        await broker.task(found.taskRef).complete(textResult("late, but done"));
        let left = 0;
        for await (const { tool } of broker.list({ status: "working" })) left += tool === "resize";
        say([found.ttlMs, left, await broker.find("job-82") ?? "no such job"]);
        await broker.resume(found.taskRef, () => { throw new Error("it is over"); });
    """
    async with script(after, tools) as process:
        assert await said_by(process) == [3_600_000, 201, "no such job"]
    task = await client.get(secret(task_id))
    assert text_of(task["result"]) == "late, but done"


async def test_what_the_broker_refuses_is_said_in_one_sentence(tools: ToolServer) -> None:
    refused = """
        const told = (error) => [error.name, error.status, error.message];
        say(await broker.create({}, { ttlMs: 0 }).catch(told));
    """
    async with script(refused, tools) as process:
        name, status, message = await said_by(process)
    assert (name, status) == ("Problem", 422)
    assert "/ttlMs: must be at least 1" in message


def test_nothing_was_said_that_must_stay_secret() -> None:
    said = (LOGS / "tool-server-typescript.log").read_text()
    assert "noted:" in said
    assert not [word for word in issued() if word in said]
