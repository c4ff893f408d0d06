"""The Python SDK takes signals that are posted: signatures, duplicates, failures, ASGI."""

import asyncio
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from email.message import Message
from traceback import walk_stack
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.routing import Mount, Route
from werkzeug.datastructures import Headers as FlaskHeaders

from app.domain import signing
from taskbroker_sdk import (
    AsyncSignalReceiver,
    AsyncTaskBroker,
    Headers,
    Signal,
    SignalReceiver,
    SignalReply,
    TaskBroker,
    sign,
    verify,
)
from tests.sdk.signals import Delivery, delivery, message, new_id
from tests.support.secrecy import secret
from tests.support.servers import serving
from tests.support.waiting import until

SECRET = secret(signing.encode_secret(b"the secret of this backend"))
FORMER = secret(signing.encode_secret(b"its former secret, not yet expired"))
FOREIGN = secret(signing.encode_secret(b"the secret of somebody else"))
NOW = 1_700_000_000
YES = {"action": "accept", "content": {"sure": True}}

Receiver = SignalReceiver | AsyncSignalReceiver
RECEIVERS = [SignalReceiver, AsyncSignalReceiver]


# --- signatures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "webhook_id", "timestamp", "body", "signature"),
    [
        (
            "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1614265330,
            b'{"test": 2432232314}',
            "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
        ),
        (
            "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD",
            "msg_27UH4WbU6Z5A5EzD8u03UvzRbpk",
            1649367553,
            b'{"email":"test@example.com","username":"test_user"}',
            "v1,tZ1I4/hDygAJgO5TYxiSd6Sd0kDW6hPenDe+bTa3Kkw=",
        ),
    ],
)
def test_the_published_examples_of_standard_webhooks_are_genuine(
    key: str, webhook_id: str, timestamp: int, body: bytes, signature: str
) -> None:
    headers = {
        "webhook-id": webhook_id,
        "webhook-timestamp": f"{timestamp}",
        "webhook-signature": f"v1,bm90IGl0 {signature}",
    }
    assert verify(key, headers, body, now=timestamp)
    assert not verify(FOREIGN, headers, body, now=timestamp)
    assert not verify(key, headers, body), "it was sent years ago"


@given(st.binary(), st.binary(), st.integers(-400, 400))
def test_what_the_broker_signs_is_genuine_for_its_own_bytes_and_five_minutes(
    body: bytes, other: bytes, age: int
) -> None:
    sent = delivery(body, SECRET, timestamp=NOW - age)
    assert verify(SECRET, sent.headers, body, now=NOW) == (abs(age) <= 300)
    assert verify(SECRET, sent.headers, other, now=NOW - age) == (other == body)
    assert (
        sign(SECRET, sent.headers["webhook-id"], NOW - age, body)
        == (sent.headers["webhook-signature"])
    )


SENT = delivery(message(), SECRET, timestamp=NOW)


def as_mail(headers: dict[str, str]) -> Message:
    """As `http.server` has them."""
    mail = Message()
    for name, value in headers.items():
        mail[name] = value
    return mail


@pytest.mark.parametrize(
    "form",
    [
        dict,
        httpx.Headers,
        FlaskHeaders,
        as_mail,
        lambda headers: {name.title(): value for name, value in headers.items()},
        lambda headers: [
            (name.upper().encode(), value.encode()) for name, value in headers.items()
        ],
        lambda headers: iter([*headers.items(), ("accept", "*/*"), ("accept", "text/plain")]),
        lambda headers: {**headers, "x-strange": None, 7: []},
    ],
    ids=["dict", "httpx", "Flask", "http.server", "capitals", "ASGI", "pairs", "strange company"],
)
def test_headers_come_in_any_form(form: Callable[[Any], Headers]) -> None:
    assert verify(SECRET, form(SENT.headers), SENT.body, now=NOW)


