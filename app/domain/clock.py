"""Time as the broker counts it: UTC, in whole milliseconds, because that is what the wire shows."""

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from functools import lru_cache

Clock = Callable[[], datetime]


def utc_now() -> datetime:
    """The current time, in UTC, cut to milliseconds."""
    return whole_milliseconds(datetime.now(UTC))


def whole_milliseconds(moment: datetime) -> datetime:
    return moment.replace(microsecond=moment.microsecond // 1000 * 1000)


def after(moment: datetime, milliseconds: int) -> datetime:
    return moment + timedelta(milliseconds=milliseconds)


@lru_cache(maxsize=16_384)
def iso(moment: datetime) -> str:
    """ISO 8601 in UTC with milliseconds, `2026-11-30T09:00:00.000Z`."""
    return moment.astimezone(UTC).isoformat(timespec="milliseconds")[:-6] + "Z"
