"""How long a task may live."""

from dataclasses import dataclass
from enum import Enum


class Unset(Enum):
    """A member that was not given, where `None` already means something."""

    UNSET = "unset"

    def __bool__(self) -> bool:
        return False


UNSET = Unset.UNSET


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """The bounds in force, in milliseconds; a backend's own ones narrow the broker's."""

    default_ttl_ms: int
    max_ttl_ms: int
    unlimited_allowed: bool

    def grant(self, asked: int | None | Unset) -> int | None:
        """The time to live that a task really gets; `None` is unlimited.

        What is over the maximum is cut to it, an unlimited one included where that is not
        allowed; the answer to the backend says what was granted.
        """
        if asked is UNSET:
            asked = self.default_ttl_ms
        if asked is None:
            return None if self.unlimited_allowed else self.max_ttl_ms
        return min(asked, self.max_ttl_ms)

    def narrowed(self, default_ttl_ms: int | None, max_ttl_ms: int | None) -> "Lifetimes":
        """The same bounds under a backend's own default and maximum."""
        maximum = self.max_ttl_ms if max_ttl_ms is None else min(max_ttl_ms, self.max_ttl_ms)
        default = self.default_ttl_ms if default_ttl_ms is None else default_ttl_ms
        return Lifetimes(
            default_ttl_ms=min(default, maximum),
            max_ttl_ms=maximum,
            unlimited_allowed=self.unlimited_allowed and max_ttl_ms is None,
        )
