"""`/v1/tasks`, `/v1/signals`: backends create tasks, look at their own, and learn of news."""

import asyncio
import binascii
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Coroutine
from typing import Annotated, Any
from uuid import UUID

from fastapi import APIRouter, Query, Request, Response

from app.asgi import Answer, ClientGone, Receive, client_gone, headers_of, read_body
from app.auth.senders import Senders
from app.backends import documentation, inputs, outputs
from app.backends.owners import Owners
from app.broker.context import Broker
from app.broker.create import create
from app.broker.read import page, read_of_backend
from app.broker.tell import acknowledge, news
from app.db.signals import Outstanding
from app.db.tasks import Filter
from app.domain.backends import Backend
from app.domain.tasks import Status
from app.errors import Fault, Invalid
from app.rawjson import storable
from app.telemetry import Metrics

MAX_PAGE = 200
MAX_WAIT_SECONDS = 60


def to_response(answer: Answer) -> Response:
    content_type = (answer.content_type or b"application/json").decode()
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    return Response(answer.body, answer.status, headers, content_type)


def router(
    broker: Broker,
    owners: Owners,
    senders: Senders,
    metrics: Metrics,
    ending: asyncio.Event,
    *,
    max_body_bytes: int,
) -> APIRouter:
    """The routes, on these parts of the broker; nobody waits any longer when it is `ending`."""
    routes = APIRouter(prefix="/v1", tags=["tasks"], default_response_class=Response)

    async def sender(request: Request) -> Backend:
        return await senders.by_key(request.headers.get("authorization"))

    @routes.post("/tasks", **documentation.CREATE)
    async def create_task(request: Request) -> Response:
        backend = await sender(request)
        body = await read_body(headers_of(request.scope), request.receive, max_body_bytes)
        wanted, owner = inputs.new_task(body)
        fingerprints = broker.keyring.fingerprints(await owners.named(owner, backend))
        made = await create(broker, backend, fingerprints, wanted)
        if made.new:
            metrics.created.inc()
        return to_response(Answer(201 if made.new else 200, outputs.created(made)))

    @routes.get("/tasks/{task_ref}", **documentation.READ)
    async def read_task(request: Request, task_ref: str) -> Response:
        backend = await sender(request)
        task = await read_of_backend(broker, backend, inputs.task_ref(task_ref))
        return to_response(Answer(200, outputs.task(task)))

    @routes.get("/tasks", **documentation.LIST)
    async def list_tasks(
        request: Request,
        status: Status | None = None,
        externalId: Annotated[str | None, Query(min_length=1, max_length=255)] = None,  # noqa: N803
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 50,
        cursor: str | None = None,
    ) -> Response:
        backend = await sender(request)
        if externalId is not None and not storable(externalId):
            raise Invalid(faults=[Fault("/externalId", "must not contain NUL")])
        wanted = Filter(
            now=broker.clock(),
            backend_id=backend.id,
            status=status,
            external_id=externalId,
            before=None if cursor is None else _decode_cursor(cursor),
            limit=limit,
        )
        tasks, next_start = await page(broker, wanted)
        following = None if next_start is None else _encode_cursor(next_start)
        return to_response(Answer(200, outputs.page(tasks, following)))

    @routes.get("/signals", **documentation.SIGNALS)
    async def poll_signals(
        request: Request,
        after: str | None = None,
        wait: Annotated[int, Query(ge=0, le=MAX_WAIT_SECONDS)] = 0,
    ) -> Response:
        backend = await sender(request)
        _refuse_others(request, "after", "wait")
        if after is not None:
            await acknowledge(broker, backend, inputs.signal_ids(after))
        asking = news(broker, backend, wait=wait > 0)
        found = await (_patiently(asking, request.receive, ending, wait) if wait else asking)
        return to_response(Answer(200, outputs.news(found)))

    return routes


def _refuse_others(request: Request, *known: str) -> None:
    """Refuses parameters that are not known: whoever sends them believes that they do something."""
    others = request.query_params.keys() - set(known)
    if others:
        faults = [Fault(f"/{name}", f"the parameters are {' and '.join(known)}") for name in others]
        raise Invalid("There is no such parameter.", faults=faults)


async def _patiently(
    asking: Coroutine[Any, Any, list[Outstanding]],
    receive: Receive,
    ending: asyncio.Event,
    seconds: float,
) -> list[Outstanding]:
    """What was asked for; nothing when it did not come in time. Raises ClientGone."""
    asked = asyncio.ensure_future(asking)
    gone = asyncio.ensure_future(client_gone(receive))
    over = asyncio.ensure_future(ending.wait())
    try:
        await asyncio.wait(
            (asked, gone, over), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
        )
        if asked.done():
            return asked.result()
        if gone.done():
            raise ClientGone
        return []
    finally:
        for task in (asked, gone, over):
            task.cancel()
        await asyncio.gather(asked, gone, over, return_exceptions=True)


def _encode_cursor(ref: UUID) -> str:
    return urlsafe_b64encode(ref.bytes).decode().rstrip("=")


def _decode_cursor(cursor: str) -> UUID:
    try:
        return UUID(bytes=urlsafe_b64decode(cursor + "=="))
    except (binascii.Error, ValueError):
        raise Invalid(
            "The cursor is not one of this broker's; pass a nextCursor on as it is.",
            faults=[Fault("/cursor", "malformed")],
        ) from None
