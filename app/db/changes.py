"""Waking those who wait for something to change: a task, or what there is to tell a backend.

A hint, not a message: whoever is woken looks again. What another process changed is seen by a slow
look of the one who waits.
"""

import asyncio
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Changes(Generic[Key]):
    """Who waits in this process, and for what."""

    def __init__(self) -> None:
        self._waiting: dict[Key | None, set[asyncio.Event]] = {}

    def tell(self, keys: Iterable[Key]) -> None:
        """Wakes those who wait for one of these, or for any."""
        if not self._waiting:
            return
        changed: set[Key | None] = set(keys)
        if changed:
            changed.add(None)
        for key in changed:
            for event in self._waiting.get(key, ()):
                event.set()

    @contextmanager
    def watching(self, key: Key | None) -> Iterator[asyncio.Event]:
        """An event that is set whenever this one, or with `None` any, may have changed."""
        event = asyncio.Event()
        self._waiting.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            waiting = self._waiting[key]
            waiting.discard(event)
            if not waiting:
                del self._waiting[key]

    def __len__(self) -> int:
        """How many wait for something in particular."""
        return sum(len(events) for key, events in self._waiting.items() if key is not None)


async def changed(event: asyncio.Event, seconds: float) -> None:
    """Returns when the event of a watcher is set, and unsets it; or after so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
    event.clear()
