"""signals.md, with the broker's deliveries and its queue played by the tests."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from tests.recipes.pages import Reader
from tests.sdk.signals import SignalQueue, delivery, message
from tests.support.processes import BrokerProcess, open_log, running_broker
from tests.support.secrecy import new_token, secret
from tests.support.servers import serving
from tests.support.service import McpClient
from tests.support.waiting import eventually

PAGE = "signals.md"
CALL = """
import json, sys
from function import function
print(json.dumps(function(json.load(sys.stdin), None)))
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[BrokerProcess]:
    with running_broker("broker-signals") as broker:
        yield broker


@pytest.fixture(scope="module")
def reader(broker: BrokerProcess, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    reader = Reader(PAGE, broker, tmp_path_factory.mktemp("reader"))
    reader.register()
    return reader


@pytest.fixture
async def http(broker: BrokerProcess) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=broker.url, timeout=30) as http:
        yield http


async def test_a_posted_signal_stops_the_work(reader: Reader, http: httpx.AsyncClient) -> None:
    client = McpClient(http, new_token())
    here = f"http://127.0.0.1:{reader.port}"
    with reader.running():
        owner = {"authorization": f"Bearer {client.token}"}
        task_id = secret((await http.post(f"{here}/render", headers=owner)).json()["taskId"])
        key = {"authorization": f"Bearer {reader.environment['BROKER_API_KEY']}"}
        [task] = (await http.get("/v1/tasks", headers=key)).json()["tasks"]

        said = message(taskRef=task["taskRef"])
        sent = delivery(said, reader.environment["BROKER_WEBHOOK_SECRET"])
        forged = {**sent.headers, "webhook-id": "msg_1"}
        url = f"{here}/signals"
        assert (await http.post(url, content=sent.body, headers=forged)).status_code == 401
        answer = await http.post(url, content=sent.body, headers=dict(sent.headers))
        assert answer.status_code == 204

        async def is_cancelled() -> bool:
            return bool((await client.get(task_id))["status"] == "cancelled")

        await eventually(is_cancelled)


@pytest.mark.parametrize(
    ("kind", "data", "printed"),
    [
        ("task.cancel_requested", {}, "stopping job-81: stopped, as the client asked"),
        ("task.expired", {}, "stopping job-81: the task is gone: The task has expired"),
        (
            "task.input_received",
            {"inputResponses": {"sure": {"action": "accept"}}},
            "job-81 has answers: {'sure': {'action': 'accept'}}",
        ),
    ],
)
def test_a_function_is_called(
    reader: Reader, kind: str, data: dict[str, object], printed: str
) -> None:
    said = message(kind, externalId="job-81", **data)
    sent = delivery(said, reader.environment["BROKER_WEBHOOK_SECRET"])
    event = {"headers": dict(sent.headers), "body": sent.body.decode()}
    lines = subprocess.run(
        [sys.executable, "-c", CALL],
        input=json.dumps(event),
        cwd=reader.folder,
        env=reader.environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert lines == [printed, json.dumps({"statusCode": 204, "body": ""})]


async def test_signals_are_polled(reader: Reader) -> None:
    queue = SignalQueue(reader.environment["BROKER_API_KEY"])
    sent = [queue.put(message(kind, externalId="job-81")) for kind in ("task.stalled", "task.new")]
    async with serving(queue) as url:
        with open_log(PAGE) as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "poll.py"),
                cwd=reader.folder,
                env={**reader.environment, "BROKER_URL": url},
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
            )
        assert process.stdout is not None
        assert await process.stdout.readline() == b"task.stalled job-81\n"
        await eventually(lambda: queue.acknowledged == sent)
        process.kill()
        await process.communicate()
        queue.end()
