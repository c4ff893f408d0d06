"""Two replicas on one database, and everybody at once: still everything happens exactly once."""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

import httpx
import pytest

from app.broker.cancel import end_as_operator
from app.broker.expire import BATCH, sweep
from app.db import health, migrations
from app.db.database import Database
from app.db.engine import Driver
from app.domain.tasks import TERMINAL, rpc_error
from app.errors import Refused
from tests.support.clock import ShiftedClock
from tests.support.databases import Databases
from tests.support.processes import run
from tests.support.service import (
    ELICITATION,
    CreatedTask,
    McpClient,
    Service,
    ToolServer,
    new_secret_key,
    owner_of,
    running_service,
    test_settings,
)

ROUNDS = 200
GRACE_MS = 1_000
TTL_MS = 5_000

Replicas = tuple[Service, Service]


@pytest.fixture
async def replicas(database_url: str, clock: ShiftedClock) -> AsyncIterator[Replicas]:
    """Two brokers with the same settings that share nothing but their database."""
    settings = test_settings(database_url, cancel_grace_ms=GRACE_MS)
    async with running_service(settings, clock) as one, running_service(settings, clock) as other:
        yield one, other


# --- one terminal state ------------------------------------------------------------------------


class Said(NamedTuple):
    """What a contestant was told: its try was `applied`, or why it was not."""

    by: str
    wanted: str
    outcome: str
    webhook_id: str = ""
    status: str = ""