@pytest.mark.parametrize(
    "wrong",
    [
        {"webhook-id": None},
        {"webhook-id": ""},
        {"webhook-id": new_id()},
        {"webhook-id": SENT.headers["webhook-id"] + "."},
        {"webhook-id": "m" * 256},
        {"webhook-id": "msg_größer"},
        {"webhook-id": ["msg_1"]},
        {"webhook-timestamp": None},
        {"webhook-timestamp": f"{NOW + 1}"},
        {"webhook-timestamp": f"{NOW}.0"},
        {"webhook-timestamp": f" {NOW}"},
        {"webhook-timestamp": f"-{NOW}"},
        {"webhook-timestamp": "٣"},
        {"webhook-timestamp": "9" * 5000},
        {"webhook-signature": None},
        {"webhook-signature": ""},
        {"webhook-signature": "v1,"},
        {"webhook-signature": SENT.headers["webhook-signature"][3:]},
        {"webhook-signature": SENT.headers["webhook-signature"][:-1]},
        {"webhook-signature": "v1a," + SENT.headers["webhook-signature"][3:]},
        {"webhook-signature": "v2," + SENT.headers["webhook-signature"][3:]},
        {"webhook-signature": "v1,\udcff €"},
        {"webhook-signature": b"\xff\xfe"},
        {"Webhook-Id": SENT.headers["webhook-id"]},
        {"WEBHOOK-SIGNATURE": "v1,twice"},
    ],
    ids=str,
)
def test_what_is_malformed_is_refused_and_raises_nothing(wrong: dict[str, Any]) -> None:
    assert verify(SECRET, SENT.headers, SENT.body, now=NOW)
    headers = {
        name: value for name, value in {**SENT.headers, **wrong}.items() if value is not None
    }
    assert not verify(SECRET, headers, SENT.body, now=NOW)


def test_unknown_versions_of_signatures_are_skipped() -> None:
    given = SENT.headers["webhook-signature"]
    headers = {**SENT.headers, "webhook-signature": f"v1a,ed25519 v2,later  {given} v0,old"}
    assert verify(SECRET, headers, SENT.body, now=NOW)


def test_secrets_are_rotated_on_either_side_first() -> None:
    both = delivery(message(), SECRET, FORMER)
    for known in (SECRET, FORMER, [FOREIGN, FORMER], (SECRET, FORMER), iter([SECRET])):
        assert verify(known, both.headers, both.body)
    new = delivery(message(), SECRET)
    assert verify([FORMER, SECRET], new.headers, new.body)
    assert not verify(FORMER, new.headers, new.body)


@pytest.mark.parametrize("receiver", RECEIVERS)
@pytest.mark.parametrize("wrong", ["", "whsec_hush!", "tbk_hush", [], [SECRET, "hush"]])
def test_what_is_no_secret_is_refused_at_once_and_not_quoted(
    receiver: type[Receiver], wrong: Any
) -> None:
    with pytest.raises(ValueError, match="webhook secret") as refusal:
        receiver(wrong, print)
    assert "hush" not in str(refusal.value)
    assert SECRET not in str(refusal.value) + repr(receiver(SECRET, print))


@pytest.mark.parametrize("client", [TaskBroker, AsyncTaskBroker])
def test_a_client_without_a_secret_has_no_receiver(
    client: type[TaskBroker] | type[AsyncTaskBroker],
) -> None:
    with pytest.raises(ValueError, match="BROKER_WEBHOOK_SECRET"):
        client("http://broker.example", "my-tools", "tbk_key").receiver()


# --- what a signal says --------------------------------------------------------------------------


def signal(kind: str, status: str = "working") -> Signal:
    made = Signal.of("msg_1", message(kind, status=status))
    assert made is not None
    return made


