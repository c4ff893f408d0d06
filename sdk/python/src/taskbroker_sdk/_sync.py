"""The synchronous side: threads and httpx.Client carry out what `_talks` says."""

import atexit
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar, Unpack, cast

import httpx

from taskbroker_sdk._account import Account
from taskbroker_sdk._client import LONG_POLL, TOO_LATE, Client, timeout_for
from taskbroker_sdk._errors import BrokerError, CancelRequested, Stopped, closed
from taskbroker_sdk._handle import Handle, running
from taskbroker_sdk._receiving import SignalReceiver
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

    def __init__(self, account: Account, http: httpx.Client) -> None:
        self._account = account
        self._http = http
        self.closed = False

    def carry_out(self, talk: Talk[T], pause: Callable[[float], object] = time.sleep) -> T:
        try:
            attempt = next(talk)
            while True:
                pause(attempt.after)
                attempt = talk.send(self._send(attempt.request))
        except StopIteration as end:
            return cast("T", end.value)

    def _send(self, request: Request) -> Answer | Lost:
        if self.closed or self._http.is_closed:
            raise closed()
        try:
            answer = self._http.request(
                request.method,
                self._account.url + request.path,
                content=request.body,
                headers=self._account.headers(request, time.time()),
                timeout=timeout_for(request, self._http.timeout),
            )
        except httpx.RequestError as error:
            if self.closed:
                raise closed() from None
            return Lost(type(error).__name__)
        return Answer(answer.status_code, answer.content, answer.headers.get("retry-after"))


class Task(Handle):
    """A task at the broker, for its tool server."""

    def __init__(self, ref: str, talks: Talks, line: Line) -> None:
        super().__init__(ref)
        self._talks = talks
        self._line = line
        self._woken = threading.Event()

    def read(self) -> TaskState:
        return self._learn(self._line.carry_out(self._talks.read(self.ref)))

    def report(self, **said: Unpack[Event]) -> TaskState:
        """Sends any event."""
        return self._learn(self._line.carry_out(self._talks.report(self.ref, said)))

    def progress(self, message: str) -> None:
        """Tells the client how it goes. Raises CancelRequested if the work should stop.

        A message that cannot be brought to the broker is dropped, and the work goes on.
        """
        self.check()
        state = self._line.carry_out(self._talks.progress(self.ref, message), self._pause)
        if state is not None:
            self._learn(state)
            self.check()

    def ask(self, questions: Mapping[str, Json], message: str | None = None) -> dict[str, Any]:
        """Asks the client, and waits until it has answered all of the questions.

        `questions` maps keys, never used before on this task, to input requests. Raises
        CancelRequested if the work should stop.
        """
        self.check()
        return self._line.carry_out(self._talks.ask(self.ref, questions, message), self._pause)

    def complete(self, result: Json) -> TaskState:
        return self.report(**completed(result))

    def fail(self, code: int, message: str, data: Any = None) -> TaskState:
        return self.report(**failed(code, message, data))

    def cancelled(self, message: str | None = None) -> TaskState:
        return self.report(**cancelled(message))

    def stop(self, reason: CancelRequested) -> None:
        super().stop(reason)
        self.wake()

    def wake(self) -> None:
        """Makes an `ask` that waits look for its answers at once."""
        self._woken.set()

    def _pause(self, seconds: float) -> None:
        """Sleeps, unless it is woken or there is a reason to stop."""
        self._woken.wait(seconds)
        self._woken.clear()
        self.check()


class CreatedTask(Task):
    """A task, and what to return for it from `tools/call`."""

    def __init__(self, created: Created, talks: Talks, line: Line) -> None:
        super().__init__(created.ref, talks, line)
        self.create_task_result = created.create_task_result
        """For clients of MCP 2026-07-28."""
        self.create_task_result_legacy = created.create_task_result_legacy
        """For clients of MCP 2025-11-25."""


Work: TypeAlias = Callable[[Task], Json]
"""What a tool does, from its task to its result."""


