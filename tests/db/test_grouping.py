"""Many callers on few connections: who shares a statement with whom, and who never may."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from app.db.engine import Driver, StorageFault, close, connect, storage_errors
from app.db.grouping import Grouping
from app.errors import NotFound, StorageUnavailable

Run = Callable[[Driver, Sequence[int]], Awaitable[Sequence[int | Exception]]]
HUNDRED_BY = "SELECT 100 / n FROM unnest($1::int[]) WITH ORDINALITY AS call(n, i) ORDER BY i"


class Divider:
    """Divides 100 by each call, in one statement for a group; a zero fails all of it.

    It notes every group, and holds a group with a call of `held` until `release`.
    """

    def __init__(self, *held: int) -> None:
        self.groups: list[list[int]] = []
        self.connections: list[Driver] = []
        self.holding = asyncio.Event()
        self.release = asyncio.Event()
        self._held = set(held)

    async def __call__(self, connection: Driver, calls: Sequence[int]) -> Sequence[int | Exception]:
        self.groups.append(list(calls))
        self.connections.append(connection)
        if self._held & set(calls):
            self.holding.set()
            await self.release.wait()
        with storage_errors():
            return [row[0] for row in await connection.fetch(HUNDRED_BY, calls)]


@pytest.fixture
def reach(database_url: str) -> Callable[[], Awaitable[Driver]]:
    return lambda: connect(database_url)


@asynccontextmanager
async def grouping(
    reach: Callable[[], Awaitable[Driver]],
    run: Run,
    *,
    connections: int = 1,
    largest: int = 100,
    key: Callable[[int], int] | None = None,
) -> AsyncIterator[Grouping[int, int]]:
    made: Grouping[int, int] = Grouping(
        reach, run, connections=connections, largest=largest, key=key
    )
    try:
        yield made
    finally:
        await made.close()


async def started(group: Grouping[int, int], *calls: int) -> list[asyncio.Task[int]]:
    """Tasks that have each made their call and wait for its answer."""
    tasks = [asyncio.create_task(group.call(call)) for call in calls]
    await asyncio.sleep(0)  # one turn of the loop: every task runs up to where it waits
    return tasks


async def test_a_caller_alone_is_served_at_once(reach: Callable[[], Awaitable[Driver]]) -> None:
    run = Divider()
    async with grouping(reach, run, connections=3) as group:
        assert await group.call(4) == 25
        assert await group.call(5) == 20
    assert run.groups == [[4], [5]]


async def test_calls_of_one_moment_share_a_statement(
    reach: Callable[[], Awaitable[Driver]],
) -> None:
    run = Divider()
    async with grouping(reach, run, connections=3) as group:
        answers = await asyncio.gather(*map(group.call, range(1, 51)))
    assert answers == [100 // call for call in range(1, 51)]
    assert run.groups == [list(range(1, 51))]


async def test_calls_that_find_no_connection_share_the_next(
    reach: Callable[[], Awaitable[Driver]],
) -> None:
    run = Divider(1)
    async with grouping(reach, run) as group:
        first = await started(group, 1)
        await run.holding.wait()
        second = await started(group, 2, 4)
        third = await started(group, 5, 10)
        run.release.set()
        assert await asyncio.gather(*first, *second, *third) == [100, 50, 25, 20, 10]
    assert run.groups == [[1], [2, 4, 5, 10]]


async def test_a_free_connection_is_used_while_another_works(
    reach: Callable[[], Awaitable[Driver]],
) -> None:
    run = Divider(1)
    async with grouping(reach, run, connections=2) as group:
        [held] = await started(group, 1)
        await run.holding.wait()
        assert await group.call(2) == 50
        assert not held.done()
        run.release.set()
        assert await held == 100
    assert len(set(run.connections)) == 2


async def test_no_group_is_larger_than_allowed(reach: Callable[[], Awaitable[Driver]]) -> None:
    run = Divider()
    async with grouping(reach, run, largest=10) as group:
        answers = await asyncio.gather(*map(group.call, range(1, 26)))
    assert answers == [100 // call for call in range(1, 26)]
    assert [len(calls) for calls in run.groups] == [10, 10, 5]


async def test_a_poisoned_call_fails_alone(reach: Callable[[], Awaitable[Driver]]) -> None:
    async with grouping(reach, Divider()) as group:
        answers = await asyncio.gather(*map(group.call, [1, 2, 0, 4]), return_exceptions=True)
    assert [answer for answer in answers if isinstance(answer, int)] == [100, 50, 25]
    assert isinstance(answers[2], StorageFault)


async def test_a_refusal_goes_to_its_own_caller(reach: Callable[[], Awaitable[Driver]]) -> None:
    groups = []

    async def run(_: Driver, calls: Sequence[int]) -> list[int | Exception]:
        groups.append(len(calls))
        return [NotFound() if call == 2 else call for call in calls]

    async with grouping(reach, run) as group:
        answers = await asyncio.gather(*map(group.call, [1, 2, 3]), return_exceptions=True)
    assert answers[0] == 1
    assert isinstance(answers[1], NotFound)
    assert answers[2] == 3
    assert groups == [3]  # nothing was run again


async def test_a_caller_that_leaves_does_not_disturb_the_others(
    reach: Callable[[], Awaitable[Driver]],
) -> None:
    run = Divider(1)
    async with grouping(reach, run) as group:
        under_way = await started(group, 1, 2)
        await run.holding.wait()
        waiting = await started(group, 4, 5)
        for leaving in (under_way[0], waiting[0]):
            leaving.cancel()
            with suppress(asyncio.CancelledError):
                await leaving
        run.release.set()
        assert [await under_way[1], await waiting[1]] == [50, 20]
        assert await group.call(10) == 10


async def test_equal_keys_never_run_at_the_same_time_and_keep_their_order(
    reach: Callable[[], Awaitable[Driver]],
) -> None:
    running: set[int] = set()
    served: list[int] = []
    divide = Divider()

    async def run(connection: Driver, calls: Sequence[int]) -> Sequence[int | Exception]:
        keys = {call % 5 for call in calls}
        assert len(keys) == len(calls)
        assert not running & keys
        running.update(keys)
        served.extend(calls)
        try:
            return await divide(connection, calls)
        finally:
            running.difference_update(keys)

    calls = range(1, 41)
    async with grouping(reach, run, connections=3, largest=2, key=lambda call: call % 5) as group:
        answers = await asyncio.gather(*map(group.call, calls))
    assert answers == [100 // call for call in calls]
    for key in range(5):
        assert [n for n in served if n % 5 == key] == [n for n in calls if n % 5 == key]


async def test_a_hot_key_does_not_block_the_others(reach: Callable[[], Awaitable[Driver]]) -> None:
    run = Divider(1)
    async with grouping(reach, run, connections=2, key=lambda call: call % 2) as group:
        hot = await started(group, 1, 5, 25)
        await run.holding.wait()
        assert await group.call(2) == 50
        assert await group.call(4) == 25
        assert not any(call.done() for call in hot)
        run.release.set()
        assert await asyncio.gather(*hot) == [100, 20, 4]


async def test_nobody_waits_behind_a_newcomer(reach: Callable[[], Awaitable[Driver]]) -> None:
    newcomers: list[asyncio.Task[int]] = []
    divide = Divider()

    async def run(connection: Driver, calls: Sequence[int]) -> Sequence[int | Exception]:
        if len(newcomers) < 20:
            newcomers.extend(await started(group, 20 + len(newcomers), 21 + len(newcomers)))
        return await divide(connection, calls)

    async with grouping(reach, run, largest=2) as group:
        await asyncio.gather(*map(group.call, range(1, 20)))
        await asyncio.gather(*newcomers)
    served = [call for calls in divide.groups for call in calls]
    assert served == list(range(1, 40))


async def test_a_lost_connection_fails_the_calls_under_way_and_is_replaced(
    reach: Callable[[], Awaitable[Driver]],
) -> None:
    run = Divider(1)
    async with grouping(reach, run) as group:
        under_way = await started(group, 1, 2)
        await run.holding.wait()
        waiting = await started(group, 4, 5)
        await terminate(reach, run.connections[0])
        run.release.set()
        failed = await asyncio.gather(*under_way, return_exceptions=True)
        assert [type(error) for error in failed] == [StorageUnavailable, StorageUnavailable]
        assert await asyncio.gather(*waiting) == [25, 20]
        assert run.groups == [[1, 2], [4, 5]]  # what was under way is not tried again
        assert run.connections[0] is not run.connections[1]


async def test_a_connection_that_was_lost_while_idle_is_replaced(
    reach: Callable[[], Awaitable[Driver]],
) -> None:
    run = Divider()
    async with grouping(reach, run) as group:
        assert await group.call(1) == 100
        await terminate(reach, run.connections[0])
        assert await group.call(2) == 50


async def test_without_a_database_callers_are_told_and_may_come_back(
    reach: Callable[[], Awaitable[Driver]],
) -> None:
    reachable = False

    async def sometimes() -> Driver:
        if reachable:
            return await reach()
        return await connect("postgresql://nobody@127.0.0.1:1/nothing")

    async with grouping(sometimes, Divider()) as group:
        failed = await asyncio.gather(*map(group.call, [1, 2]), return_exceptions=True)
        assert [type(error) for error in failed] == [StorageUnavailable, StorageUnavailable]
        reachable = True
        assert await group.call(4) == 25


async def test_closing_answers_those_who_wait(reach: Callable[[], Awaitable[Driver]]) -> None:
    run = Divider(1)
    async with grouping(reach, run, key=lambda call: call % 2) as group:
        calls = await started(group, 1, 2, 4, 5)
        await run.holding.wait()
        closing = asyncio.create_task(group.close())
        run.release.set()
        await closing
        assert [call.result() for call in calls] == [100, 50, 25, 20]
        assert all(connection.is_closed() for connection in run.connections)
        with pytest.raises(StorageUnavailable):
            await group.call(1)


async def terminate(reach: Callable[[], Awaitable[Driver]], victim: Driver) -> None:
    """Ends the server side of a connection; returns when its client side knows."""
    gone = asyncio.Event()
    victim.add_termination_listener(lambda _: gone.set())
    other = await reach()
    await other.execute("SELECT pg_terminate_backend($1)", victim.get_server_pid())
    await close(other)
    await gone.wait()
