"""Waiting for something to become true, without guessing how long it takes."""

import asyncio
import inspect
import time
from collections.abc import Callable

PATIENCE = 30.0
_PAUSE = 0.02


def until(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """Waits until `condition()` is true; fails when it is not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not true within {seconds:g} seconds"
        time.sleep(_PAUSE)


async def eventually(condition: Callable[[], object], seconds: float = PATIENCE) -> None:
    """The same while others go on; the condition may be a coroutine function."""
    deadline = time.monotonic() + seconds
    while not await _holds(condition):
        assert time.monotonic() < deadline, f"not true within {seconds:g} seconds"
        await asyncio.sleep(_PAUSE)


async def _holds(condition: Callable[[], object]) -> bool:
    found = condition()
    return bool(await found if inspect.isawaitable(found) else found)
