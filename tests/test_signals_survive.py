"""Kill -9 of workers that deliver: no signal is lost, and what comes twice has one id."""

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial

import httpx
import pytest

from tests.support.callbacks import Callback, running_callback
from tests.support.clock import ShiftedClock
from tests.support.processes import BrokerProcess, gone, running_broker
from tests.support.secrecy import new_token
from tests.support.servers import answer_with
from tests.support.service import McpClient
from tests.support.waiting import eventually

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent"),
]

TASKS = 300
KILLS = 8


async def test_no_signal_is_lost_by_a_kill(clock: ShiftedClock) -> None:
    """Two workers deliver; one after the other is killed in the middle of it, and replaced."""
    chance = random.Random(7)  # noqa: S311 - picks moments
    async with AsyncExitStack() as stack:
        callback = await stack.enter_async_context(running_callback(clock))
        broker = stack.enter_context(
            running_broker("deliveries", workers=2, allow_private_callbacks="true")
        )
        tools = await stack.enter_async_context(broker.tool_server("tools"))
        callback.secrets.append(tools.webhook_secret)
        await broker.run(f"backend update tools --callback-url {callback.url}")
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=broker.url, timeout=60))
        client = McpClient(http, new_token())
        tasks = [await tools.create(client) for _ in range(TASKS)]

        async def cancel_all() -> None:
            for task in tasks:
                await eventually(partial(cancelled, client, task.id))

        async def kill_now_and_then() -> None:
            for kill in range(1, KILLS + 1):
                enough = kill * TASKS // (KILLS + 1) + chance.randrange(10)
                await eventually(partial(has_arrived, callback, enough), 60)
                await replace_a_worker(broker, chance)

        await asyncio.gather(cancel_all(), kill_now_and_then())
        await eventually(lambda: arrived(callback) == {task.ref for task in tasks}, 90)
        names = Counter(told.webhook_id for told in callback.attempts)
        assert len(names) == TASKS, "one id for each signal, however often it came"
        bodies = {(told.webhook_id, told.body) for told in callback.attempts}
        assert len(bodies) == TASKS

        async def all_are_recorded() -> bool:
            listed = json.loads(await broker.run("delivery list --limit 1000 --json"))
            return Counter(one["status"] for one in listed) == {"delivered": TASKS}

        await eventually(all_are_recorded, 90)


async def test_a_broker_that_ends_gives_back_what_it_was_sending(clock: ShiftedClock) -> None:
    """Its successor does not wait for the lease: SIGTERM, and the signal is sent again at once."""
    never = asyncio.Event()
    async with running_callback(clock) as callback:

        async def hang(*_: object) -> None:
            await never.wait()

        callback.otherwise = hang
        with running_broker("hand-over", allow_private_callbacks="true") as broker:
            async with broker.tool_server("tools") as tools:
                callback.secrets.append(tools.webhook_secret)
                await broker.run(f"backend update tools --callback-url {callback.url}")
                client = McpClient(tools._http, new_token())
                task = await tools.create(client)
                await client.cancel(task.id)
                await eventually(lambda: callback.attempts)
            assert broker.terminate() == 0
            callback.otherwise = answer_with(b"")
            broker.start()
            await eventually(lambda: len(callback.attempts) == 2, 20)
        first, second = callback.attempts
        assert first.webhook_id == second.webhook_id
        never.set()


async def cancelled(client: McpClient, task_id: str) -> bool:
    try:
        await client.cancel(task_id)
    except (httpx.TransportError, AssertionError):
        return False
    return True


def has_arrived(callback: Callback, count: int) -> bool:
    return len(callback.attempts) >= count


def arrived(callback: Callback) -> set[str]:
    return {str(told.data["taskRef"]) for told in callback.attempts}


async def replace_a_worker(broker: BrokerProcess, chance: random.Random) -> None:
    """Kills a worker; `serve` starts another one in its place."""
    await eventually(lambda: len(broker.workers) == 2)
    victim = chance.choice(broker.workers)
    os.kill(victim, signal.SIGKILL)
    await eventually(lambda: gone(victim) and len(broker.workers) == 2)
