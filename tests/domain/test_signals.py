"""What a tool server is told, and when it is told again."""

import json
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import signals, tasks
from app.domain.signals import (
    JITTER,
    LONGEST_RETRY_AFTER_MS,
    RETRIES_MS,
    next_attempt,
    retry_after,
)
from app.domain.tasks import Task

NOW = datetime(2026, 11, 30, 9, tzinfo=UTC)


def a_task(**changes: object) -> Task:
    given: dict[str, object] = {
        "ref": UUID(int=7),
        "backend_id": 3,
        "owner": b"o" * 32,
        "key_id": 0,
        "external_id": None,
        "tool": None,
        "poll_interval_ms": None,
        "now": NOW,
    }
    return tasks.begin(**(given | changes))  # type: ignore[arg-type]


def test_a_signal_names_the_task_as_its_backend_knows_it() -> None:
    signal = signals.cancel_requested(a_task(external_id='job "7"'), NOW)
    assert (signal.backend_id, signal.task_ref, signal.at) == (3, UUID(int=7), NOW)
    assert json.loads(signal.body) == {
        "type": "task.cancel_requested",
        "timestamp": "2026-11-30T09:00:00.000Z",
        "data": {
            "taskRef": "00000000-0000-0000-0000-000000000007",
            "externalId": 'job "7"',
            "status": "working",
        },
    }


def test_only_new_answers_are_told_and_as_they_were_written() -> None:
    task = tasks.ask(a_task(), {"a": "{}", "b": "{}", "ü": "{}"}, NOW)
    first = tasks.answer(task, {"a": '{ "n": 1.0e2 }'}, NOW)
    second = tasks.answer(first, {"a": "{}", "ü": '{"x":"\\ud83d"}'}, NOW)
    assert '"inputResponses":{"a":{ "n": 1.0e2 }}' in signals.input_received(task, first, NOW).body
    body = signals.input_received(first, second, NOW).body
    assert '{"x":"\\ud83d"}' in body
    assert json.loads(body)["data"]["inputResponses"].keys() == {"ü"}


# --- when to try again ------------------------------------------------------------------------


@given(st.integers(1, len(RETRIES_MS)), st.floats(0, 1), st.none() | st.integers(1, 3_600_000))
def test_each_wait_is_what_the_schedule_says_and_a_little_more(
    made: int, chance: float, asked: int | None
) -> None:
    at = next_attempt(made, NOW, chance, asked)
    assert at is not None
    wait = (at - NOW) / timedelta(milliseconds=1)
    planned = RETRIES_MS[made - 1]
    assert wait >= max(planned, asked or 0)
    assert wait <= max(planned * (1 + JITTER), asked or 0)


def test_after_the_last_attempt_there_is_none() -> None:
    assert next_attempt(len(RETRIES_MS) + 1, NOW, 0.5) is None


@given(st.integers(1, 3600))
def test_a_wait_may_be_asked_for_in_seconds_or_by_a_date(seconds: int) -> None:
    date = format_datetime(NOW + timedelta(seconds=seconds), usegmt=True)
    assert retry_after(str(seconds), NOW) == retry_after(date, NOW) == seconds * 1000


@pytest.mark.parametrize(
    "value",
    ["3601", "999999999", format_datetime(NOW + timedelta(days=9), usegmt=True)],
)
def test_nobody_may_ask_for_more_than_an_hour(value: str) -> None:
    assert retry_after(value, NOW) == LONGEST_RETRY_AFTER_MS


@pytest.mark.parametrize(
    "value",
    [
        "",
        "0",
        "-1",
        "1.5",
        "soon",
        "9999999999",
        "１２",
        "Mon, 30 Nov 2026 08:00:00 GMT",
        "Mon, 99 Nov 2026 99:00:00 GMT",
        "Fri, 31 Dec 9999 23:59:59 -9999",
        "Mon, 01 Jan 2999999999 00:00:00 GMT",
    ],
)
def test_nonsense_and_the_past_ask_for_nothing(value: str) -> None:
    assert retry_after(value, NOW) is None


_dates = st.from_regex(
    r"(Mon|Sun), [0-9]{1,3} (Jan|Dec) [0-9]{1,10} [0-9]{1,3}:[0-9]{2}:[0-9]{2} (GMT|[+-][0-9]{4})",
    fullmatch=True,
)


@given(st.text(max_size=64) | _dates)
def test_whatever_is_asked_is_a_wait_within_bounds_or_none(value: str) -> None:
    wait = retry_after(value, NOW)
    assert wait is None or 0 < wait <= LONGEST_RETRY_AFTER_MS