def test_a_signal_has_all_that_was_sent() -> None:
    responses = {"sure": YES}
    said = message("task.input_received", externalId="job-81", inputResponses=responses)
    assert Signal.of("msg_1", said) == Signal(
        id="msg_1",
        type="task.input_received",
        task_ref="0193",
        external_id="job-81",
        status="working",
        input_responses=responses,
        at=datetime(2026, 11, 30, 9, tzinfo=UTC),
    )
    assert "accept" not in repr(Signal.of("msg_1", said)), "answers are for the work only"


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("task.cancel_requested", "working", "stopped, as the client asked"),
        ("task.cancel_requested", "cancelled", "the task has ended already: cancelled"),
        ("task.cancel_requested", "failed", "the task has ended already: failed"),
        ("task.stalled", "failed", "the task has ended already: failed"),
        ("task.expired", "working", "the task is gone: The task has expired"),
        ("task.input_received", "working", None),
        ("task.input_received", "input_required", None),
    ],
)
def test_a_signal_gives_the_reason_to_stop_that_a_heartbeat_would_find(
    kind: str, status: str, reason: str | None
) -> None:
    found = signal(kind, status).reason_to_stop
    assert (None if found is None else str(found)) == reason


# --- both receivers ------------------------------------------------------------------------------


class Handler:
    """Notes what it is called with; raises what it was told to."""

    def __init__(self) -> None:
        self.signals: list[Signal] = []
        self.failures: list[Exception] = []

    def __call__(self, signal: Signal) -> None:
        self.signals.append(signal)
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture
def handler() -> Handler:
    return Handler()


@pytest.fixture(params=RECEIVERS)
def receiver(request: pytest.FixtureRequest, handler: Handler) -> Receiver:
    made: Receiver = request.param(SECRET, handler, max_body=10_000)
    return made


async def post(receiver: Receiver, sent: Delivery) -> SignalReply:
    if isinstance(receiver, AsyncSignalReceiver):
        return await receiver.receive(sent.headers, sent.body)
    return await asyncio.to_thread(receiver.receive, sent.headers, sent.body)


async def test_a_signal_is_handled_once_however_often_it_comes(
    receiver: Receiver, handler: Handler
) -> None:
    first, second = new_id(), new_id()
    for webhook_id in (first, first, second, first):
        assert await post(receiver, delivery(message(), SECRET, webhook_id=webhook_id)) == ("", 204)
    assert [signal.id for signal in handler.signals] == [first, second]


async def test_a_signal_whose_handler_failed_may_come_again_and_the_log_does_not_have_it(
    receiver: Receiver, handler: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    responses = {"code": {"action": "accept", "content": {"door": "4711"}}}
    said = message("task.input_received", inputResponses=responses)
    webhook_id = new_id()
    handler.failures.append(RuntimeError("no disk left"))

    statuses = [
        (await post(receiver, delivery(said, SECRET, webhook_id=webhook_id))).status
        for _ in range(3)
    ]

    assert statuses == [500, 204, 204]
    assert [signal.input_responses for signal in handler.signals] == [responses, responses]
    [record] = [record for record in caplog.records if record.name == "taskbroker_sdk"]
    assert record.getMessage() == "signal task.input_received of task 0193 could not be handled"
    assert "no disk left" in caplog.text
    assert "4711" not in caplog.text


async def test_what_is_not_genuine_is_not_handled(receiver: Receiver, handler: Handler) -> None:
    genuine = delivery(message(), SECRET)
    for forged in (
        delivery(message(), FOREIGN),
        delivery(message(), SECRET, timestamp=int(time.time()) - 400),
        Delivery(genuine.headers, genuine.body + b" "),
        Delivery({}, genuine.body),
    ):
        assert (await post(receiver, forged)).status == 401
    assert handler.signals == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[]",
        b'"task.expired"',
        json.dumps({"type": "task.expired"}).encode(),
        json.dumps({**message(), "type": 7}).encode(),
        json.dumps({**message(), "data": []}).encode(),
        json.dumps({**message(), "timestamp": "noon"}).encode(),
        json.dumps(message(taskRef=193)).encode(),
        json.dumps(message(status=None)).encode(),
        json.dumps(message(externalId=81)).encode(),
        json.dumps(message(inputResponses=[])).encode(),
        b'{"type":' * 1000,
    ],
    ids=lambda body: body[:60],
)
async def test_a_body_that_is_no_signal_is_refused(
    receiver: Receiver, handler: Handler, body: bytes
) -> None:
    assert (await post(receiver, delivery(body, SECRET))).status == 400
    assert handler.signals == []


