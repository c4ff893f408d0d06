"""Signals that are sent to the callback of a tool server."""

import asyncio
from datetime import timedelta
from email.utils import format_datetime
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from app.asgi import Receive, Send
from app.auth.issuing import issue_secret
from app.auth.keys import SecretBox
from app.db import backends, signals
from app.db.signals import Delivery, DeliveryFilter
from app.domain.signals import LONGEST_RETRY_AFTER_MS, RETRIES_MS, SignalStatus
from app.workers import delivery
from app.workers.callbacks import Callbacks
from tests.support.callbacks import OK, Callback, running_callback
from tests.support.clock import ShiftedClock
from tests.support.servers import Received, answer_with
from tests.support.service import CreatedTask, Service, running_service
from tests.support.waiting import eventually
from tests.workers.conftest import Stage

ANSWER = {"action": "accept", "content": {"sure": True}}


def failing(status: int = 500, **headers: str) -> Any:
    """An answer that is no success."""
    given = [(name.replace("_", "-"), value) for name, value in headers.items()]
    return answer_with(b"no", status=status, headers=given)


async def deliveries(service: Service, task: CreatedTask) -> list[Delivery]:
    """What the operator sees of a task's signals, newest first."""
    async with service.broker.db.transaction() as connection:
        return await signals.listing(connection, DeliveryFilter(task_ref=UUID(task.ref)))


async def status_of(service: Service, task: CreatedTask) -> SignalStatus | None:
    found = await deliveries(service, task)
    return found[0].status if found else None


async def ends(service: Service, task: CreatedTask, status: SignalStatus) -> Delivery:
    """The newest delivery about a task, when it has this status."""

    async def so() -> bool:
        return await status_of(service, task) is status

    await eventually(so)
    return (await deliveries(service, task))[0]


# --- what is told, and to whom ----------------------------------------------------------------


async def test_a_wish_to_cancel_reaches_the_tool_server(stage: Stage) -> None:
    task = await stage.tools.create(stage.client, externalId="job-1")

    await stage.client.cancel(task.id)

    await eventually(lambda: stage.callback.attempts)
    [told] = stage.callback.attempts
    assert told.type == "task.cancel_requested"
    assert told.data == {"taskRef": task.ref, "externalId": "job-1", "status": "working"}
    assert told.webhook_id.startswith("msg_")
    assert (await ends(stage.service, task, SignalStatus.DELIVERED)).outcome == "delivered 200"


async def test_a_wish_is_told_once_however_often_it_is_made(stage: Stage) -> None:
    task = await stage.tools.create(stage.client)
    for _ in range(3):
        await stage.client.cancel(task.id)
    await ends(stage.service, task, SignalStatus.DELIVERED)
    assert len(await deliveries(stage.service, task)) == 1


async def test_answers_reach_the_tool_server_byte_for_byte(stage: Stage) -> None:
    task = await stage.tools.create(stage.client)
    await stage.tools.ask(task, "one", "two", "three")

    await stage.client.update(task.id, {"one": ANSWER, "two": ANSWER})
    await stage.client.update(task.id, {"one": {"action": "decline"}, "three": ANSWER})

    await eventually(lambda: len(stage.callback.attempts) == 2)
    first, second = stage.callback.attempts
    assert first.type == second.type == "task.input_received"
    assert first.data["inputResponses"] == {"one": ANSWER, "two": ANSWER}
    assert (first.data["status"], second.data["status"]) == ("input_required", "working")
    assert second.data["inputResponses"] == {"three": ANSWER}, (
        "the first answer to a question counts"
    )


async def test_the_expiry_of_a_live_task_is_told(stage: Stage, clock: ShiftedClock) -> None:
    live = await stage.tools.create(stage.client, ttlMs=1_000)
    ended = await stage.tools.create(stage.client, ttlMs=1_000)
    await stage.tools.complete(ended)
    clock.advance(seconds=2)

    swept = await stage.service.sweep()

    assert swept.expired == 1
    assert (await stage.service.sweep()).expired == 0
    await eventually(lambda: stage.callback.attempts)
    assert stage.callback.types() == ["task.expired"]
    assert stage.callback.attempts[0].data == {"taskRef": live.ref, "status": "working"}
    assert await deliveries(stage.service, ended) == []


