"""Waking those who wait for something to change: a task, or what there is to tell a backend.

A hint, not a message: whoever is woken looks again. What other processes change is told by
`notifications`.
"""

import asyncio
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Watch(Generic[Key]):
    """One who waits."""

    def __init__(self) -> None:
        self._changed: set[Key] = set()
        self._woken = asyncio.Event()

    def tell(self, key: Key) -> None:
        self._changed.add(key)
        self._woken.set()

    def wake(self) -> None:
        self._woken.set()

    async def changes(self, seconds: float | None = None) -> set[Key]:
        """What may have changed since the last time, as soon as something has, or `wake` was
        called; nothing after so many seconds.
        """
        if not self._woken.is_set():
            try:
                async with asyncio.timeout(seconds):
                    await self._woken.wait()
            except TimeoutError:
                return set()
        self._woken.clear()
        changed, self._changed = self._changed, set()
        return changed


class Changes(Generic[Key]):
    """Who waits in this process, and for what."""

    def __init__(self) -> None:
        self._watches: dict[Key, set[Watch[Key]]] = {}
        self._curious: set[Watch[Key]] = set()
        self._waiting = 0

    def tell(self, keys: Iterable[Key]) -> None:
        """Wakes those who wait for one of these, or for any."""
        if not self._watches and not self._curious:
            return
        for key in keys:
            for watch in self._watches.get(key, ()):
                watch.tell(key)
            for watch in self._curious:
                watch.tell(key)

    def keys(self) -> list[Key]:
        """What is waited for in particular."""
        return list(self._watches)

    @contextmanager
    def watching(self, keys: Iterable[Key]) -> Iterator[Watch[Key]]:
        """A watch that is told whenever one of these may have changed."""
        watch, wanted = Watch[Key](), set(keys)
        for key in wanted:
            self._watches.setdefault(key, set()).add(watch)
        self._waiting += 1
        try:
            yield watch
        finally:
            self._waiting -= 1
            for key in wanted:
                self._watches[key].discard(watch)
                if not self._watches[key]:
                    del self._watches[key]

    @contextmanager
    def watching_all(self) -> Iterator[Watch[Key]]:
        """A watch that is told whenever anything may have changed."""
        watch = Watch[Key]()
        self._curious.add(watch)
        try:
            yield watch
        finally:
            self._curious.discard(watch)

    def __len__(self) -> int:
        """How many wait for something in particular."""
        return self._waiting
