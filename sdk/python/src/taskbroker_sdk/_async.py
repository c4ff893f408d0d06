"""The asynchronous side: asyncio and httpx.AsyncClient carry out what `_talks` says."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, Unpack, cast

import httpx

from taskbroker_sdk._account import Account
from taskbroker_sdk._client import LAST_ROUND, LONG_POLL, TOO_LATE, Client, timeout_for
from taskbroker_sdk._errors import BrokerError, CancelRequested, Stopped, closed
from taskbroker_sdk._handle import Handle, running
from taskbroker_sdk._receiving import AsyncSignalReceiver
from taskbroker_sdk._retry import Talk
from taskbroker_sdk._signals import Inbox, Signal
from taskbroker_sdk._talks import Talks, cancelled, completed, failed, log, unfollowed, unreported
from taskbroker_sdk._wire import (
    TERMINAL,
    Answer,
    Created,
    Event,
    Json,
    Lost,
    NewTask,
    Request,
    TaskState,
)

T = TypeVar("T")


class Line:
    """The way to the broker."""

    def __init__(self, account: Account, http: httpx.AsyncClient) -> None:
        self._account = account
        self._http = http
        self.closed = False

    async def carry_out(
        self, talk: Talk[T], pause: Callable[[float], Awaitable[object]] = asyncio.sleep
    ) -> T:
        try:
            attempt = next(talk)
            while True:
                await pause(attempt.after)
                attempt = talk.send(await self._send(attempt.request))
        except StopIteration as end:
            return cast("T", end.value)

    async def _send(self, request: Request) -> Answer | Lost:
        if self.closed or self._http.is_closed:
            raise closed()
        try:
            answer = await self._http.request(
                request.method,
                self._account.url + request.path,
                content=request.body,
                headers=self._account.headers(request, time.time()),
                timeout=timeout_for(request, self._http.timeout),
            )
        except httpx.RequestError as error:
            return Lost(type(error).__name__)
        return Answer(answer.status_code, answer.content, answer.headers.get("retry-after"))


class AsyncTask(Handle):
    """A task at the broker, for its tool server."""

    def __init__(self, ref: str, talks: Talks, line: Line) -> None:
        super().__init__(ref)
        self._talks = talks
        self._line = line
        self._woken = asyncio.Event()

    async def read(self) -> TaskState:
        return self._learn(await self._line.carry_out(self._talks.read(self.ref)))

    async def report(self, **said: Unpack[Event]) -> TaskState:
        """Sends any event."""
        return self._learn(await self._line.carry_out(self._talks.report(self.ref, said)))

    async def progress(self, message: str) -> None:
        """Tells the client how it goes. Raises CancelRequested if the work should stop.

        A message that cannot be brought to the broker is dropped, and the work goes on.
        """
        self.check()
        state = await self._line.carry_out(self._talks.progress(self.ref, message))
        if state is not None:
            self._learn(state)
            self.check()

    async def ask(
        self, questions: Mapping[str, Json], message: str | None = None
    ) -> dict[str, Any]:
        """Asks the client, and waits until it has answered all of the questions.

        `questions` maps keys, never used before on this task, to input requests. Raises
        CancelRequested if the work should stop.
        """
        self.check()
        talk = self._talks.ask(self.ref, questions, message)
        return await self._line.carry_out(talk, self._pause)

    async def complete(self, result: Json) -> TaskState:
        return await self.report(**completed(result))

    async def fail(self, code: int, message: str, data: Any = None) -> TaskState:
        return await self.report(**failed(code, message, data))

    async def cancelled(self, message: str | None = None) -> TaskState:
        return await self.report(**cancelled(message))

    def wake(self) -> None:
        """Makes an `ask` that waits look for its answers at once."""
        self._woken.set()

    async def _pause(self, seconds: float) -> None:
        """Sleeps, unless it is woken."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)
        self._woken.clear()


class AsyncCreatedTask(AsyncTask):
    """A task, and what to return for it from `tools/call`."""

    def __init__(self, created: Created, talks: Talks, line: Line) -> None:
        super().__init__(created.ref, talks, line)
        self.create_task_result = created.create_task_result
        """For clients of MCP 2026-07-28."""
        self.create_task_result_legacy = created.create_task_result_legacy
        """For clients of MCP 2025-11-25."""


AsyncWork: TypeAlias = Callable[[AsyncTask], Awaitable[Json]]
"""What a tool does, from its task to its result."""


