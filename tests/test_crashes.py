"""Kill -9 at any moment: what was answered is there afterwards, and it is there once."""

import asyncio
import itertools
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from uuid import UUID

import httpx
import pytest

from app.db import tasks as stored
from app.db.database import Database
from tests.support.processes import BrokerProcess, gone, listens, running_broker
from tests.support.secrecy import new_token, secret
from tests.support.service import ELICITATION, CreatedTask, McpClient, ToolServer, owner_of
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent"),
]

SERVERS = 6
QUESTIONS = 8


@dataclass
class Job:
    """A task, and the names of its events that were answered, in order."""

    external_id: str
    task: CreatedTask
    answered: list[str] = field(default_factory=list)

    @property
    def result(self) -> dict[str, Any]:
        return {"content": [], "job": self.external_id}


class Load:
    """Tool servers at work: each creates a task, asks, completes it, and takes the next one.

    They know nothing of crashes: whatever is not answered they send again as it was.
    """

    def __init__(self, tools: ToolServer, client: McpClient) -> None:
        self.jobs: list[Job] = []
        self.answers = 0
        self.unanswered: Counter[str] = Counter()
        self.stopping = False
        self._tools = tools
        self._client = client

    async def work(self, server: int) -> None:
        for number in itertools.count():
            if self.stopping:
                return
            job = await self._create(f"job-{server}-{number}")
            for question in range(QUESTIONS):
                name = f"q{question}"
                asked = {"status": "input_required", "inputRequests": {name: ELICITATION}}
                await self._report(job, name, **asked)
            await self._report(job, "done", status="completed", result=job.result)

    async def _create(self, external_id: str) -> Job:
        body = {"owner": owner_of(self._client), "externalId": external_id}
        response, tries = await self._answer_to(lambda: self._tools.post_task(body))
        assert response.status_code == 201 or (response.status_code == 200 and tries > 1)
        made = response.json()
        task = CreatedTask(made["taskRef"], secret(made["createTaskResult"]["taskId"]))
        self.jobs.append(Job(external_id, task))
        return self.jobs[-1]

    async def _report(self, job: Job, name: str, **data: Any) -> None:
        body = self._tools.event({"taskRef": job.task.ref, **data})
        headers = self._tools.signed(body)
        response, tries = await self._answer_to(lambda: self._tools.post_event(body, headers))
        # An event that is applied twice is refused: its question was asked before.
        assert response.status_code == 200, response.text
        answer = response.json()
        assert answer["applied"] or (answer["reason"] == "duplicate" and tries > 1)
        job.answered.append(name)

    async def _answer_to(
        self, post: Callable[[], Awaitable[httpx.Response]]
    ) -> tuple[httpx.Response, int]:
        """Sends until it is answered; the answer, and how often it was sent."""
        responses: list[httpx.Response] = []
        tries = itertools.count(1)

        async def answered() -> bool:
            next(tries)
            try:
                response = await post()
            except httpx.TransportError as error:
                self.unanswered[type(error).__name__] += 1
                return False
            if response.status_code == 503 and "retry-after" in response.headers:
                self.unanswered["503"] += 1
                return False
            responses.append(response)
            return True

        await eventually(answered, 60)
        self.answers += 1
        return responses[0], next(tries) - 1

    async def goes_on(self, chance: random.Random) -> None:
        """Returns some answers later, in the middle of whatever is going on then."""
        enough = self.answers + chance.randrange(30, 150)
        await eventually(lambda: self.answers >= enough, 60)


@asynccontextmanager
async def at_work(broker: BrokerProcess) -> AsyncIterator[Load]:
    """A load during the block; at its end the rest is worked off, and everything is checked."""
    async with broker.tool_server("tools") as tools, httpx.AsyncClient(base_url=broker.url) as http:
        client = McpClient(http, new_token())
        load = Load(tools, client)
        async with asyncio.TaskGroup() as servers:
            for server in range(SERVERS):
                servers.create_task(load.work(server))
            yield load
            load.stopping = True
        await everything_is_there_once(broker, load, tools, client)


