"""any-language.md: a server that runs the page's `call.sh` for each `tools/call`."""

import asyncio
import json
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.asgi import Receive, Send
from tests.recipes.pages import Reader
from tests.sdk.flaky import FlakyNetwork, flaky_network
from tests.support.processes import open_log, running_broker
from tests.support.secrecy import new_token, secret
from tests.support.servers import Received, read_all, respond, running_upstream
from tests.support.service import McpClient
from tests.support.waiting import eventually

pytestmark = pytest.mark.clients

PAGE = "any-language.md"
AGREED = {"sure": {"action": "accept", "content": {"sure": True}}}


class Shop:
    """The page's tool server, its gateway, and a network between it and the broker."""

    def __init__(self, reader: Reader, http: httpx.AsyncClient, network: FlakyNetwork) -> None:
        self.reader = reader
        self.network = network
        self.client = McpClient(http, new_token(), "/mcp/shell-tools")
        reader.environment["BROKER_URL"] = network.url

    async def answer(self, request: Received, receive: Receive, send: Send) -> None:
        """Answers `tools/call`, with the request's headers in variables as CGI has them."""
        await read_all(request, receive)
        headers = {f"HTTP_{name.upper().replace('-', '_')}": v for name, v in request.headers}
        with open_log(PAGE) as log:
            process = await asyncio.create_subprocess_exec(
                *("bash", "call.sh"),
                cwd=self.reader.folder,
                env={**self.reader.environment, **headers},
                stdout=PIPE,
                stderr=log,
            )
            printed, _ = await process.communicate()
        assert process.returncode == 0
        answer = {"jsonrpc": "2.0", "id": request.message["id"], "result": json.loads(printed)}
        await respond(send, json.dumps(answer).encode())

    async def type(self, commands: str, **variables: str) -> str:
        """What the commands print."""
        return await asyncio.to_thread(self.reader.type, commands, **variables)

    async def call(self) -> str:
        """Calls the tool; the id of its task."""
        response = await self.client.request("tools/call", {"name": "delete"})
        return secret(response.json()["result"]["taskId"])

    async def reaches(self, task_id: str, **members: Any) -> dict[str, Any]:
        """The task, as soon as it has these members."""

        async def reached() -> bool:
            return members.items() <= (await self.client.get(task_id)).items()

        await eventually(reached)
        return await self.client.get(task_id)


@pytest.fixture(scope="module")
async def shop(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shop]:
    with running_broker("broker-any-language") as broker:
        async with (
            running_upstream() as server,
            httpx.AsyncClient(base_url=broker.url, timeout=30) as http,
        ):
            port = httpx.URL(server.url).port
            reader = Reader(PAGE, broker, tmp_path_factory.mktemp("reader"), port=port)
            reader.register()
            with flaky_network(broker.url) as network:
                shop = Shop(reader, http, network)
                server.behaviour = shop.answer
                yield shop


async def test_a_question_progress_and_a_result(shop: Shop) -> None:
    task_id = await shop.call()
    asked = await shop.reaches(task_id, status="input_required")
    assert asked["inputRequests"]["sure"]["params"]["message"] == "Delete 4 files?"
    await shop.client.update(task_id, AGREED)
    await shop.reaches(task_id, status="working", statusMessage="file 2 of 4")
    done = await shop.reaches(task_id, status="completed")
    assert done["result"]["content"] == [{"type": "text", "text": "4 files are deleted"}]


async def test_the_wish_to_cancel(shop: Shop) -> None:
    task_id = await shop.call()
    await shop.reaches(task_id, status="input_required")
    await shop.client.cancel(task_id)
    await shop.reaches(task_id, status="cancelled")


async def test_a_client_that_comes_without_the_gateway(shop: Shop) -> None:
    headers = {"authorization": f"Bearer {shop.client.token}"}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "delete"}}
    async with httpx.AsyncClient(timeout=30) as http:
        url = f"http://127.0.0.1:{shop.reader.port}/mcp"
        response = await http.post(url, json=message, headers=headers)
    task_id = secret(response.json()["result"]["taskId"])
    await shop.reaches(task_id, status="input_required")
    declined = {"sure": {"action": "decline"}}
    await shop.client.update(task_id, declined)
    done = await shop.reaches(task_id, status="completed")
    assert done["result"]["content"] == [{"type": "text", "text": "nothing is deleted"}]


async def test_what_a_bad_network_lost_is_sent_again(shop: Shop) -> None:
    commands = {
        "create": '{"owner": {"authorization": "Bearer $TOKEN"}, "externalId": "job-81"}',
        "report": '{"type": "task.updated", "data": {"externalId": "job-81", "status": "working"}}',
    }
    answers, seen = [], []
    for command, body in commands.items():
        shop.network.seen.clear()
        shop.network.fates[:] = ["busy", "lose the answer"]
        typed = f". ./broker.sh; {command} '{body}'"
        answers.append(json.loads(await shop.type(typed, TOKEN=new_token())))
        seen.append(list(shop.network.seen))

    creates, events = seen
    assert len({request.body for request in creates}) == 1
    assert answers[1]["reason"] == "duplicate"
    assert len({request.headers["webhook-id"] for request in events}) == 1
    assert len({request.headers["webhook-signature"] for request in events}) == 3


async def test_a_refusal_is_final(shop: Shop) -> None:
    shop.network.seen.clear()
    await shop.type(". ./broker.sh; if create '{}'; then exit 1; fi")
    assert len(shop.network.seen) == 1