class AsyncTaskBroker(Client):
    """A tool server's line to its broker. Use it as a context manager, or `close` it.

    `webhook_secret` signs events; without it they carry the API key. `attempts` is how often a
    request is sent before Unreachable, `heartbeat` how often running work looks at its task, and
    `grace` how long `close` lets work clean up, both in seconds. An `http` client that is given
    is used with its own settings and left open.
    """

    def __init__(
        self,
        url: str,
        backend: str,
        api_key: str,
        webhook_secret: str | None = None,
        *,
        attempts: int = 8,
        heartbeat: float = 2.0,
        grace: float = 5.0,
        http: httpx.AsyncClient | None = None,
    ) -> None:
        super().__init__(
            url,
            backend,
            api_key,
            webhook_secret,
            attempts=attempts,
            heartbeat=heartbeat,
            grace=grace,
        )
        self._http = http or httpx.AsyncClient(timeout=10)
        self._owns_http = http is None
        self._line = Line(self._account, self._http)
        self._starts: set[asyncio.Future[None]] = set()
        self._running: dict[str, _Keeper] = {}
        self._closing = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def create(self, owner: Json, **task: Unpack[NewTask]) -> AsyncCreatedTask:
        """Creates a task for an owner (see `owner_from`); it is kept when this returns."""
        created = await self._line.carry_out(self._talks.create(owner, task))
        return AsyncCreatedTask(created, self._talks, self._line)

    def task(self, ref: str) -> AsyncTask:
        """A task that exists."""
        return AsyncTask(ref, self._talks, self._line)

    async def list(self, status: str | None = None) -> AsyncIterator[TaskState]:
        """The tasks of this backend, the newest first, without results, errors and questions."""
        cursor = None
        while True:
            page = await self._line.carry_out(self._talks.page(status=status, cursor=cursor))
            for state in page.tasks:
                yield state
            cursor = page.cursor
            if cursor is None:
                return

    async def find(self, external_id: str) -> TaskState | None:
        """The task with this name of yours, if there is one."""
        return await self._line.carry_out(self._talks.find(external_id))

    async def start(
        self, owner: Json, work: AsyncWork, **task: Unpack[NewTask]
    ) -> AsyncCreatedTask:
        """Creates a task and lets `work` run for it in the background.

        What the work returns completes the task, TaskFailed fails it with that error, any other
        exception with an internal error. When the client asks for it, the work is cancelled.
        """
        with self._starting():
            handle = await self.create(owner, **task)
            if handle.create_task_result["status"] not in TERMINAL:
                self._run(handle, work, task.get("stall_after_ms"))
            return handle

    async def resume(self, ref: str, work: AsyncWork) -> AsyncTask:
        """Lets `work` run for a task that exists, as after a restart of the tool server."""
        with self._starting():
            handle = self.task(ref)
            state = await handle.read()
            if not state.over:
                self._run(handle, work, state.stall_after_ms)
            return handle

    async def signals(self, *, wait: int = LONG_POLL) -> AsyncIterator[Signal]:
        """The signals of the broker, as they come, until the client is closed.

        Each request waits for up to `wait` seconds (at most 60) at the broker. Signals are
        acknowledged when the loop comes back for more after the last one that came with them.
        A broker that is away is waited for.
        """
        self._refuse_if_closed()
        inbox = Inbox()
        while not self._closing.is_set():
            batch = await self._unless_closed(self._talks.signals(inbox, wait))
            for signal in inbox.new_in(batch) if batch is not None else ():
                yield signal
                if self._closing.is_set():
                    return

    async def _unless_closed(self, talk: Talk[T]) -> T | None:
        """What a talk leads to; None if the client is closed meanwhile."""
        talking = asyncio.create_task(self._line.carry_out(talk))
        closing = asyncio.create_task(self._closing.wait())
        try:
            await asyncio.wait({talking, closing}, return_when=asyncio.FIRST_COMPLETED)
            return talking.result() if talking.done() else None
        finally:
            talking.cancel()
            closing.cancel()
            await asyncio.gather(talking, closing, return_exceptions=True)

    def take(self, signal: Signal) -> bool:
        """Tells the work of a task what a signal says: to stop, or to look for its answers.

        To be called in the event loop of the work. False if no work of the task runs here: another
        process may have it.
        """
        keeper = self._running.get(signal.task_ref)
        if keeper is not None:
            keeper.take(signal)
        return keeper is not None

    def receiver(self) -> AsyncSignalReceiver:
        """An ASGI application for the backend's `callbackUrl`: takes the signals posted to it.

        ValueError if the client has no webhook secret.
        """
        return AsyncSignalReceiver(self._secret, self.take)

    def follow_signals(self) -> None:
        """Takes the signals that can be polled, in the background, until the client is closed.

        For one process of a backend: what one has polled, no other gets.
        """
        self._refuse_if_closed()
        if self._following is None:
            self._following = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        try:
            async for signal in self.signals():
                self.take(signal)
        except BrokerError as problem:
            unfollowed(problem)

    async def close(self) -> None:
        """Cancels what runs and fails its tasks; returns when that is reported, or, if it cannot
        be, 10 seconds after the grace: then the log names the tasks.
        """
        self._closed = True
        self._closing.set()
        for keeper in self._running.values():
            keeper.close()
        end = self._end_of_closing()
        while (open_ends := self._open_ends()) and (left := end - time.monotonic()) > 0:
            await asyncio.wait(open_ends, timeout=left)
        self._line.closed = True
        self._abandon()
        if self._owns_http:
            await self._http.aclose()

    def _abandon(self) -> None:
        """Lets go of keepers that are still trying."""
        left = {**self._running}
        self._running.clear()
        for ref, keeper in left.items():
            keeper.ended.cancel()
            unreported(ref, TOO_LATE)

    def _open_ends(self) -> set[asyncio.Future[None]]:
        ends = {*self._starts, *(keeper.ended for keeper in self._running.values())}
        if self._following is not None and not self._following.done():
            ends.add(self._following)
        return ends

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Makes `close` wait: there may be a task in the end, to be reported on."""
        self._refuse_if_closed()
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._starts.add(started)
        try:
            yield
        finally:
            self._starts.remove(started)
            started.set_result(None)

    def _run(self, task: AsyncTask, work: AsyncWork, stall_after_ms: int | None) -> None:
        """Starts work, unless it runs here already: a create was repeated."""
        if task.ref in self._running:
            return
        keeper = _Keeper(self._talks, self._line, self._grace, task, work, stall_after_ms)
        self._running[task.ref] = keeper
        keeper.ended.add_done_callback(partial(self._forget, task.ref))
        if self._closed:
            keeper.close()

    def _forget(self, ref: str, ended: asyncio.Future[None]) -> None:
        error = None if ended.cancelled() else ended.exception()
        abandoned = self._running.pop(ref, None) is None  # which was said
        if error is not None and not abandoned:
            log.error("nobody watches over task %s any more", ref, exc_info=error)


class _Keeper:
    """Watches over work to its end, and sees to it that the end gets known."""

    def __init__(
        self,
        talks: Talks,
        line: Line,
        grace: float,
        task: AsyncTask,
        work: AsyncWork,
        stall_after_ms: int | None,
    ) -> None:
        self._talks = talks
        self._line = line
        self._grace = grace
        self._task = task
        self._stall_after_ms = stall_after_ms
        self._closing: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        """Once the client is closed: until when work may clean up."""
        self._told = False
        """Whether the work was told to stop, though the client is open."""
        self._doing = asyncio.create_task(_do(work, task))
        self.ended = asyncio.create_task(self._keep())

    def close(self) -> None:
        self._task.stop(Stopped())
        if not self._closing.done():
            self._closing.set_result(time.monotonic() + self._grace)

    def take(self, signal: Signal) -> None:
        if signal.reason_to_stop is None:
            self._task.wake()
        else:
            self._tell_to_stop(signal.reason_to_stop)

    def _tell_to_stop(self, reason: CancelRequested) -> None:
        """Once: the work may be cleaning up already."""
        if not self._told:
            self._told = True
            self._cancel(reason)

    async def _keep(self) -> None:
        try:
            await self._watch()
        except asyncio.CancelledError:
            self.close()  # the event loop ends: all the more must the end get known
        if not self._doing.done():
            self._cancel(Stopped())
            left = self._closing.result() - time.monotonic()
            await asyncio.wait({self._doing}, timeout=left)
        ending = self._talks.ending(self._task.ref, self._outcome())
        try:
            await self._deliver(ending)
        except asyncio.CancelledError:
            self.close()
            await self._deliver(ending)

    async def _watch(self) -> None:
        """Until the work has ended, or its client is closed."""
        pulse = self._talks.pulse(self._stall_after_ms)
        while not await self._ends_within(pulse.pause):
            if self._told:
                continue  # work that does not stop shall not keep its task alive
            reason = await self._line.carry_out(
                self._talks.beat(self._task.ref, lively=pulse.wants_sign())
            )
            if reason is not None:
                self._tell_to_stop(reason)

    async def _ends_within(self, seconds: float | None) -> bool:
        ends: set[asyncio.Future[Any]] = {self._doing, self._closing}
        done, _ = await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        return bool(done)

    def _cancel(self, reason: CancelRequested) -> None:
        self._task.stop(reason)
        self._doing.cancel()

    def _outcome(self) -> Json | BaseException:
        if not self._doing.done() or self._doing.cancelled():
            return self._task.reason_to_stop or Stopped()
        return self._doing.exception() or self._doing.result()

    async def _deliver(self, ending: Request) -> None:
        talk = self._talks.deliver(self._task.ref, ending, give_up=self._closing.done)
        try:
            async with asyncio.timeout(LAST_ROUND if self._closing.done() else None):
                await self._line.carry_out(talk, self._pause)
        except TimeoutError:
            unreported(self._task.ref, TOO_LATE)

    async def _pause(self, seconds: float) -> None:
        """Sleeps, but not into the closing: what is left of the time is for attempts."""
        if self._closing.done():
            await asyncio.sleep(seconds)
        else:
            await asyncio.wait({self._closing}, timeout=seconds)


async def _do(work: AsyncWork, task: AsyncTask) -> Json:
    task.check()
    running.set(task)
    return await work(task)