class TaskBroker(Client):
    """A tool server's line to its broker, for any thread. Use it as a context manager, or
    `close` it.

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
        http: httpx.Client | None = None,
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
        self._http = http or httpx.Client(timeout=10)
        self._owns_http = http is None
        self._line = Line(self._account, self._http)
        self._starts: set[Future[None]] = set()
        self._running: dict[str, _Keeper] = {}
        self._closing: Future[None] = Future()
        self._following: Future[None] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def create(self, owner: Json, **task: Unpack[NewTask]) -> CreatedTask:
        """Creates a task for an owner (see `owner_from`); it is kept when this returns."""
        created = self._line.carry_out(self._talks.create(owner, task))
        return CreatedTask(created, self._talks, self._line)

    def task(self, ref: str) -> Task:
        """A task that exists."""
        return Task(ref, self._talks, self._line)

    def list(self, status: str | None = None) -> Iterator[TaskState]:
        """The tasks of this backend, the newest first, without results, errors and questions."""
        cursor = None
        while True:
            page = self._line.carry_out(self._talks.page(status=status, cursor=cursor))
            yield from page.tasks
            cursor = page.cursor
            if cursor is None:
                return

    def find(self, external_id: str) -> TaskState | None:
        """The task with this name of yours, if there is one."""
        return self._line.carry_out(self._talks.find(external_id))

    def start(self, owner: Json, work: Work, **task: Unpack[NewTask]) -> CreatedTask:
        """Creates a task and lets `work` run for it in a thread.

        What the work returns completes the task, TaskFailed fails it with that error, any other
        exception with an internal error. When the client asks for it to be cancelled, the next
        `progress`, `ask` or `check` of the work raises CancelRequested.
        """
        with self._starting():
            handle = self.create(owner, **task)
            if handle.create_task_result["status"] not in TERMINAL:
                self._run(handle, work, task.get("stall_after_ms"))
            return handle

    def resume(self, ref: str, work: Work) -> Task:
        """Lets `work` run for a task that exists, as after a restart of the tool server."""
        with self._starting():
            handle = self.task(ref)
            state = handle.read()
            if not state.over:
                self._run(handle, work, state.stall_after_ms)
            return handle

    def signals(self, *, wait: int = LONG_POLL) -> Iterator[Signal]:
        """The signals of the broker, as they come, until the client is closed.

        Each request waits for up to `wait` seconds (at most 60) at the broker. Signals are
        acknowledged when the loop comes back for more after the last one that came with them.
        A broker that is away is waited for.
        """
        self._refuse_if_closed()
        inbox = Inbox()
        while not self._closing.done():
            batch = self._unless_closed(self._talks.signals(inbox, wait))
            for signal in inbox.new_in(batch) if batch is not None else ():
                yield signal
                if self._closing.done():
                    return

    def _unless_closed(self, talk: Talk[T]) -> T | None:
        """What a talk leads to; None if the client is closed meanwhile. No request can be broken
        off from outside: its thread ends with it.
        """
        talking = _in_thread(lambda: self._line.carry_out(talk), "signals of the broker")
        ends: set[Future[Any]] = {talking, self._closing}
        wait(ends, return_when=FIRST_COMPLETED)
        return talking.result() if talking.done() else None

    def take(self, signal: Signal) -> bool:
        """Tells the work of a task what a signal says: to stop, or to look for its answers.

        False if no work of the task runs here: another process may have it.
        """
        with self._lock:
            keeper = self._running.get(signal.task_ref)
        if keeper is not None:
            keeper.take(signal)
        return keeper is not None

    def receiver(self) -> SignalReceiver:
        """For the backend's `callbackUrl`: its `receive` takes the signals posted there.

        ValueError if the client has no webhook secret.
        """
        return SignalReceiver(self._secret, self.take)

    def follow_signals(self) -> None:
        """Takes the signals that can be polled, in the background, until the client is closed.

        For one process of a backend: what one has polled, no other gets.
        """
        with self._lock:
            self._refuse_if_closed()
            if self._following is None:
                self._following = _in_thread(self._follow, "follower of signals")

    def _follow(self) -> None:
        try:
            for signal in self.signals():
                self.take(signal)
        except BrokerError as problem:
            unfollowed(problem)

    def close(self) -> None:
        """Stops what runs and fails its tasks; returns when that is reported, or, if it cannot be,
        10 seconds after the grace: then the log names the tasks.

        No thread can be ended from outside: work that never looks goes on, to no effect.
        """
        with self._lock:
            self._closed = True
            keepers = [*self._running.values()]
            if not self._closing.done():
                self._closing.set_result(None)
        for keeper in keepers:
            keeper.close()
        end = self._end_of_closing()
        while (open_ends := self._open_ends()) and (left := end - time.monotonic()) > 0:
            wait(open_ends, left)
        self._line.closed = True
        self._abandon()
        if self._owns_http:
            self._http.close()

    def _abandon(self) -> None:
        """Lets go of keepers that are still trying; their threads end with their request."""
        with self._lock:
            left = [*self._running]
            self._running.clear()
        atexit.unregister(self.close)
        for ref in left:
            unreported(ref, TOO_LATE)

    def _open_ends(self) -> set[Future[None]]:
        with self._lock:
            ends = {*self._starts, *(keeper.ended for keeper in self._running.values())}
            if self._following is not None and not self._following.done():
                ends.add(self._following)
            return ends

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Makes `close` wait: there may be a task in the end, to be reported on."""
        started: Future[None] = Future()
        with self._lock:
            self._refuse_if_closed()
            self._starts.add(started)
        try:
            yield
        finally:
            with self._lock:
                self._starts.remove(started)
            started.set_result(None)

    def _run(self, task: Task, work: Work, stall_after_ms: int | None) -> None:
        """Starts work, unless it runs here already: a create was repeated."""
        with self._lock:
            if task.ref in self._running:
                return
            if closed_meanwhile := self._closed:
                task.stop(Stopped())
            if not self._running:
                atexit.register(self.close)  # threads of a program that ends do not hear of it
            keeper = _Keeper(self._talks, self._line, self._grace, task, work, stall_after_ms)
            self._running[task.ref] = keeper
        keeper.ended.add_done_callback(partial(self._forget, task.ref))
        if closed_meanwhile:
            keeper.close()

    def _forget(self, ref: str, ended: Future[None]) -> None:
        with self._lock:
            if self._running.pop(ref, None) is None:
                return  # abandoned, which was said
            if not self._running:
                atexit.unregister(self.close)
        if (error := ended.exception()) is not None:
            log.error("nobody watches over task %s any more", ref, exc_info=error)


