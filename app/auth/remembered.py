"""Look-ups that are made once for all who ask at the same time, and believed for a moment."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

from cachetools import TTLCache

SECONDS = 2.0
"""How long a look-up is believed: a revocation takes effect within this time."""

Key = TypeVar("Key")
Value = TypeVar("Value")


class Remembered(Generic[Key, Value]):
    """What `look_up` said about a key, bounded in number and in time. Failures are forgotten."""

    def __init__(self, look_up: Callable[[Key], Awaitable[Value]]) -> None:
        self._look_up = look_up
        self._answers: TTLCache[Key, asyncio.Future[Value]] = TTLCache(10_000, SECONDS)

    async def get(self, key: Key) -> Value:
        answer = self._answers.get(key)
        if answer is None:
            answer = self._answers[key] = asyncio.ensure_future(self._look_up(key))
            answer.add_done_callback(partial(self._forget_failure, key))
        # Who is cancelled leaves the look-up to the others.
        return answer.result() if answer.done() else await asyncio.shield(answer)

    def _forget_failure(self, key: Key, answer: asyncio.Future[Value]) -> None:
        failed = answer.cancelled() or answer.exception() is not None
        if failed and self._answers.get(key) is answer:
            del self._answers[key]
