"""Many concurrent calls, few statements.

A round trip to Postgres costs about the same for one row as for fifty. `Grouping` holds a few
connections. A free one takes all calls of a turn of the event loop in one go; calls that find
none wait, and the next connection to come free takes all of them. So a single caller has the
latency of a plain query, and a thousand share the round trips.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from app.db.engine import Driver, LockTimeout, close
from app.errors import StorageUnavailable

Call = TypeVar("Call")
Answer = TypeVar("Answer")
Run = Callable[[Driver, Sequence[Call]], Awaitable[Sequence[Answer | Exception]]]


class _Waiter(NamedTuple, Generic[Call, Answer]):
    call: Call
    key: Hashable
    answer: asyncio.Future[Answer]


class Grouping(Generic[Call, Answer]):
    """Runs calls in groups on held connections.

    `run` answers a group of calls in their order; an answer that is an exception is raised for
    its own caller only. If `run` itself raises for a group, each call is run again alone, so that
    one poisoned call does not fail its neighbours; `run` must therefore leave nothing behind when
    it raises. Calls with equal `key` never run at the same time and keep their order; without
    `key` they may share a group.
    """

    def __init__(
        self,
        connect: Callable[[], Awaitable[Driver]],
        run: Run[Call, Answer],
        *,
        connections: int,
        largest: int,
        key: Callable[[Call], Hashable] | None = None,
    ) -> None:
        self._connect = connect
        self._run = run
        self._largest = largest
        self._key = key
        self._free: list[Driver | None] = [None] * connections
        self._ready: deque[_Waiter[Call, Answer]] = deque()
        self._behind: dict[Hashable, deque[_Waiter[Call, Answer]]] = {}
        self._groups: set[asyncio.Task[None]] = set()
        self._starting = False
        self._closed = False

    async def call(self, call: Call) -> Answer:
        """The answer to one call. Raises what `run` says, or StorageUnavailable."""
        if self._closed:
            raise StorageUnavailable
        key = None if self._key is None else self._key(call)
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(call, key, answer)
        if key is not None and key in self._behind:
            self._behind[key].append(waiter)
        else:
            if key is not None:
                self._behind[key] = deque()
            self._ready.append(waiter)
            self._dispatch()
        return await answer

    async def close(self) -> None:
        """Lets the calls that wait be answered, then closes the connections."""
        self._closed = True
        while self._groups:
            await asyncio.wait(self._groups)
        for connection in self._free:
            if connection is not None:
                await close(connection)
        self._free.clear()

    def _dispatch(self) -> None:
        if self._free and self._ready and not self._starting:
            self._starting = True
            task = asyncio.get_running_loop().create_task(self._serve(self._free.pop()))
            self._groups.add(task)
            task.add_done_callback(self._groups.discard)

    async def _serve(self, connection: Driver | None) -> None:
        # It starts a turn of the loop later, and so takes all calls of that turn along.
        group = [self._ready.popleft() for _ in range(min(self._largest, len(self._ready)))]
        self._starting = False
        self._dispatch()
        try:
            if connection is None or connection.is_closed():
                connection = await self._connect()
            await self._answer(connection, group)
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            if isinstance(error, StorageUnavailable) and connection is not None:
                connection.terminate()  # it may lead to a server that is no longer the right one
            for waiter in group:
                if not waiter.answer.done():
                    waiter.answer.set_exception(error)
        finally:
            self._free.append(connection)
            self._let_followers_in(group)
            self._dispatch()

    async def _answer(self, connection: Driver, group: list[_Waiter[Call, Answer]]) -> None:
        try:
            answers = await self._run(connection, [waiter.call for waiter in group])
        except StorageUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - handed to whoever waits
            if len(group) > 1:
                for waiter in group:
                    await self._answer(connection, [waiter])
                return
            answers = [StorageUnavailable() if isinstance(error, LockTimeout) else error]
        for waiter, answer in zip(group, answers, strict=True):
            if waiter.answer.done():  # its caller has gone
                continue
            if isinstance(answer, Exception):
                waiter.answer.set_exception(answer)
            else:
                waiter.answer.set_result(answer)

    def _let_followers_in(self, group: list[_Waiter[Call, Answer]]) -> None:
        for waiter in group:
            if waiter.key is None:
                continue
            followers = self._behind[waiter.key]
            if followers:
                self._ready.append(followers.popleft())
            else:
                del self._behind[waiter.key]
