"""Signals of the operating system: that this process is to end, while it still answers."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def when_ended(tell: Callable[[], None]) -> Iterator[None]:
    """Tells when the process is asked to end, and lets the server's own handler do its work too.

    The server tells its application only when the last answer has been given, which with open
    streams would be never.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    servers_own: dict[int, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }

    def handle(number: int, frame: FrameType | None) -> None:
        loop.call_soon_threadsafe(tell)
        own = servers_own[number]
        if callable(own):
            own(number, frame)

    for number in servers_own:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, own in servers_own.items():
            signal.signal(number, own)
