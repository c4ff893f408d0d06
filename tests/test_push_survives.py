"""Replicas under attack: whoever listens is told how each task ended, or sees the stream break off,
and asks again.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

import asyncpg
import httpx
import pytest

from tests.support.balancer import round_robin
from tests.support.clock import ShiftedClock
from tests.support.listening import Stream, listening
from tests.support.processes import BrokerProcess, gone, running_broker
from tests.support.secrecy import new_token
from tests.support.service import CreatedTask, McpClient, ToolServer
from tests.support.waiting import eventually, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent"),
]

TASKS = 60


# --- several brokers on one database ----------------------------------------------------------


@pytest.fixture(scope="module")
def home() -> Iterator[BrokerProcess]:
    """The replica that has the database."""
    with running_broker("push-home") as broker:
        yield broker


@contextmanager
def replica(home: BrokerProcess, name: str) -> Iterator[BrokerProcess]:
    """Another `taskbroker serve` on the same database."""
    broker = BrokerProcess(
        home.data_dir.parent / name,
        f"push-{name}",
        database_url=home.database_url,
        secret_keys=(home.data_dir / "secret-keys").read_text().strip(),
    )
    broker.spawn()
    try:
        until(broker.is_ready, 60)
        yield broker
    finally:
        broker.clean_up()


@pytest.fixture(scope="module")
def b(home: BrokerProcess) -> Iterator[BrokerProcess]:
    with replica(home, "b") as broker:
        yield broker


@pytest.fixture(scope="module")
def c(home: BrokerProcess) -> Iterator[BrokerProcess]:
    with replica(home, "c") as broker:
        yield broker


@pytest.fixture(scope="module")
async def tools(home: BrokerProcess) -> AsyncIterator[ToolServer]:
    """A tool server that reports to the replica with the database."""
    async with home.tool_server("tools") as tools:
        yield tools


@asynccontextmanager
async def reporting_to(url: str, tools: ToolServer) -> AsyncIterator[ToolServer]:
    """The same tool server, which reports elsewhere."""
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        yield ToolServer(http, ShiftedClock(), tools.name, tools.key, tools.webhook_secret)


@pytest.fixture
def client(tools: ToolServer) -> McpClient:
    return McpClient(tools._http, new_token())


@pytest.fixture
async def tasks(tools: ToolServer, client: McpClient) -> list[CreatedTask]:
    return [await tools.create(client) for _ in range(TASKS)]


async def complete(tools: ToolServer, task: CreatedTask, number: int) -> None:
    """Sends one event until it is answered, as a tool server does."""
    body = tools.event(
        {"taskRef": task.ref, "status": "completed", "result": {"content": [], "n": number}}
    )
    headers = tools.signed(body)

    async def answered() -> bool:
        try:
            answer = await tools.post_event(body, headers)
        except httpx.TransportError:
            return False
        assert answer.status_code in (200, 503), answer.text
        return answer.status_code == 200

    await eventually(answered, 60)


# --- who listens ------------------------------------------------------------------------------


class Listener:
    """Follows tasks, and asks again when a stream breaks off: as a client does."""

    def __init__(self, client: McpClient, tasks: list[CreatedTask]) -> None:
        self.ended: dict[str, int] = {}
        """The tasks that have ended, and the number in the result of each."""
        self.streams = 0
        """How many it needed so far."""
        self._client = client
        self._ids = [task.id for task in tasks]

    async def follow(self, url: str) -> None:
        """Listens until the server says that there is nothing more to come."""
        over = False
        while not over:
            async with httpx.AsyncClient(base_url=url) as http:
                with suppress(httpx.TransportError):
                    over = await self._listen(http)

    async def _listen(self, http: httpx.AsyncClient) -> bool:
        async with listening(http, self._client, self._ids) as stream:
            if stream.response.status_code == 503:
                return False
            assert await stream.acknowledged() == self._ids
            self.streams += 1
            return await self._take(stream)

    async def _take(self, stream: Stream) -> bool:
        over = False
        async for frame in stream.frames():
            over = "result" in frame
            if frame.get("params", {}).get("status") == "completed":
                self.ended[frame["params"]["taskId"]] = frame["params"]["result"]["n"]
        return over


@asynccontextmanager
async def listeners(
    client: McpClient, tasks: list[CreatedTask], *urls: str
) -> AsyncIterator[list[Listener]]:
    """One at each address. They are told how every task ends before the block is left."""
    everybody = [Listener(client, tasks) for _ in urls]
    async with asyncio.TaskGroup() as following:
        for listener, url in zip(everybody, urls, strict=True):
            following.create_task(listener.follow(url))
        await eventually(lambda: all(listener.streams for listener in everybody))
        yield everybody
    for listener in everybody:
        assert listener.ended == {task.id: number for number, task in enumerate(tasks)}


# --- the attacks ------------------------------------------------------------------------------


LISTENING = """
    SELECT pid FROM pg_stat_activity
    WHERE query ~ 'LISTEN|set_config|xmin::text|AS backend' AND pid <> pg_backend_pid()