async def test_an_expiry_is_told_even_if_the_task_is_purged_at_once(
    stage: Stage, clock: ShiftedClock
) -> None:
    task = await stage.tools.create(stage.client, ttlMs=1_000)
    clock.advance(milliseconds=1_000 + stage.service.settings.expired_grace_ms)
    swept = await stage.service.sweep()
    assert (swept.expired, swept.purged) == (1, 1)
    await eventually(lambda: stage.callback.about(task.ref))


async def test_a_stall_is_told(stage: Stage, clock: ShiftedClock) -> None:
    task = await stage.tools.create(stage.client, stallAfterMs=5_000)
    clock.advance(seconds=6)
    await stage.service.sweep()
    await eventually(lambda: stage.callback.attempts)
    [told] = stage.callback.attempts
    assert (told.type, told.data["status"]) == ("task.stalled", "failed")
    assert (await stage.client.get(task.id))["error"] == {
        "code": -32603,
        "message": "the tool server stopped reporting",
    }


async def test_a_secret_that_is_being_rotated_signs_along(stage: Stage) -> None:
    """The new secret is valid at once, the old one still is: either verifies a delivery."""
    before = stage.callback.secrets[0]
    async with stage.service.broker.db.transaction() as connection:
        backend = await backends.by_name(connection, stage.tools.name)
        assert backend is not None
        new = await issue_secret(connection, backend.id, SecretBox(stage.service.settings.keys))
    for known in (before, new):
        stage.callback.secrets[:] = [known]
        task = await stage.tools.create(stage.client)
        await stage.client.cancel(task.id)
        await eventually(partial(stage.callback.about, task.ref))


# --- attempts ---------------------------------------------------------------------------------


async def test_a_failed_attempt_is_repeated_as_the_same_signal(
    stage: Stage, clock: ShiftedClock
) -> None:
    stage.callback.answers = [failing(500)]
    task = await stage.tools.create(stage.client)
    await stage.client.cancel(task.id)
    await eventually(lambda: stage.callback.attempts)
    clock.advance(milliseconds=2 * RETRIES_MS[0])
    await eventually(lambda: len(stage.callback.attempts) == 2)
    first, second = stage.callback.attempts
    assert (first.webhook_id, first.body) == (second.webhook_id, second.body)
    assert second.timestamp >= first.timestamp + RETRIES_MS[0] // 1000, "a fresh one"
    assert (await ends(stage.service, task, SignalStatus.DELIVERED)).attempts == 2


async def test_the_attempts_end_and_the_operator_can_have_it_sent_again(
    stage: Stage, clock: ShiftedClock
) -> None:
    """At once, then after 5 s, 30 s, 2 min, 5 min, 30 min, 2 h, 5 h and 10 h."""
    stage.callback.otherwise = failing(500)
    task = await stage.tools.create(stage.client, ttlMs=86_400_000)
    await stage.client.cancel(task.id)
    waits = []
    for number, wait in enumerate((*RETRIES_MS, None), 1):

        async def recorded(number: int = number) -> bool:
            [delivery] = await deliveries(stage.service, task)
            return delivery.attempts == number

        await eventually(recorded)
        [delivery] = await deliveries(stage.service, task)
        assert delivery.outcome == "status 500"
        if wait is None:
            break
        assert delivery.due_at is not None
        assert delivery.attempted_at is not None
        waits.append((delivery.due_at - delivery.attempted_at).total_seconds() * 1000 / wait)
        clock.advance(milliseconds=int(1.2 * wait))
    assert all(1 <= wait <= 1.2 for wait in waits)
    assert delivery.status is SignalStatus.DEAD
    assert len({attempt.webhook_id for attempt in stage.callback.attempts}) == 1

    stage.callback.otherwise = OK
    async with stage.service.broker.db.transaction() as connection:
        again = await signals.send_again(connection, clock(), ids=[delivery.id], backend_id=None)
    assert again == [delivery.id]
    assert (await ends(stage.service, task, SignalStatus.DELIVERED)).attempts == 1