async def test_a_body_over_the_limit_is_refused(receiver: Receiver, handler: Handler) -> None:
    said = message(externalId="x" * 10_000)
    assert (await post(receiver, delivery(said, SECRET))).status == 413
    assert handler.signals == []


async def test_types_of_a_later_broker_are_taken_and_ignored(
    receiver: Receiver, handler: Handler, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "taskbroker_sdk")
    said = {"type": "task.praised", "data": "of another shape"}
    assert (await post(receiver, delivery(said, SECRET))).status == 204
    assert handler.signals == []
    assert "a signal of an unknown type was ignored: 'task.praised'" in caplog.text


async def test_the_memory_of_handled_signals_is_bounded(
    receiver: Receiver, handler: Handler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskbroker_sdk._signals.REMEMBERED", 2)
    ids = [new_id() for _ in range(3)]
    for webhook_id in (*ids, ids[2], ids[1], ids[0]):
        await post(receiver, delivery(message(), SECRET, webhook_id=webhook_id))
    assert [signal.id for signal in handler.signals] == [*ids, ids[0]]


# --- the same signal, while it is handled --------------------------------------------------------


@pytest.mark.parametrize(("failing", "status"), [(False, 204), (True, 500)])
def test_threads_that_bring_the_same_signal_share_its_outcome(failing: bool, status: int) -> None:
    calls: list[Signal] = []
    may_end = threading.Event()

    def handler(signal: Signal) -> None:
        calls.append(signal)
        may_end.wait()
        if failing:
            raise RuntimeError

    receiver = SignalReceiver(SECRET, handler)
    sent = delivery(message(), SECRET)
    with ThreadPoolExecutor(4) as pool:
        bringing = [pool.submit(receiver.receive, sent.headers, sent.body) for _ in range(4)]
        until(lambda: sum(map(waits_for_another, threading.enumerate())) == 3)
        may_end.set()
        assert [each.result().status for each in bringing] == [status] * 4
    assert len(calls) == 1


def waits_for_another(thread: threading.Thread) -> bool:
    """Whether a thread of the pool waits for the outcome that another one is working on."""
    frame = sys._current_frames().get(thread.ident or 0)
    stack = [] if frame is None else [each.f_code.co_qualname for each, _ in walk_stack(frame)]
    return "Future.result" in stack and "SignalReceiver.receive" in stack


@pytest.mark.parametrize(("failing", "status"), [(False, 204), (True, 500)])
async def test_requests_that_bring_the_same_signal_share_its_outcome(
    failing: bool, status: int
) -> None:
    calls: list[Signal] = []
    may_end = asyncio.Event()

    async def handler(signal: Signal) -> None:
        calls.append(signal)
        await may_end.wait()
        if failing:
            raise RuntimeError

    receiver = AsyncSignalReceiver(SECRET, handler)
    sent = delivery(message(), SECRET)
    posting = [asyncio.create_task(post(receiver, sent)) for _ in range(4)]
    await asyncio.sleep(0)  # they begin
    posting[1].cancel()  # a sender that does not wait
    may_end.set()

    replies = await asyncio.gather(*posting, return_exceptions=True)
    assert isinstance(replies.pop(1), asyncio.CancelledError)
    assert [getattr(reply, "status", reply) for reply in replies] == [status] * 3
    assert len(calls) == 1


async def test_a_signal_whose_request_was_broken_off_may_come_again() -> None:
    calls: list[Signal] = []

    async def handler(signal: Signal) -> None:
        calls.append(signal)
        if len(calls) == 1:
            await asyncio.Event().wait()

    receiver = AsyncSignalReceiver(SECRET, handler)
    sent = delivery(message(), SECRET)
    posting, sharing = (asyncio.create_task(post(receiver, sent)) for _ in range(2))
    await asyncio.sleep(0)
    posting.cancel()

    assert (await sharing).status == 500
    assert (await post(receiver, sent)).status == 204
    assert len(calls) == 2


def test_a_coroutine_function_is_for_the_other_receiver() -> None:
    async def handler(_: Signal) -> None:
        pytest.fail("nobody would wait for it")

    with pytest.raises(TypeError, match="use AsyncSignalReceiver"):
        SignalReceiver(SECRET, handler)


# --- ASGI ----------------------------------------------------------------------------------------


class AsyncHandler(Handler):
    """The same as a coroutine function."""

    async def __call__(self, signal: Signal) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        super().__call__(signal)


@pytest.fixture
def async_handler() -> AsyncHandler:
    return AsyncHandler()


@pytest.fixture
def application(async_handler: AsyncHandler) -> AsyncSignalReceiver:
    return AsyncSignalReceiver([FORMER, SECRET], async_handler, max_body=100_000)


async def test_over_a_real_server(
    application: AsyncSignalReceiver, async_handler: AsyncHandler
) -> None:
    sent = delivery(message(), SECRET)
    large = delivery(message(externalId="x" * 1_000_000), SECRET)
    async_handler.failures.append(RuntimeError("at first"))

    def in_pieces() -> Iterator[bytes]:
        yield from (large.body[at : at + 1000] for at in range(0, len(large.body), 1000))

    async with serving(application) as url, httpx.AsyncClient(base_url=url) as http:
        for status in (500, 204, 204):
            response = await http.post("/signals", content=sent.body, headers=dict(sent.headers))
            assert response.status_code == status
        assert response.content == b""
        forged = {**sent.headers, "webhook-id": new_id()}
        assert (await http.post("/", content=sent.body, headers=forged)).status_code == 401
        malformed = delivery(b"{}", SECRET)
        assert (
            await http.post("/", content=malformed.body, headers=dict(malformed.headers))
        ).status_code == 400
        for content in (large.body, _async(in_pieces())):
            response = await http.post("/", content=content, headers=dict(large.headers))
            assert response.status_code == 413
        for method in ("GET", "PUT", "OPTIONS"):
            response = await http.request(method, "/signals")
            assert (response.status_code, response.headers["allow"]) == (405, "POST")

    assert [signal.id for signal in async_handler.signals] == [sent.headers["webhook-id"]] * 2


async def _async(chunks: Iterator[bytes]) -> Any:
    for chunk in chunks:
        yield chunk


async def test_a_route_or_a_mount_of_starlette_leads_to_it(
    application: AsyncSignalReceiver, async_handler: AsyncHandler
) -> None:
    routes = [Route("/signals", application), Mount("/mounted", application)]
    sent = [delivery(message(), SECRET) for _ in range(2)]
    transport = httpx.ASGITransport(Starlette(routes=routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://tools") as http:
        for path, each in zip(("/signals", "/mounted/"), sent, strict=True):
            response = await http.post(path, content=each.body, headers=dict(each.headers))
            assert response.status_code == 204
    assert len(async_handler.signals) == 2


async def test_a_body_that_does_not_come_is_not_waited_for(
    application: AsyncSignalReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskbroker_sdk._receiving.BODY_SECONDS", 0.01)
    async with serving(application) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        writer.write(b"POST / HTTP/1.1\r\nhost: tools\r\ncontent-length: 9\r\n\r\nthis")
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
        await writer.wait_closed()


async def test_a_sender_that_goes_away_gets_no_answer(application: AsyncSignalReceiver) -> None:
    incoming: list[dict[str, Any]] = [
        {"type": "http.request", "body": b"this", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> dict[str, Any]:
        return incoming.pop(0)

    async def send(_: Any) -> None:
        pytest.fail("there is nobody to send to")

    await application({"type": "http", "method": "POST", "headers": []}, receive, send)
    assert incoming == []
    with pytest.raises(ValueError, match="websocket"):
        await application({"type": "websocket"}, receive, send)
