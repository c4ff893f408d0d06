"""The methods of MCP 2025-11-25 that the broker answers, and `initialize` of the versions before.

No session is kept: every request stands alone, as in the era that came after.
"""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

import structlog
from msgspec import UNSET, Raw

from app.auth.cursors import Cursors
from app.broker.answer import answer
from app.broker.cancel import Ended, cancel_now
from app.broker.context import Broker, Caller
from app.broker.follow import follow
from app.broker.read import page_of_owner, read
from app.domain.task_ids import ID_LENGTH
from app.domain.tasks import Task
from app.errors import Expired, Invalid, NotFound, Unauthenticated
from app.mcp import jsonrpc
from app.mcp.door import INTERNAL
from app.mcp.eras import Params, invalid_params, part
from app.mcp.jsonrpc import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    Notification,
    Response,
    RpcFailure,
)
from app.mcp.rechecking import Rechecking
from app.mcp.refusals import refusals
from app.mcp.streams import Held
from app.views import legacy as view

log = structlog.get_logger(__name__)

PAGE = 50
METHODS = frozenset(
    ("initialize", "ping", "tasks/get", "tasks/result", "tasks/list", "tasks/cancel")
)
CANCELLED = "notifications/cancelled"


class Call(NamedTuple):
    """One request of a caller, ready to be carried out."""

    id: bytes
    method: str
    params: Params
    version: str
    caller: Caller
    authorization: str | None
    """The caller's credential: an answer that takes its time is for who still has it."""
    streams: bool
    """Whether the client accepts a stream of events as the answer."""