@dataclass
class Round:
    """One task, and everybody who wants to end it, each through a replica that chance picks."""

    number: int
    replicas: Replicas
    sweepers: tuple[Driver, Driver]
    tools: ToolServer
    client: McpClient
    task: CreatedTask
    chance: random.Random
    expires: bool
    wished: bool = False
    heard: list[Said] = field(default_factory=list)
    answers: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))

    async def run(self) -> str:
        """The race, and who won it."""
        self.wished = self.chance.random() < 0.5
        if self.wished:
            await self.client.at(self.a_replica()).cancel(self.task.id)
        await self.everybody()
        await self.sweep()  # a task that was locked was left for the next pass
        entry = await self.only_ending()
        before = await self.seen_everywhere()
        await self.everybody()
        assert await self.only_ending() == entry
        assert await self.seen_everywhere() == before
        return entry or "expired"

    async def everybody(self) -> None:
        contestants = [
            self.event("done", status="completed", result={"content": [], "by": self.number}),
            self.event("done", status="completed", result={"content": [], "by": self.number}),
            self.event("broken", status="failed", error={"code": -32000, "message": "broken"}),
            self.event("broken", status="failed", error={"code": -32000, "message": "broken"}),
            self.cancel_and_obey(),
            self.time(),
        ]
        if not self.expires:
            contestants.append(self.operator())
        self.chance.shuffle(contestants)
        await asyncio.gather(*contestants)

    async def event(self, name: str, **data: Any) -> None:
        """A tool server's outcome; sent twice with one webhook-id, as after a lost answer."""
        webhook_id = f"{name}-{self.number}"
        tools = self.tools.at(self.a_replica())
        response = await tools.report(self.task, webhook_id=webhook_id, **data)
        if response.status_code == 410:
            return self.hear(Said("backend", data["status"], "expired"))
        assert response.status_code == 200, response.text
        answer = response.json()
        outcome = "applied" if answer["applied"] else answer["reason"]
        status = answer["task"]["status"]
        return self.hear(Said("backend", data["status"], outcome, webhook_id, status))

    async def cancel_and_obey(self) -> None:
        """The client's wish at one replica; the tool server's `cancelled` at any."""
        if not self.wished:
            client = self.client.at(self.a_replica())
            answer = (await client.request("tasks/cancel", {"taskId": self.task.id})).json()
            expired = "error" in answer and answer["error"]["message"].endswith("has expired")
            assert expired or answer["result"]["resultType"] == "complete"
        await self.event("obeyed", status="cancelled")

    async def operator(self) -> None:
        wanted = self.chance.choice(["cancelled", "failed"])
        error = rpc_error(-32603, "ended by hand") if wanted == "failed" else None
        try:
            await end_as_operator(self.a_replica().broker, UUID(self.task.ref), error)
        except Refused:
            return self.hear(Said("operator", wanted, "terminal"))
        return self.hear(Said("operator", wanted, "applied"))

    async def time(self) -> None:
        """Time runs out after some answers, for the task or for the answer to a wish to cancel."""
        for _ in range(self.chance.choice([0, 0, 1, 3])):
            await self.answers.acquire()
        self.replicas[0].clock.advance(milliseconds=TTL_MS if self.expires else GRACE_MS)
        await self.sweep()

    async def sweep(self) -> None:
        """Both replicas' sweepers at once."""
        await asyncio.gather(
            *(
                sweep(replica.broker, connection)
                for replica, connection in zip(self.replicas, self.sweepers, strict=True)
            )
        )

    def hear(self, said: Said) -> None:
        self.heard.append(said)
        self.answers.release()

    def a_replica(self) -> Service:
        return self.chance.choice(self.replicas)

    async def only_ending(self) -> str | None:
        """Who ended the task and how, after everything that was answered is found true."""
        history = await self.a_replica().history(self.task)
        endings = [(e.by, e.to_status) for e in history if e.to_status in TERMINAL]
        applied = [said for said in self.heard if said.outcome == "applied"]
        assert len(endings) == 1 or (self.expires and not endings)
        assert [ending for ending in endings if ending[0] != "sweeper"] == [
            (said.by, said.wanted) for said in applied
        ]
        winning_event = {said.webhook_id for said in applied if said.webhook_id}
        for said in self.heard:
            if said.outcome == "expired":
                assert self.expires
            elif said.outcome == "duplicate":
                assert {said.webhook_id} == winning_event
            elif said.outcome == "terminal":
                assert endings
                assert said.webhook_id not in winning_event or not said.webhook_id
            else:
                assert said.outcome == "applied"
            assert not said.status or [said.status] == [status for _, status in endings]
        return "{1} by {0}".format(*endings[0]) if endings else None

    async def seen_everywhere(self) -> dict[str, Any]:
        """What every replica says about the task, to its owner and to its tool server."""
        request = ("tasks/get", {"taskId": self.task.id})
        wire = await asyncio.gather(
            *(self.client.at(replica).request(*request) for replica in self.replicas * 2)
        )
        rest = await asyncio.gather(
            *(self.tools.at(replica).read(self.task.ref) for replica in self.replicas)
        )
        assert len({response.text for response in wire}) == 1
        assert len({response.text for response in rest}) == 1
        if self.expires:
            assert wire[0].json()["error"]["message"].endswith("Task has expired")
            assert rest[0].status_code == 410
            return {}
        seen: dict[str, Any] = wire[0].json()["result"]
        assert seen["status"] == rest[0].json()["status"]
        return seen


async def test_a_task_ends_once_whoever_wants_to_end_it(replicas: Replicas) -> None:
    tools, client = await replicas[0].tool_server(), replicas[0].client()
    winners: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        one, other = [
            await stack.enter_async_context(replica.broker.db.own_connection())
            for replica in replicas
        ]
        for number in range(ROUNDS):
            expires = number % 4 == 0
            race = Round(
                number,
                replicas,
                (one, other),
                tools,
                client,
                await tools.create(client, ttlMs=TTL_MS if expires else None),
                random.Random(number),  # noqa: S311 - picks an order
                expires,
            )
            winners[await race.run()] += 1
    assert set(winners) == {  # each of them was fast enough at times
        "completed by backend",
        "failed by backend",
        "cancelled by backend",
        "cancelled by operator",
        "failed by operator",
        "cancelled by sweeper",
        "expired",
    }, winners


# --- one event, many copies --------------------------------------------------------------------


