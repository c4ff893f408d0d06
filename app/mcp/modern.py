"""The methods of MCP 2026-07-28 that the broker answers."""

import json
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from msgspec import UNSET, Raw

from app import rawjson
from app.asgi import Headers
from app.broker.answer import answer
from app.broker.cancel import request_cancel
from app.broker.context import Broker, Caller
from app.broker.read import read
from app.mcp.eras import Modern, Params, check_name, invalid_params, mismatch, part
from app.mcp.jsonrpc import (
    METHOD_NOT_FOUND,
    MISSING_CLIENT_CAPABILITY,
    Request,
    RpcFailure,
)
from app.mcp.listening import Listening
from app.mcp.refusals import refusals
from app.mcp.streams import Held
from app.mcp.subjects import LISTEN, wanted_ids
from app.views import modern as view

_MISSING_CAPABILITY = json.dumps({"requiredCapabilities": {"extensions": {view.EXTENSION: {}}}})


class Call(NamedTuple):
    """One `tasks/*` request of a caller, in order and ready to be carried out."""

    broker: Broker
    caller: Caller
    task_id: str
    params: Params


async def _get(call: Call) -> str:
    task = await read(call.broker, call.task_id, call.caller)
    return view.get_task_result(task, call.task_id)


async def _update(call: Call) -> str:
    if call.params.inputResponses is UNSET:
        raise invalid_params("params.inputResponses is missing")
    responses = part(call.params.inputResponses, dict[str, Raw], "params.inputResponses")
    if not all(map(rawjson.is_object, responses.values())):
        raise invalid_params("params.inputResponses must map keys to result objects")
    texts = {key: rawjson.text(response) for key, response in responses.items()}
    await answer(call.broker, call.task_id, call.caller, texts)
    return view.ACKNOWLEDGED


async def _cancel(call: Call) -> str:
    await request_cancel(call.broker, call.task_id, call.caller)
    return view.ACKNOWLEDGED


_TASK_METHODS: dict[str, Callable[[Call], Awaitable[str]]] = {
    "tasks/get": _get,
    "tasks/update": _update,
    "tasks/cancel": _cancel,
}
METHODS = frozenset({"server/discover", LISTEN, *_TASK_METHODS})


class Dispatcher:
    """Carries out modern requests. `name_missing` is told of a tolerated missing Mcp-Name."""

    def __init__(
        self,
        broker: Broker,
        versions: Sequence[str],
        listening: Listening,
        *,
        strict_headers: bool,
        name_missing: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._discovery = view.discovery(versions)
        self._listening = listening
        self._strict_headers = strict_headers
        self._name_missing = name_missing

    async def __call__(
        self, message: Request, request: Modern, headers: Headers, caller: Caller
    ) -> str | Held:
        """The result as JSON text, or as a stream. Raises RpcFailure, or a BrokerError of the
        storage.
        """
        method = message.method
        if method == "server/discover":
            return self._discovery
        if method == LISTEN:
            ids = wanted_ids(request.params)
            if ids:
                _check_extension(request)
            return await self._listening.open(message.id, ids, headers, caller)
        carry_out = _TASK_METHODS.get(method)
        if carry_out is None:
            raise RpcFailure(METHOD_NOT_FOUND, "Method not found: this server has tasks only", 404)
        task_id = self._task_id(request.params, headers)
        _check_extension(request)
        with refusals():
            return await carry_out(Call(self._broker, caller, task_id, request.params))

    def _task_id(self, params: Params, headers: Headers) -> str:
        if params.task_id is UNSET:
            raise invalid_params("params.taskId is missing")
        task_id = part(params.task_id, str, "params.taskId")
        if not check_name(headers, task_id):
            if self._strict_headers:
                raise mismatch("the Mcp-Name header is missing")
            self._name_missing()
        return task_id


def _check_extension(request: Modern) -> None:
    if view.EXTENSION not in request.extensions:
        raise RpcFailure(
            MISSING_CLIENT_CAPABILITY,
            f"Missing required client capability: extension {view.EXTENSION}",
            400,
            _MISSING_CAPABILITY,
        )
