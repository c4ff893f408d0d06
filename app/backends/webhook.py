"""`POST /v1/webhooks/{backend}`: a plain ASGI callable that applies events."""

import structlog

from app.asgi import (
    Answer,
    ClientGone,
    Headers,
    Receive,
    Scope,
    Send,
    headers_of,
    read_body,
    send_answer,
    still_connected,
    text_header,
)
from app.auth.senders import Senders
from app.backends import inputs, outputs
from app.backends.problems import document, problem
from app.broker.context import Broker
from app.broker.report import Reported, report
from app.broker.tell import settle
from app.domain.backends import NAME, Backend
from app.errors import BrokerError, Fault, Invalid, Refused, Unauthenticated
from app.telemetry import Metrics

log = structlog.get_logger(__name__)

PREFIX = "/v1/webhooks/"


class WebhookEndpoint:
    """Takes the events of every backend."""

    def __init__(
        self, broker: Broker, senders: Senders, metrics: Metrics, *, max_body_bytes: int
    ) -> None:
        self._broker = broker
        self._senders = senders
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            answer, outcome = await self._answer(scope, receive)
            has_news = outcome is not None and outcome.newest_signal is not None
            heard = has_news and await still_connected(receive)
            await send_answer(send, answer)
        except ClientGone:
            return
        if outcome is not None and has_news and (heard or outcome.is_the_end):
            await self._settle(outcome)

    async def _settle(self, outcome: Reported) -> None:
        try:
            await settle(self._broker, outcome)
        except BrokerError as error:  # then it is told once more than needed
            log.warning("signals were not settled", reason=error.detail)

    async def _answer(self, scope: Scope, receive: Receive) -> tuple[Answer, Reported | None]:
        if scope["method"] != "POST":
            refused = document(405, "method", "Method not allowed", "Events are sent by POST.")
            return Answer(405, refused.body, refused.content_type, ((b"allow", b"POST"),)), None
        try:
            headers = headers_of(scope)
            body = await read_body(headers, receive, self._max_body_bytes)
            sender = await self._sender(scope["path"].removeprefix(PREFIX), headers, body)
            outcome = await self._report(sender, headers, body)
        except BrokerError as error:
            answer = problem(error)
            self._count(str(answer.status))
            if answer.status == 500:
                log.error("event failed", reason=error.detail)  # noqa: TRY400 - no trace
            return answer, None
        except ClientGone:
            raise
        except Exception:
            log.exception("event failed")
            self._count("500")
            failed = document(500, "internal", "Internal error", "The broker failed; try again.")
            return failed, None
        self._count(outcome.verdict)
        return Answer(200, outputs.reported(outcome)), outcome

    async def _sender(self, name: str, headers: Headers, body: bytes) -> Backend:
        authorization = text_header(headers, b"authorization")
        if NAME.fullmatch(name) is None:
            raise Unauthenticated("The path names no backend.")
        if authorization is None:
            return await self._senders.by_signature(
                name,
                headers.get(b"webhook-id", b""),
                headers.get(b"webhook-timestamp", b""),
                headers.get(b"webhook-signature", b""),
                body,
            )
        backend = await self._senders.by_key(authorization)
        if backend.name != name:
            raise Unauthenticated("This API key belongs to another backend than the path names.")
        return backend

    async def _report(self, sender: Backend, headers: Headers, body: bytes) -> Reported:
        event = inputs.event(body, _webhook_id(headers))
        try:
            return await report(self._broker, sender, event)
        except Refused as refused:
            faults = [Fault(f"/data{fault.pointer}", fault.detail) for fault in refused.faults]
            raise Refused(refused.detail, faults=faults) from None

    def _count(self, outcome: str) -> None:
        self._metrics.events.labels(outcome).inc()


def _webhook_id(headers: Headers) -> str | None:
    """The id that an event is known by; the header is honoured from every sender."""
    raw = headers.get(b"webhook-id")
    if not raw:
        return None
    if len(raw) > inputs.MAX_TEXT or not raw.isascii() or b"\0" in raw:
        raise Invalid(f"webhook-id must have at most {inputs.MAX_TEXT} ASCII characters, no NUL.")
    return raw.decode("ascii")
