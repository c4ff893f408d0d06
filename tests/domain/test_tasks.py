"""The moves of a task, as pure rules."""

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.domain import events, tasks
from app.domain.events import Report, Verdict
from app.domain.lifetimes import UNSET, Lifetimes, Unset
from app.domain.tasks import RpcError, Status, Task, ToolResult
from app.errors import Refused

NOW = datetime(2026, 11, 30, 9, tzinfo=UTC)
LATER = NOW + timedelta(seconds=1)
RESULT = ToolResult("{}", typed=False, is_error=False)
ERROR = RpcError('{"code":1,"message":"no"}', '"no"')
LIFETIMES = Lifetimes(default_ttl_ms=1_000, max_ttl_ms=5_000, unlimited_allowed=False)


def working(**changes: object) -> Task:
    task = tasks.begin(
        ref=UUID(int=1),
        backend_id=1,
        owner=bytes(32),
        key_id=0,
        external_id=None,
        tool=None,
        poll_interval_ms=None,
        now=NOW,
    )
    return replace(task, **changes)  # type: ignore[arg-type]


reports = st.one_of(
    st.builds(Report, status_message=st.none() | st.just('"m"')),
    st.just(Report(status=Status.WORKING)),
    st.just(Report(status=Status.COMPLETED, result=RESULT)),
    st.just(Report(status=Status.FAILED, error=ERROR)),
    st.just(Report(status=Status.CANCELLED)),
    st.builds(
        lambda keys: Report(status=Status.INPUT_REQUIRED, input_requests=dict.fromkeys(keys, "{}")),
        st.sets(st.sampled_from("abcdef"), min_size=1),
    ),
)


@given(st.lists(st.one_of(reports, st.sets(st.sampled_from("abcdef")), st.just("cancel"))))
def test_whatever_is_said_a_task_keeps_its_shape(steps: list[object]) -> None:
    task = working()
    for step in steps:
        before = task
        try:
            match step:
                case Report():
                    task = events.apply(task, step, None, LATER, LIFETIMES, 100)
                case set():
                    task = tasks.answer(task, dict.fromkeys(map(str, step), "1"), LATER)
                case _:
                    task = tasks.request_cancel(task, LATER, 100)
        except Refused:
            assert task is before
        if before.status.terminal:
            assert task is before
        assert (task.result is not None) == (task.status is Status.COMPLETED)
        assert (task.error is not None) == (task.status is Status.FAILED)
        assert bool(task.outstanding) >= (task.status is Status.INPUT_REQUIRED)
        assert not (task.status is Status.WORKING and task.outstanding)
        assert len({question.key for question in task.inputs}) == len(task.inputs)
        if task.status.terminal:
            assert task.cancel_due_at is task.stall_due_at is None


@pytest.mark.parametrize(
    "ended",
    [
        tasks.complete(working(), RESULT, NOW),
        tasks.fail(working(), ERROR, NOW),
        tasks.cancel(working(), NOW),
    ],
)
def test_no_move_leads_out_of_a_terminal_status(ended: Task) -> None:
    moves: list[Callable[[Task], Task]] = [
        lambda task: tasks.complete(task, RESULT, LATER),
        lambda task: tasks.fail(task, ERROR, LATER),
        lambda task: tasks.cancel(task, LATER),
        lambda task: tasks.resume(task, LATER),
        lambda task: tasks.touch(task, LATER),
        lambda task: tasks.ask(task, {"new": "{}"}, LATER),
    ]
    for move in moves:
        with pytest.raises(Refused, match="never changes"):
            move(ended)
    assert tasks.answer(ended, {"a": "1"}, LATER) is ended
    assert tasks.request_cancel(ended, LATER, 1) is ended
    assert tasks.end_unanswered_cancel(ended, LATER) is ended
    assert tasks.stall(ended, LATER) is ended


def test_the_moves_of_the_clock_wait_until_they_are_due() -> None:
    wished = tasks.request_cancel(working(), NOW, 1_000)
    assert tasks.end_unanswered_cancel(wished, NOW) is wished
    assert tasks.end_unanswered_cancel(wished, LATER).status is Status.CANCELLED
    promised = working(stall_after_ms=1_000, stall_due_at=LATER)
    assert tasks.stall(promised, NOW) is promised
    assert tasks.stall(promised, LATER).status is Status.FAILED


def test_asking_twice_to_cancel_does_not_win_time() -> None:
    wished = tasks.request_cancel(working(), NOW, 1_000)
    assert tasks.request_cancel(wished, LATER, 1_000) is wished


def test_last_updated_never_goes_back() -> None:
    ahead = working(updated_at=LATER)
    assert tasks.touch(ahead, NOW).updated_at == LATER


@pytest.mark.parametrize(
    ("report", "sent_at", "seen", "verdict"),
    [
        (Report(), NOW, True, Verdict.DUPLICATE),
        (Report(), NOW - timedelta(seconds=1), False, Verdict.STALE),
        (Report(), NOW, False, Verdict.APPLIED),
        (Report(), None, False, Verdict.APPLIED),
        (Report(status=Status.CANCELLED), NOW - timedelta(seconds=1), False, Verdict.APPLIED),
    ],
)
def test_a_report_is_judged_by_when_it_was_sent(
    report: Report, sent_at: datetime | None, seen: bool, verdict: Verdict
) -> None:
    assert events.judge(working(reported_at=NOW), report, sent_at, seen) is verdict


def test_a_duplicate_is_a_duplicate_even_when_the_task_has_ended() -> None:
    ended = tasks.cancel(working(), NOW)
    assert events.judge(ended, Report(), NOW, seen=True) is Verdict.DUPLICATE
    assert events.judge(ended, Report(), NOW, seen=False) is Verdict.TERMINAL


@given(st.one_of(st.none(), st.just(UNSET), st.integers(1, 10**30)), st.booleans())
def test_no_ttl_is_granted_beyond_the_maximum(asked: int | None | Unset, unlimited: bool) -> None:
    lifetimes = Lifetimes(1_000, 5_000, unlimited)
    granted = lifetimes.grant(asked)
    if granted is None:
        assert asked is None
        assert unlimited
    else:
        assert 1 <= granted <= 5_000
        assert not isinstance(asked, int) or granted == min(asked, 5_000)


@given(st.none() | st.integers(1, 10**9), st.none() | st.integers(1, 10**9))
def test_a_backend_can_only_narrow_the_bounds(default: int | None, maximum: int | None) -> None:
    narrowed = LIFETIMES.narrowed(default, maximum)
    assert narrowed.default_ttl_ms <= narrowed.max_ttl_ms <= LIFETIMES.max_ttl_ms