def verdicts(responses: list[httpx.Response]) -> Counter[str]:
    assert {response.status_code for response in responses} == {200}
    answers = [response.json() for response in responses]
    return Counter("applied" if answer["applied"] else answer["reason"] for answer in answers)


async def test_copies_of_an_event_are_applied_once(replicas: Replicas) -> None:
    tools, client = await replicas[0].tool_server(), replicas[0].client()
    task = await tools.create(client)
    for number in range(20):
        # Applied a second time it would be refused: a key can be used only once.
        question = {"status": "input_required", "inputRequests": {f"q{number}": ELICITATION}}
        body = tools.event({"taskRef": task.ref, **question})
        headers = tools.signed(body)
        copies = [tools.at(replica).post_event(body, headers) for replica in replicas * 10]
        assert verdicts(await asyncio.gather(*copies)) == {"applied": 1, "duplicate": 19}
    reports = [entry for entry in await replicas[1].history(task) if entry.what == "report"]
    assert len(reports) == 20


async def test_a_webhook_id_that_is_used_for_many_tasks_is_applied_to_one(
    replicas: Replicas,
) -> None:
    tools, client = await replicas[0].tool_server(), replicas[0].client()
    for number in range(20):
        tasks = await asyncio.gather(*(tools.create(client) for _ in range(10)))
        posts = [
            tools.at(replica).report(task, webhook_id=f"event-{number}", statusMessage="half")
            for task in tasks
            for replica in replicas
        ]
        assert verdicts(await asyncio.gather(*posts)) == {"applied": 1, "duplicate": 19}
        read = await asyncio.gather(*(client.get(task.id) for task in tasks))
        assert [task.get("statusMessage") for task in read].count("half") == 1


async def test_events_that_cross_each_other_between_replicas_all_arrive(
    replicas: Replicas,
) -> None:
    """Groups of events that hold each other's webhook-ids, in opposite orders."""
    tools, client = await replicas[0].tool_server(), replicas[0].client()
    one, other = replicas
    ids = [f"event-{number}" for number in range(40)]
    first, second = [await asyncio.gather(*(tools.create(client) for _ in ids)) for _ in replicas]
    posts = [
        tools.at(replica).report(task, webhook_id=webhook_id, statusMessage=webhook_id)
        for ahead, back in zip(
            zip(first, ids, strict=True), zip(second, reversed(ids), strict=True), strict=True
        )
        for replica, (task, webhook_id) in ((one, ahead), (other, back))
    ]
    assert verdicts(await asyncio.gather(*posts)) == {"applied": 40, "duplicate": 40}
    read = await asyncio.gather(*(client.get(task.id) for task in [*first, *second]))
    assert sorted(filter(None, (task.get("statusMessage") for task in read))) == sorted(ids)


# --- one task, many creates --------------------------------------------------------------------


async def test_creates_with_one_external_id_make_one_task(replicas: Replicas) -> None:
    tools = await replicas[0].tool_server()
    for number in range(20):
        mine, theirs = replicas[0].client(), replicas[0].client()
        external_id = f"job-{number}"
        first = await tools.create(mine, externalId=external_id) if number % 2 else None
        responses = await asyncio.gather(*creates(tools, replicas, (mine, theirs), external_id))
        by_owner = {
            owner.token: [response for who, response in responses if who is owner]
            for owner in (mine, theirs)
        }
        winner, loser = sorted(by_owner.values(), key=lambda said: said[0].status_code == 409)
        statuses = Counter(response.status_code for response in winner)
        assert statuses == ({200: 10} if first else {201: 1, 200: 9})
        made = {tuple(task_names(response)) for response in winner}
        assert len(made) == 1
        assert first is None or made == {(first.ref, first.id)}
        assert {response.status_code for response in loser} == {409}


