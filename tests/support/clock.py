"""A clock that a test can set ahead."""

from datetime import datetime, timedelta

from app.domain.clock import utc_now


class ShiftedClock:
    """The real time, shifted by what the test has let pass."""

    def __init__(self) -> None:
        self._shift = timedelta()

    def __call__(self) -> datetime:
        return utc_now() + self._shift

    def advance(self, *, milliseconds: int = 0, seconds: float = 0) -> None:
        self._shift += timedelta(milliseconds=milliseconds, seconds=seconds)


class StoppedClock(ShiftedClock):
    """Time that passes only when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self._start = utc_now()

    def __call__(self) -> datetime:
        return self._start + self._shift