@pytest.mark.parametrize(
    ("asked", "least_ms"),
    [
        ("120", 120_000),
        ("date", 120_000),
        ("1", RETRIES_MS[0]),
        ("0", RETRIES_MS[0]),
        ("-5", RETRIES_MS[0]),
        ("soon", RETRIES_MS[0]),
        ("99999999999999999999", RETRIES_MS[0]),
        ("604800", LONGEST_RETRY_AFTER_MS),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
async def test_a_tool_server_may_ask_for_time(
    stage: Stage, clock: ShiftedClock, asked: str, least_ms: int, status: int
) -> None:
    """By `Retry-After`, in seconds or as a date, up to an hour; nonsense is ignored."""
    in_two_minutes = format_datetime(clock() + timedelta(seconds=121), usegmt=True)
    value = in_two_minutes if asked == "date" else asked
    stage.callback.answers = [failing(status, retry_after=value)]
    task = await stage.tools.create(stage.client)
    await stage.client.cancel(task.id)
    await eventually(lambda: stage.callback.attempts)

    async def recorded() -> bool:
        [delivery] = await deliveries(stage.service, task)
        return delivery.attempts == 1

    await eventually(recorded)
    [delivery] = await deliveries(stage.service, task)
    assert delivery.due_at is not None
    assert delivery.attempted_at is not None
    wait = (delivery.due_at - delivery.attempted_at).total_seconds() * 1000
    assert least_ms <= wait <= max(1.2 * RETRIES_MS[0], least_ms + 2_000)


async def test_a_tool_server_that_asks_for_time_gets_none_of_its_other_signals(
    stage: Stage, clock: ShiftedClock
) -> None:
    stage.callback.answers = [failing(429, retry_after="60")]
    first, second = [await stage.tools.create(stage.client) for _ in range(2)]
    await stage.client.cancel(first.id)

    async def recorded() -> bool:
        [delivery] = await deliveries(stage.service, first)
        return delivery.attempts == 1

    await eventually(recorded)
    await stage.client.cancel(second.id)
    other = await stage.service.tool_server("other", callback_url=stage.callback.url)
    stage.callback.secrets.append(other.webhook_secret)
    task_of_other = await other.create(stage.client)
    await stage.client.cancel(task_of_other.id)
    await eventually(lambda: stage.callback.about(task_of_other.ref))
    assert not stage.callback.about(second.ref)
    clock.advance(seconds=61)
    await eventually(lambda: stage.callback.about(second.ref))


async def test_all_replicas_leave_a_tool_server_alone_that_asked_for_time(
    stage: Stage, clock: ShiftedClock
) -> None:
    """A shorter wait that is asked for meanwhile does not end the longer one."""
    stage.callback.answers = [failing(429, retry_after="300"), failing(429, retry_after="60")]
    stage.callback.otherwise = OK
    tasks = [await stage.tools.create(stage.client) for _ in range(3)]
    await asyncio.gather(*(stage.client.cancel(task.id) for task in tasks[:2]))

    async def rests() -> bool:
        async with stage.service.broker.db.own_connection() as connection:
            row = await connection.fetchrow("SELECT callback_rests_until FROM backends")
        return row is not None and row[0] is not None and row[0] > clock() + timedelta(seconds=200)

    await eventually(rests)
    before = len(stage.callback.attempts)
    async with running_service(stage.service.settings, clock) as other:
        await stage.client.at(other).cancel(tasks[2].id)
        clock.advance(seconds=100)
        well = await other.tool_server("well", callback_url=stage.callback.url)
        stage.callback.secrets.append(well.webhook_secret)
        task_of_well = await well.create(stage.client)
        await stage.client.at(other).cancel(task_of_well.id)
        await eventually(lambda: stage.callback.about(task_of_well.ref))
        assert len(stage.callback.attempts) == before + 1
        clock.advance(seconds=250)
        await asyncio.gather(*(ends(other, task, SignalStatus.DELIVERED) for task in tasks))


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(stage: Stage, clock: ShiftedClock, status: int) -> None:
    async with running_callback(clock) as elsewhere:
        stage.callback.answers = [failing(status, location=elsewhere.url)]
        task = await stage.tools.create(stage.client)
        await stage.client.cancel(task.id)

        async def recorded() -> bool:
            [delivery] = await deliveries(stage.service, task)
            return delivery.outcome == f"redirect {status}"

        await eventually(recorded)
        assert elsewhere.attempts == []


async def test_a_callback_that_is_gone_gets_nothing_before_it_is_enabled_again(
    stage: Stage, clock: ShiftedClock
) -> None:
    """410: nothing is sent there any more, and nothing is lost."""
    stage.callback.answers = [failing(410)]
    task = await stage.tools.create(stage.client)
    await stage.client.cancel(task.id)

    async def gone() -> bool:
        async with stage.service.broker.db.transaction() as connection:
            backend = await backends.by_name(connection, stage.tools.name)
        return backend is not None and backend.callback_gone_at is not None

    await eventually(gone)
    other = await stage.service.tool_server("other", callback_url=stage.callback.url)
    stage.callback.secrets.append(other.webhook_secret)
    clock.advance(seconds=60)
    task_of_other = await other.create(stage.client)
    await stage.client.cancel(task_of_other.id)
    await eventually(lambda: stage.callback.about(task_of_other.ref))
    assert len(stage.callback.about(task.ref)) == 1
    assert await status_of(stage.service, task) is SignalStatus.PENDING

    async with stage.service.broker.db.transaction() as connection:
        backend = await backends.by_name(connection, stage.tools.name)
        assert backend is not None
        await backends.set_enabled(connection, backend.id)
    await ends(stage.service, task, SignalStatus.DELIVERED)


async def test_a_disabled_tool_server_is_told_when_it_is_enabled_again(stage: Stage) -> None:
    """Meanwhile a wish to cancel ends its task when the grace is over."""
    task = await stage.tools.create(stage.client)
    await stage.service.disable(stage.tools)
    await stage.client.cancel(task.id)
    stage.service.clock.advance(milliseconds=stage.service.settings.cancel_grace_ms + 1)
    await stage.service.sweep()
    assert (await stage.client.get(task.id))["status"] == "cancelled"
    assert stage.callback.attempts == []
    async with stage.service.broker.db.transaction() as connection:
        backend = await backends.by_name(connection, stage.tools.name)
        assert backend is not None
        await backends.set_enabled(connection, backend.id)
    await eventually(lambda: stage.callback.about(task.ref))


# --- order ------------------------------------------------------------------------------------


async def test_signals_about_a_task_arrive_in_order(stage: Stage, clock: ShiftedClock) -> None:
    """A later one waits for those before it; other tasks do not wait."""
    stage.callback.answers = [failing(500)]
    task, other = [await stage.tools.create(stage.client) for _ in range(2)]
    await stage.tools.ask(task, "sure")
    await stage.client.update(task.id, {"sure": ANSWER})
    await eventually(lambda: stage.callback.attempts)
    await stage.client.cancel(task.id)
    await stage.client.cancel(other.id)
    await eventually(lambda: stage.callback.about(other.ref))
    assert [told.type for told in stage.callback.about(task.ref)] == ["task.input_received"]
    clock.advance(seconds=10)
    await eventually(lambda: len(stage.callback.about(task.ref)) == 3)
    assert [told.type for told in stage.callback.about(task.ref)] == [
        "task.input_received",
        "task.input_received",
        "task.cancel_requested",
    ]


async def test_what_waits_behind_another_is_sent_as_soon_as_that_has_ended(
    stage: Stage, clock: ShiftedClock
) -> None:
    """Not at the date at which that one would have been tried again."""
    stage.callback.answers = [failing(500), failing(500)]
    task = await stage.tools.create(stage.client)
    await stage.tools.ask(task, "sure")
    await stage.client.update(task.id, {"sure": ANSWER})
    await eventually(lambda: len(stage.callback.attempts) == 1)
    clock.advance(seconds=7)
    await eventually(lambda: len(stage.callback.attempts) == 2)
    await stage.client.cancel(task.id)

    async def is_put_off() -> bool:
        [wish, answers] = await deliveries(stage.service, task)
        return wish.due_at == answers.due_at and answers.attempts == 2

    await eventually(is_put_off)
    clock.advance(seconds=37)
    await eventually(lambda: len(stage.callback.attempts) == 4)
    assert stage.callback.types()[-2:] == ["task.input_received", "task.cancel_requested"]


# --- what need not be sent --------------------------------------------------------------------


async def test_what_came_with_a_reply_is_not_sent(stage: Stage, clock: ShiftedClock) -> None:
    stage.callback.otherwise = failing(500)
    task = await stage.tools.create(stage.client)
    await stage.client.cancel(task.id)
    await eventually(lambda: stage.callback.attempts)

    reply = (await stage.tools.report(task, statusMessage="on it")).json()

    assert reply["cancelRequested"] is True
    await ends(stage.service, task, SignalStatus.SEEN)
    clock.advance(seconds=60)
    fresh = await stage.tools.create(stage.client)
    await stage.client.cancel(fresh.id)
    await eventually(lambda: stage.callback.about(fresh.ref))
    assert len(stage.callback.about(task.ref)) == 1


async def test_what_comes_after_a_reply_is_sent(stage: Stage) -> None:
    task = await stage.tools.create(stage.client)
    await stage.tools.ask(task, "sure")
    await stage.tools.report(task, statusMessage="waiting")
    await stage.client.update(task.id, {"sure": ANSWER})
    await ends(stage.service, task, SignalStatus.DELIVERED)


# --- many replicas ----------------------------------------------------------------------------


async def test_two_replicas_send_each_signal_once(
    stage: Stage, callback: Callback, clock: ShiftedClock
) -> None:
    async with running_service(stage.service.settings, clock) as other:
        tasks = [await stage.tools.create(stage.client) for _ in range(60)]
        await asyncio.gather(
            *(
                stage.client.at(replica).cancel(task.id)
                for task, replica in zip(tasks, [stage.service, other] * 30, strict=True)
            )
        )
        await asyncio.gather(*(ends(other, task, SignalStatus.DELIVERED) for task in tasks))
    assert sorted(told.data["taskRef"] for told in callback.attempts) == sorted(
        task.ref for task in tasks
    )


async def test_a_slow_tool_server_delays_no_other(stage: Stage, clock: ShiftedClock) -> None:
    """One hangs with as many signals as it may have at a time; another gets its own at once."""
    release = asyncio.Event()

    async def hang(request: Received, receive: Receive, send: Send) -> None:
        await release.wait()
        await OK(request, receive, send)

    async with running_callback(clock) as hanging:
        hanging.otherwise = hang
        slow = await stage.service.tool_server("slow", callback_url=hanging.url)
        hanging.secrets.append(slow.webhook_secret)
        stuck = [await slow.create(stage.client) for _ in range(50)]
        await asyncio.gather(*(stage.client.cancel(task.id) for task in stuck))
        await eventually(lambda: len(hanging.attempts) == 8)
        tasks = [await stage.tools.create(stage.client) for _ in range(20)]
        await asyncio.gather(*(stage.client.cancel(task.id) for task in tasks))
        await eventually(lambda: len(stage.callback.attempts) == 20)
        assert len(hanging.attempts) == 8
        release.set()
        await eventually(lambda: len(hanging.attempts) == 50)


async def test_many_slow_tool_servers_delay_no_other(
    stage: Stage, clock: ShiftedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When half of the room is taken, each gets one at a time."""
    monkeypatch.setattr(delivery, "ROOM", 40)
    release = asyncio.Event()

    async def hang(request: Received, receive: Receive, send: Send) -> None:
        await release.wait()
        await OK(request, receive, send)

    async with running_callback(clock) as hanging:
        hanging.otherwise = hang
        for number in range(12):
            slow = await stage.service.tool_server(f"slow-{number}", callback_url=hanging.url)
            hanging.secrets.append(slow.webhook_secret)
            for _ in range(10):
                await stage.client.cancel((await slow.create(stage.client)).id)
        task = await stage.tools.create(stage.client)
        await stage.client.cancel(task.id)
        await eventually(lambda: stage.callback.about(task.ref), 10)
        release.set()
        await eventually(lambda: len(hanging.attempts) == 120)


async def test_a_fault_of_ours_counts_as_an_attempt(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise RuntimeError("out of order")

    monkeypatch.setattr(Callbacks, "post", broken)
    task = await stage.tools.create(stage.client)
    await stage.client.cancel(task.id)

    async def recorded() -> bool:
        [delivery] = await deliveries(stage.service, task)
        return (delivery.attempts, delivery.outcome) == (1, "fault")

    await eventually(recorded)


async def test_what_a_tool_server_has_got_is_purged_with_its_task(
    stage: Stage, clock: ShiftedClock
) -> None:
    """What it has not got yet is kept."""
    task, other = [await stage.tools.create(stage.client, ttlMs=1_000) for _ in range(2)]
    await stage.client.cancel(task.id)
    await ends(stage.service, task, SignalStatus.DELIVERED)
    stage.callback.otherwise = failing(500)
    await stage.client.cancel(other.id)
    clock.advance(milliseconds=1_000 + stage.service.settings.expired_grace_ms)
    await stage.service.sweep()
    kept = await deliveries(stage.service, task)
    assert [signal.type for signal in kept] == ["task.expired"]
    assert {signal.type for signal in await deliveries(stage.service, other)} == {
        "task.expired",
        "task.cancel_requested",
    }


async def test_the_last_attempt_may_find_the_callback_gone(
    stage: Stage, clock: ShiftedClock
) -> None:
    """It is not dead then: it is sent when the operator enables the callback again."""
    stage.callback.answers = [failing(500), failing(410)]
    task = await stage.tools.create(stage.client)
    await stage.client.cancel(task.id)

    async def outcome() -> str | None:
        [delivery] = await deliveries(stage.service, task)
        return delivery.outcome

    await eventually(lambda: stage.callback.attempts)
    async with stage.service.broker.db.own_connection() as connection:
        await eventually(outcome)
        await connection.execute("UPDATE signals SET attempts = 8, due_at = $1", clock())

    async def found_gone() -> bool:
        return await outcome() == "gone 410"

    await eventually(found_gone)
    assert await status_of(stage.service, task) is SignalStatus.PENDING


async def test_an_operator_can_hasten_what_waits_for_its_next_attempt(
    stage: Stage, clock: ShiftedClock
) -> None:
    stage.callback.answers = [failing(429, retry_after="3600")]
    task = await stage.tools.create(stage.client)
    await stage.client.cancel(task.id)

    async def failed_once() -> bool:
        [delivery] = await deliveries(stage.service, task)
        return delivery.attempts == 1

    await eventually(failed_once)
    async with stage.service.broker.db.transaction() as connection:
        backend = await backends.by_name(connection, stage.tools.name)
        assert backend is not None
        await signals.send_again(connection, clock(), ids=None, backend_id=backend.id)
    await ends(stage.service, task, SignalStatus.DELIVERED)
