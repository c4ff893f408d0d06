"""Waking those who wait for a task to change.

A hint, not a message: whoever is woken reads the task again. Changes that another process made
are seen by a slow look of the one who waits.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from uuid import UUID


class Changes:
    """Who waits in this process, and for which task."""

    def __init__(self) -> None:
        self._waiting: dict[UUID, set[asyncio.Event]] = {}

    def tell(self, refs: Iterable[UUID]) -> None:
        """Wakes those who wait for one of these tasks."""
        if not self._waiting:
            return
        for ref in refs:
            for event in self._waiting.get(ref, ()):
                event.set()

    @contextmanager
    def watching(self, ref: UUID) -> Iterator[asyncio.Event]:
        """An event that is set whenever the task may have changed."""
        event = asyncio.Event()
        self._waiting.setdefault(ref, set()).add(event)
        try:
            yield event
        finally:
            waiting = self._waiting[ref]
            waiting.discard(event)
            if not waiting:
                del self._waiting[ref]

    def __len__(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))