class LegacyDispatcher:
    def __init__(self, broker: Broker, rechecking: Rechecking, cursors: Cursors) -> None:
        self._broker = broker
        self._recheck = rechecking
        self._cursors = cursors
        self._asking: dict[str, object] = {}
        """For each task the newest stream: it alone puts the questions."""
        self._methods: dict[str, Callable[[Call], Awaitable[str | Held]]] = {
            "initialize": self._initialize,
            "ping": self._ping,
            "tasks/get": self._get,
            "tasks/result": self._result,
            "tasks/list": self._list,
            "tasks/cancel": self._cancel,
        }

    async def __call__(self, call: Call) -> str | Held:
        """The result as JSON text. Raises RpcFailure, or a BrokerError of the storage."""
        carry_out = self._methods.get(call.method)
        has_tasks = call.version not in view.WITHOUT_TASKS
        if carry_out is None or (call.method.startswith("tasks/") and not has_tasks):
            raise RpcFailure(METHOD_NOT_FOUND, "Method not found: this server has tasks only", 200)
        try:
            with refusals():
                return await carry_out(call)
        except RpcFailure as failure:
            failure.status = 200  # in this era an error is an answer like any other
            raise

    async def take_answer(self, response: Response, caller: Caller) -> None:
        """Takes a client's answer to a question that came with `tasks/result`.

        Answers to anything else, or to a task that is gone, are of no use to anybody.
        """
        question = named_question(response.id)
        if question is None:
            return
        task_id, key = question
        with suppress(NotFound, Expired):
            result = response.result
            if result is None:  # the client cannot ask its user, or does not want to
                task = await read(self._broker, task_id, caller)
                result = next((view.refused(q) for q in task.outstanding if q.key == key), None)
            if result is not None:
                await answer(self._broker, task_id, caller, {key: result})

    async def _initialize(self, call: Call) -> str:
        asked = call.params.protocolVersion
        wanted = "" if asked is UNSET else part(asked, str, "params.protocolVersion")
        version = wanted if wanted in view.VERSIONS else view.VERSION
        return view.initialized(version, listable=not call.caller.anonymous)

    async def _ping(self, _: Call) -> str:
        return "{}"

    async def _get(self, call: Call) -> str:
        task_id = _task_id(call)
        return view.task_object(await read(self._broker, task_id, call.caller), task_id)

    async def _cancel(self, call: Call) -> str:
        task_id = _task_id(call)
        try:
            task = await cancel_now(self._broker, task_id, call.caller)
        except Ended as ended:
            status = view.status(ended.task)
            message = f"Cannot cancel task: already in terminal status '{status}'"
            raise RpcFailure(INVALID_PARAMS, message, 200) from None
        return view.task_object(task, task_id)

    async def _list(self, call: Call) -> str:
        if call.caller.anonymous:
            raise RpcFailure(
                METHOD_NOT_FOUND,
                "Method not found: tasks/list needs a caller with an identity",
                200,
            )
        owner = call.caller.owner
        before = None
        if call.params.cursor not in (UNSET, Raw(b"null")):
            cursor = part(call.params.cursor, str, "params.cursor")
            try:
                before = self._cursors.open(cursor, owner)
            except Invalid as error:
                raise RpcFailure(INVALID_PARAMS, f"Invalid params: {error.detail}", 200) from None
        tasks, last = await page_of_owner(self._broker, call.caller, before, PAGE)
        mint = self._broker.keyring.mint
        listed = [view.task_object(task, mint(task.ref, owner, task.key_id)) for task in tasks]
        return view.task_list(listed, None if last is None else self._cursors.seal(last, owner))

    async def _result(self, call: Call) -> str | Held:
        """Blocks until the task has ended; over a stream, its questions are put meanwhile."""
        task_id = _task_id(call)
        states = follow(self._broker, task_id, call.caller)
        task = await anext(states)
        if not task.status.terminal:
            messages = self._messages(call, task, states, task_id)
            return Held(
                call.id,
                call.caller.owner[0],
                messages,
                states,
                call.streams,
                anonymous=call.caller.anonymous,
            )
        await states.aclose()
        return _ending(task, task_id)

    async def _messages(
        self, call: Call, task: Task, states: AsyncGenerator[Task, None], task_id: str
    ) -> AsyncGenerator[bytes, None]:
        """Every question of a task once, and the answer to the request when it has ended."""
        me = self._asking[task_id] = object()
        put: set[str] = set()
        try:
            with refusals():
                while not task.status.terminal:
                    for question in task.outstanding:
                        if question.key not in put and self._asking.get(task_id) is me:
                            put.add(question.key)
                            method, params = view.question(question, task_id)
                            yield jsonrpc.request_body(f"{task_id}:{question.key}", method, params)
                    task = await anext(states)
                    await self._recheck(call.authorization, call.method)
                result = _ending(task, task_id)
        except Unauthenticated as error:
            failure = RpcFailure(INVALID_REQUEST, error.detail, 401)
            yield jsonrpc.error_body(call.id, failure)
        except RpcFailure as failure:
            yield jsonrpc.error_body(call.id, failure)
        except Exception:
            log.exception("a task could not be followed")
            yield jsonrpc.error_body(call.id, INTERNAL)
        else:
            yield jsonrpc.result_body(call.id, result)
        finally:
            if self._asking.get(task_id) is me:
                del self._asking[task_id]


def _ending(task: Task, task_id: str) -> str:
    """What the call would have returned. Raises what it would have failed with."""
    if task.result is not None:
        return view.call_result(task.result, task_id)
    if task.error is not None:
        raise jsonrpc.StoredFailure(task.error)
    raise RpcFailure(INTERNAL_ERROR, "The task was cancelled", 200)


def _task_id(call: Call) -> str:
    if call.params.task_id is UNSET:
        raise invalid_params("params.taskId is missing")
    return part(call.params.task_id, str, "params.taskId")


def named_question(rpc_id: bytes) -> tuple[str, str] | None:
    """The task and the key that the id of a question names."""
    if rpc_id[:1] != b'"':
        return None
    name: str = json.loads(rpc_id)
    if name[ID_LENGTH : ID_LENGTH + 1] != ":":
        return None
    return name[:ID_LENGTH], name[ID_LENGTH + 1 :]


def withdrawn_request(message: Notification) -> bytes | None:
    """The id of the request that a client does not wait for any more."""
    if message.method != CANCELLED or message.params is None:
        return None
    try:
        request_id = part(message.params, Params, "params").requestId
    except RpcFailure:
        return None
    return None if request_id is UNSET else bytes(request_id)
