"""`subscriptions/listen`: a client is told how its tasks are, and how they change.

(MCP 2026-07-28, "Subscriptions"; Tasks extension, "Task Status Notifications".)
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

import structlog

from app.asgi import Headers, text_header
from app.broker.context import Broker, Caller
from app.broker.follow import Seen, follow_all, own_tasks
from app.errors import Unauthenticated
from app.mcp import jsonrpc
from app.mcp.door import INTERNAL
from app.mcp.eras import invalid_params
from app.mcp.jsonrpc import INVALID_PARAMS, INVALID_REQUEST, RpcFailure
from app.mcp.rechecking import Rechecking
from app.mcp.refusals import EXPIRED
from app.mcp.streams import Held
from app.mcp.subjects import LISTEN
from app.views import modern as view

log = structlog.get_logger(__name__)

_EXPIRED = json.dumps({"code": INVALID_PARAMS, "message": EXPIRED})


class Listening:
    """Opens streams; one may name `max_tasks`."""

    def __init__(self, broker: Broker, rechecking: Rechecking, *, max_tasks: int) -> None:
        self._broker = broker
        self._recheck = rechecking
        self._max_tasks = max_tasks

    async def open(self, rpc_id: bytes, ids: list[str], headers: Headers, caller: Caller) -> Held:
        """The stream for a request that names these tasks. Raises RpcFailure."""
        if len(ids) > self._max_tasks:
            raise invalid_params(
                f"params.notifications.taskIds names {len(ids)} tasks; "
                f"one stream takes {self._max_tasks}, open several"
            )
        known = await own_tasks(self._broker, ids, caller)
        states = follow_all(self._broker, known, caller)
        authorization = text_header(headers, b"authorization")
        return Held(
            rpc_id,
            caller.owner[0],
            self._messages(rpc_id, list(known) if ids else None, states, authorization),
            states,
            events=True,
            farewell=_end(rpc_id),
            anonymous=caller.anonymous,
        )

    async def _messages(
        self,
        rpc_id: bytes,
        known: list[str] | None,
        states: AsyncGenerator[Seen, None],
        authorization: str | None,
    ) -> AsyncGenerator[bytes, None]:
        subscription = rpc_id.decode()
        acknowledged = view.acknowledgement(known, subscription)
        yield jsonrpc.notification_body("notifications/subscriptions/acknowledged", acknowledged)
        if known is None:  # nothing of what was asked for will ever come
            await asyncio.get_running_loop().create_future()
        told: dict[str, int] = {}
        try:
            async with aclosing(states):
                async for seen in states:
                    params = _params(seen, subscription)
                    if told.get(seen.task_id) != hash(params):
                        told[seen.task_id] = hash(params)
                        await self._recheck(authorization, LISTEN)
                        yield jsonrpc.notification_body("notifications/tasks", params)
                    del seen, params  # they may be large, and the next one far
        except Unauthenticated as error:
            failure = RpcFailure(INVALID_REQUEST, error.detail, 401)
            yield jsonrpc.error_body(rpc_id, failure)
        except Exception:
            log.exception("a subscription failed")
            yield jsonrpc.error_body(rpc_id, INTERNAL)
        else:
            yield _end(rpc_id)


def _params(seen: Seen, subscription: str) -> str:
    if seen.expired:
        return view.expiry_notification(seen.task, seen.task_id, subscription, _EXPIRED)
    return view.task_notification(seen.task, seen.task_id, subscription)


def _end(rpc_id: bytes) -> bytes:
    return jsonrpc.result_body(rpc_id, view.end_of_subscription(rpc_id.decode()))