"""
CUT = "SELECT count(pg_terminate_backend(pid)) FROM unnest($1::int[]) AS pid"


async def listening_sessions(home: BrokerProcess) -> set[int]:
    """The sessions of Postgres in which replicas talk to one another."""
    database = await asyncpg.connect(home.database_url)
    try:
        return {row["pid"] for row in await database.fetch(LISTENING)}
    finally:
        await database.close()


async def cut(home: BrokerProcess, sessions: set[int]) -> None:
    database = await asyncpg.connect(home.database_url)
    try:
        await database.execute(CUT, sessions)
    finally:
        await database.close()


async def test_cut_connections_between_replicas(
    home: BrokerProcess,
    b: BrokerProcess,
    c: BrokerProcess,
    tools: ToolServer,
    client: McpClient,
    tasks: list[CreatedTask],
) -> None:
    """Each replica loses its way to hear of the others, again and again."""
    cuts = 0
    async with listeners(client, tasks, b.url, b.url, c.url) as everybody:
        for number, task in enumerate(tasks):
            await complete(tools, task, number)
            if number % 3 == 0:
                sessions = await listening_sessions(home)
                await cut(home, sessions)
                cuts += len(sessions)
    assert cuts > 10
    assert [listener.streams for listener in everybody] == [1, 1, 1], "no client noticed"


async def test_kill_9_of_postgres(
    home: BrokerProcess,
    b: BrokerProcess,
    c: BrokerProcess,
    tools: ToolServer,
    client: McpClient,
    tasks: list[CreatedTask],
) -> None:
    """A database that is away is waited for; the streams stay open meanwhile."""
    async with listeners(client, tasks, b.url, c.url, home.url) as everybody:
        for number, task in enumerate(tasks):
            if number % 20 == 10:
                killed = home.postmaster
                os.kill(killed, signal.SIGKILL)
                await eventually(partial(gone, killed))
            await complete(tools, task, number)
    assert [listener.streams for listener in everybody] == [1, 1, 1]


async def test_kill_9_of_the_replica_that_has_answered_an_event(
    home: BrokerProcess,
    b: BrokerProcess,
    c: BrokerProcess,
    tools: ToolServer,
    client: McpClient,
    tasks: list[CreatedTask],
) -> None:
    """It has told nobody yet: the others find out by themselves."""
    numbered = list(enumerate(tasks))
    async with listeners(client, tasks, b.url, c.url) as everybody:
        for burst in (numbered[:20], numbered[20:40], numbered[40:]):
            others = await listening_sessions(home)
            with replica(home, "a") as a:
                await cut(home, await listening_sessions(home) - others)
                answered = await answered_before_kill(a, tools, burst)
            ids = {tasks[number].id for number in answered}
            await eventually(partial(all_know, everybody, ids))
            for number, task in burst:
                await complete(tools, task, number)
    assert [listener.streams for listener in everybody] == [1, 1]


async def answered_before_kill(
    a: BrokerProcess, tools: ToolServer, burst: list[tuple[int, CreatedTask]]
) -> list[int]:
    """Which of many events at once a replica has answered when it is killed at the first answer."""
    async with reporting_to(a.url, tools) as to_a:
        sent = {number: asyncio.create_task(complete(to_a, task, number)) for number, task in burst}
        await asyncio.wait(sent.values(), return_when=asyncio.FIRST_COMPLETED)
        a.kill()
        answered = [number for number, one in sent.items() if one.done()]
        for one in sent.values():
            one.cancel()
        await asyncio.gather(*sent.values(), return_exceptions=True)
    return answered


def all_know(everybody: list[Listener], ids: set[str]) -> bool:
    return all(ids <= listener.ended.keys() for listener in everybody)


async def test_workers_behind_one_port(client: McpClient) -> None:
    """Whichever worker takes an event, and whoever of them dies."""
    with running_broker("push-workers", workers=4) as broker:
        async with broker.tool_server("tools") as tools:
            tasks = [await tools.create(client) for _ in range(TASKS)]
            async with listeners(client, tasks, *[broker.url] * 12) as everybody:
                for number, task in enumerate(tasks):
                    if number % 20 == 10:
                        os.kill(broker.workers[0], signal.SIGKILL)
                    await complete(tools, task, number)
    assert sum(listener.streams for listener in everybody) >= len(everybody)


async def test_replicas_behind_a_balancer_that_knows_nothing(
    home: BrokerProcess, tools: ToolServer, client: McpClient, tasks: list[CreatedTask]
) -> None:
    """Each connection goes to the next replica. They are killed in turn; clients come back."""
    with replica(home, "d") as d, replica(home, "e") as e:
        async with (
            round_robin(home.port, d.port, e.port) as url,
            reporting_to(url, tools) as anywhere,
            listeners(client, tasks, *[url] * 6) as everybody,
        ):
            for number, task in enumerate(tasks):
                if number % 15 == 10:
                    killed = (d, e)[number // 15 % 2]
                    killed.kill()
                    killed.spawn()
                await complete(anywhere, task, number)
    assert sum(listener.streams for listener in everybody) > len(everybody), "some came back"
