"""`taskbroker serve --demo`: what a newcomer sees first."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from taskbroker_sdk import TaskBroker
from tests.sdk.signals import delivery, message
from tests.support.processes import BrokerProcess, folder_for_all, gone, running_broker
from tests.support.secrecy import secret
from tests.support.service import META, VERSION
from tests.support.waiting import until


def ask(broker: BrokerProcess, method: str, **params: object) -> httpx.Response:
    """A modern request of an anonymous client to the demo's tools."""
    headers = {
        "accept": "application/json, text/event-stream",
        "mcp-protocol-version": VERSION,
        "mcp-method": method,
    }
    if name := params.get("taskId") or params.get("name"):
        headers["mcp-name"] = str(name)
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": META}}
    return httpx.post(f"{broker.url}/mcp/demo", json=message, headers=headers, timeout=30)


def tool_server_of(broker: BrokerProcess) -> int:
    """The process of the demo tool server."""
    threads = Path(f"/proc/{broker.process.pid}/task").iterdir()
    children = " ".join((thread / "children").read_text() for thread in threads).split()
    [found] = [pid for pid in children if b"demo" in Path("/proc", pid, "cmdline").read_bytes()]
    return int(found)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_demo_tools_are_behind_the_gateway_from_the_first_request(workers: int) -> None:
    with running_broker("demo", workers=workers, demo=True) as broker:
        answer = ask(broker, "tools/call", name="greet", arguments={"name": "newcomer"})
        assert answer.json()["result"]["content"][0]["text"] == "Hello, newcomer!"

        called = ask(broker, "tools/call", name="slow_compute", arguments={"seconds": 0.2})
        task = called.json()["result"]
        assert task["resultType"] == "task"
        until(lambda: _status(broker, task["taskId"]) == "completed")


def _status(broker: BrokerProcess, task_id: str) -> str:
    status: str = ask(broker, "tasks/get", taskId=task_id).json()["result"]["status"]
    return status


def test_a_signal_stops_what_the_demo_does() -> None:
    with running_broker("demo-signal", demo=True) as broker:
        called = ask(broker, "tools/call", name="slow_compute", arguments={"seconds": 600})
        task_id = called.json()["result"]["taskId"]
        settings = environment_of(tool_server_of(broker))
        with TaskBroker.from_env(settings) as tools:
            [task] = tools.list()
        sent = delivery(message(taskRef=task.ref), secret(settings["BROKER_WEBHOOK_SECRET"]))
        registered = shown(broker)

        answer = httpx.post(registered["callbackUrl"], content=sent.body, headers=sent.headers)

        assert answer.status_code == 204
        until(lambda: _status(broker, task_id) == "cancelled")
        assert broker.terminate() == 0
        left = shown(broker)
    assert left["mcpUrl"] is left["callbackUrl"] is None


def environment_of(process: int) -> dict[str, str]:
    variables = Path("/proc", str(process), "environ").read_text().split("\0")
    return dict(variable.split("=", 1) for variable in variables if variable)


def shown(broker: BrokerProcess) -> dict[str, Any]:
    """The demo as it is registered."""
    backend: dict[str, Any] = json.loads(asyncio.run(broker.run("backend show demo --json")))
    return backend


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_demo_ends_with_the_broker(how: signal.Signals) -> None:
    with running_broker("demo-end", demo=True) as broker:
        tools = tool_server_of(broker)
        os.kill(broker.process.pid, how)
        broker.process.wait(60)
        until(lambda: gone(tools))


@pytest.mark.slow
def test_the_demo_is_started_again_when_it_dies() -> None:
    with running_broker("demo-dies", demo=True) as broker:
        tools = tool_server_of(broker)
        os.kill(tools, signal.SIGKILL)
        answer = ask(broker, "tools/call", name="greet", arguments={"name": "again"})
        if answer.status_code == 502:  # it was killed with the call in its hands
            answer = ask(broker, "tools/call", name="greet", arguments={"name": "again"})
        assert answer.json()["result"]["content"][0]["text"] == "Hello, again!"
        assert tool_server_of(broker) != tools


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_what_the_demo_did_when_it_was_stopped_is_known_afterwards(workers: int) -> None:
    """The tool server ends first, and reports; the broker keeps the task."""
    with running_broker("demo-restart", workers=workers, demo=True) as broker:
        called = ask(broker, "tools/call", name="slow_compute", arguments={"seconds": 60})
        task_id = called.json()["result"]["taskId"]
        assert broker.terminate() == 0
        broker.start()
        seen = ask(broker, "tasks/get", taskId=task_id).json()["result"]
        assert seen["status"] == "failed"
        assert seen["error"]["message"] == "the tool server was stopped"
        answer = ask(broker, "tools/call", name="greet", arguments={"name": "again"})
        assert answer.json()["result"]["content"][0]["text"] == "Hello, again!"


def test_a_stream_ends_cleanly_when_the_broker_does() -> None:
    with running_broker("demo-stream", demo=True) as broker:
        listening = {"notifications": {"toolsListChanged": True}, "_meta": META}
        message = {
            "jsonrpc": "2.0", "id": 1, "method": "subscriptions/listen", "params": listening,
        }  # fmt: skip
        headers = {
            "accept": "application/json, text/event-stream",
            "mcp-protocol-version": VERSION,
            "mcp-method": "subscriptions/listen",
        }
        url = f"{broker.url}/mcp/demo"
        with httpx.stream("POST", url, json=message, headers=headers, timeout=60) as stream:
            incoming = stream.iter_text()
            assert "subscriptions/acknowledged" in next(incoming)
            os.kill(broker.process.pid, signal.SIGTERM)
            list(incoming)  # raises when the stream is cut off instead
        assert broker.process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "terms",
    [
        "",
        "--allow-anonymous --mcp-url https://real.example/mcp",
        "--allow-anonymous --callback-url https://real.example/signals",
    ],
)
async def test_a_backend_of_an_operator_is_not_taken_for_the_demo(terms: str) -> None:
    with folder_for_all() as folder:
        broker = BrokerProcess(folder / "data", "demo-taken", demo=True)
        await broker.run(f"backend add demo {terms}")
        broker.spawn()
        assert broker.process.wait(60) == 1