def creates(
    tools: ToolServer, replicas: Replicas, owners: tuple[McpClient, ...], external_id: str
) -> Iterator[Awaitable[tuple[McpClient, httpx.Response]]]:
    async def post(replica: Service, owner: McpClient) -> tuple[McpClient, httpx.Response]:
        body = {"owner": owner_of(owner), "externalId": external_id}
        return owner, await tools.at(replica).post_task(body)

    return (post(replica, owner) for replica in replicas * 5 for owner in owners)


def task_names(response: httpx.Response) -> tuple[str, str]:
    made = response.json()
    return made["taskRef"], made["createTaskResult"]["taskId"]


# --- one question, many answers ----------------------------------------------------------------


async def test_the_first_answer_to_a_question_stays(replicas: Replicas) -> None:
    tools, client = await replicas[0].tool_server(), replicas[0].client()
    keys = ["a", "b", "c", "d", "e", "f"]
    for number in range(20):
        task = await tools.create(client)
        await tools.ask(task, *keys)
        chance = random.Random(number)  # noqa: S311 - picks keys
        seen: list[dict[str, Any]] = []

        async def answer(
            replica: Service,
            tag: int,
            task: CreatedTask = task,
            chance: random.Random = chance,
            seen: list[dict[str, Any]] = seen,
        ) -> None:
            some = chance.sample(keys, 3)
            await client.at(replica).update(task.id, {key: {"tag": tag} for key in some})
            seen.append((await tools.at(replica).read(task.ref)).json()["inputResponses"])
            assert seen[-1].keys() >= set(some)

        await asyncio.gather(*(answer(replicas[tag % 2], tag) for tag in range(12)))
        await client.update(task.id, {key: {"tag": "too late"} for key in keys})

        final = (await tools.read(task.ref)).json()["inputResponses"]
        assert "too late" not in {given["tag"] for given in final.values()}
        for earlier in seen:
            assert earlier.items() <= final.items()
        entries = [entry for entry in await replicas[0].history(task) if entry.what == "answer"]
        assert len(entries) == len({given["tag"] for given in final.values()})
        status = (await client.get(task.id))["status"]
        assert status == ("working" if final.keys() == set(keys) else "input_required")


# --- one overdue task, many sweepers -----------------------------------------------------------


DAY_MS = 86_400_000


async def test_sweepers_at_once_do_no_task_twice(replicas: Replicas, clock: ShiftedClock) -> None:
    tools, client = await replicas[0].tool_server(), replicas[0].client()

    async def make(count: int, **members: Any) -> list[CreatedTask]:
        return await asyncio.gather(*(tools.create(client, **members) for _ in range(count)))

    stalling = await make(BATCH + 20, stallAfterMs=10_000, ttlMs=DAY_MS)
    unanswered = await make(100, ttlMs=DAY_MS)
    await asyncio.gather(*(client.cancel(task.id) for task in unanswered))
    expiring = await make(100, ttlMs=10_000)
    clock.advance(milliseconds=10_000 + replicas[0].settings.expired_grace_ms)

    passes = await asyncio.gather(*(replica.sweep() for replica in replicas * 3))

    assert sum(swept.stalled for swept in passes) == len(stalling)
    assert sum(swept.cancelled for swept in passes) == len(unanswered)
    assert sum(swept.expired for swept in passes) == len(expiring)
    assert sum(swept.purged for swept in passes) == len(expiring)
    for task in stalling + unanswered:
        endings = [e for e in await replicas[0].history(task) if e.to_status in TERMINAL]
        assert [ending.by for ending in endings] == ["sweeper"]
    for task in expiring:
        assert await replicas[0].history(task) == []


# --- one empty database, many migrations -------------------------------------------------------


async def test_processes_that_migrate_at_once_all_succeed(databases: Databases) -> None:
    async with databases.fresh("template0") as url:
        settings = {"database_url": url, "secret_keys": new_secret_key()}
        said = await asyncio.gather(*(run("migrate", "migrations", **settings) for _ in range(2)))
        db = Database(url)
        assert await health.revision(db) == migrations.head()
        await db.close()
    assert sorted("Migrated" in line for line in said) == [False, True]