async def everything_is_there_once(
    broker: BrokerProcess, load: Load, tools: ToolServer, client: McpClient
) -> None:
    jobs = {job.task.ref: job for job in load.jobs}
    assert await all_refs(tools) == sorted(jobs)  # those that were promised, and no other
    db = Database(broker.database_url)
    for ref, job in jobs.items():
        seen = await client.get(job.task.id)
        assert seen["status"] == "completed"
        assert seen["result"] == {"resultType": "complete", **job.result}
        task = await db.read(UUID(ref))
        assert task is not None
        assert [*(question.key for question in task.inputs), "done"] == job.answered
        async with db.transaction() as connection:
            history = await stored.history(connection, UUID(ref))
        assert [entry.what for entry in history] == ["created", *("report" for _ in job.answered)]
    await db.close()


async def all_refs(tools: ToolServer) -> list[str]:
    """Every task of the tool server, page by page."""
    refs: list[str] = []
    query: dict[str, Any] = {"limit": 200}
    while True:
        page = (await tools.list(**query)).json()
        refs += [task["taskRef"] for task in page["tasks"]]
        if "nextCursor" not in page:
            return sorted(refs)
        query["cursor"] = page["nextCursor"]


async def test_kill_9_of_the_broker_loses_nothing() -> None:
    chance = random.Random(9)  # noqa: S311 - picks moments
    with running_broker("killed-broker") as broker:
        async with at_work(broker) as load:
            for number in range(4):
                await load.goes_on(chance)
                postmaster = broker.postmaster
                broker.kill()
                if number % 2:  # else the next broker finds the Postgres of the killed one
                    await eventually(partial(gone, postmaster))
                await asyncio.to_thread(broker.start)
        assert load.unanswered.total() > 0


async def test_kill_9_of_postgres_loses_nothing_and_the_broker_recovers() -> None:
    chance = random.Random(10)  # noqa: S311 - picks moments
    with running_broker("killed-postgres") as broker:
        async with at_work(broker) as load:
            for _ in range(4):
                await load.goes_on(chance)
                killed = broker.postmaster
                os.kill(killed, signal.SIGKILL)
                await eventually(partial(broker.has_another_postgres, killed))
            await load.goes_on(chance)
        assert load.unanswered["503"] > 0
        assert broker.is_ready()


async def test_kill_9_of_the_parent_ends_the_workers_and_frees_the_port() -> None:
    chance = random.Random(11)  # noqa: S311 - picks moments
    with running_broker("killed-parent", workers=2) as broker:
        async with at_work(broker) as load:
            await load.goes_on(chance)
            workers, postmaster = broker.workers, broker.postmaster
            assert len(workers) == 2
            broker.kill()
            await eventually(lambda: all(map(gone, [*workers, postmaster])))
            assert not listens(broker.port)
            await asyncio.to_thread(broker.start)


async def test_kill_9_of_the_parent_while_its_workers_start_ends_them_too() -> None:
    with running_broker("killed-early", workers=2) as broker:
        assert broker.terminate() == 0
        broker.spawn()
        await eventually(lambda: len(broker.workers) == 2)
        workers = broker.workers
        broker.kill()
        await eventually(lambda: all(map(gone, workers)))
        assert not listens(broker.port)


@pytest.mark.parametrize("workers", [1, 2])
async def test_sigterm_under_load_loses_nothing_and_is_no_failure(workers: int) -> None:
    chance = random.Random(12)  # noqa: S311 - picks moments
    with running_broker(f"terminated-{workers}", workers=workers) as broker:
        async with at_work(broker) as load:
            await load.goes_on(chance)
            postmaster = broker.postmaster
            assert await asyncio.to_thread(broker.terminate) == 0
            assert gone(postmaster)
            assert not listens(broker.port)
            await asyncio.to_thread(broker.start)