class _Keeper:
    """Watches over work to its end, and sees to it that the end gets known."""

    def __init__(
        self,
        talks: Talks,
        line: Line,
        grace: float,
        task: Task,
        work: Work,
        stall_after_ms: int | None,
    ) -> None:
        self._talks = talks
        self._line = line
        self._grace = grace
        self._task = task
        self._stall_after_ms = stall_after_ms
        self._closing: Future[float] = Future()
        """Once the client is closed: until when work may clean up."""
        self._told = False
        """Whether the work was told to stop, though the client is open."""
        self._doing = _in_thread(lambda: _do(work, task), f"work of task {task.ref}")
        self.ended = _in_thread(self._keep, f"keeper of task {task.ref}")

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
        self._told = True
        self._task.stop(reason)

    def _keep(self) -> None:
        self._watch()
        if not self._doing.done():
            wait({self._doing}, self._closing.result() - time.monotonic())
        ending = self._talks.ending(self._task.ref, self._outcome())
        talk = self._talks.deliver(self._task.ref, ending, give_up=self._closing.done)
        self._line.carry_out(talk, self._pause)

    def _pause(self, seconds: float) -> None:
        """Sleeps, but not into the closing: what is left of the time is for attempts."""
        if self._closing.done():
            time.sleep(seconds)
        else:
            wait({self._closing}, seconds)

    def _watch(self) -> None:
        """Until the work has ended, or its client is closed."""
        pulse = self._talks.pulse(self._stall_after_ms)
        while not self._ends_within(pulse.pause):
            if self._told:
                continue  # work that does not stop shall not keep its task alive
            reason = self._line.carry_out(
                self._talks.beat(self._task.ref, lively=pulse.wants_sign())
            )
            if reason is not None:
                self._tell_to_stop(reason)

    def _ends_within(self, seconds: float | None) -> bool:
        ends: set[Future[Any]] = {self._doing, self._closing}
        return bool(wait(ends, seconds, FIRST_COMPLETED).done)

    def _outcome(self) -> Json | BaseException:
        if not self._doing.done():
            return self._task.reason_to_stop or Stopped()
        return self._doing.exception() or self._doing.result()


def _do(work: Work, task: Task) -> Json:
    task.check()
    running.set(task)
    return work(task)


def _in_thread(function: Callable[[], T], name: str) -> "Future[T]":
    """What a function returns or raises, in a thread that does not keep the process alive."""
    future: Future[T] = Future()
    context = copy_context()

    def run() -> None:
        try:
            future.set_result(context.run(function))
        except BaseException as error:  # noqa: BLE001 - whatever it was, the keeper hears of it
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
