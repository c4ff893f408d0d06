"""Trying again: an exchange goes on until it has an answer that counts.

Whoever does the I/O drives a `Talk`: it waits as long as the attempt says, sends the request,
and hands back what came of it, until the talk returns its value.
"""

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from taskbroker_sdk._errors import Problem, Unreachable
from taskbroker_sdk._wire import Answer, Json, Lost, Request, understood

FIRST_PAUSE = 0.2
LONGEST_PAUSE = 10.0
LONGEST_RETRY_AFTER = 60.0

T = TypeVar("T")


@dataclass(frozen=True)
class Attempt:
    """Wait `after` seconds, then send the request."""

    request: Request
    after: float


Talk: TypeAlias = Generator[Attempt, Answer | Lost, T]


def pause_after(failures: int, luck: float, retry_after: float | None = None) -> float:
    """How many seconds to wait after so many failures in a row.

    Doubles from about 0.2 s up to 10 s; `luck`, in 0…1, spreads senders that failed together
    over the upper half. A server that asks for more gets it, up to a minute.
    """
    ceiling = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 16))
    pause = ceiling * (1 + luck) / 2
    return max(pause, min(retry_after or 0.0, LONGEST_RETRY_AFTER))


def exchange(
    request: Request, shape: Callable[[Json], T], *, attempts: int, after: float = 0.0
) -> Talk[T]:
    """Sends a request until an answer counts. Raises Problem and Unreachable."""
    for failures in range(1, attempts + 1):
        outcome = yield Attempt(request, after)
        try:
            if isinstance(outcome, Answer):
                return understood(outcome, shape)
            failure = outcome.reason
        except Problem as problem:
            if not _may_pass(problem.status):
                raise
            failure = str(problem)
        except Unreachable as strange:
            failure = str(strange)
        after = pause_after(failures, random.random(), _asked_for(outcome))  # noqa: S311 - no secret
    raise Unreachable(
        f"No usable answer to {request.method} {request.path.partition('?')[0]} "
        f"in {attempts} attempt{'s' * (attempts > 1)}; the last one: {failure}"
    )


def _may_pass(status: int) -> bool:
    """Whether what the broker says with this status may be over the next time."""
    return status in (408, 429) or status >= 500


def _asked_for(outcome: Answer | Lost) -> float | None:
    """Retry-After in seconds; its other form, a date, is not honoured."""
    if isinstance(outcome, Lost) or outcome.retry_after is None:
        return None
    seconds = outcome.retry_after.strip()
    return float(seconds) if seconds.isascii() and seconds.isdecimal() else None
