"""What can go wrong, in the broker's own words; no transport is known here.

BrokerError
├── Invalid              the input cannot be read: not JSON, wrong member types
├── Refused              the input is well formed, and a rule says no
├── Unauthenticated      no credential, or one that is not valid
├── Forbidden            a valid credential that may not do this
├── NotFound             no such thing, or not the caller's
├── Expired              the task's time to live has run out
├── Conflict             the name is taken by something else
├── TooLarge             the input is over the limit
│   └── HeadersTooLarge  the headers are
├── TooSlow              the input did not come in time
├── Unavailable          something cannot be reached now; trying again is right
│   ├── StorageUnavailable   the database
│   └── IssuerUnavailable    who must be asked whether a token is valid
└── StorageFault         the database refused a statement: a fault of ours (in db/engine.py)
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong with the input: where (a JSON pointer) and what."""

    pointer: str
    detail: str


class BrokerError(Exception):
    """The broker could not do what was asked."""

    def __init__(self, detail: str | None = None, *, faults: Sequence[Fault] = ()) -> None:
        self.detail = detail or self.__doc__ or type(self).__name__
        self.faults = tuple(faults)
        super().__init__(self.detail)


class Invalid(BrokerError):
    """The input cannot be read."""


class Refused(BrokerError):
    """The input is well formed, but a rule of the task life cycle refuses it."""


class Unauthenticated(BrokerError):
    """A valid credential is needed."""


class Forbidden(BrokerError):
    """The credential is valid, but may not do this."""


class NotFound(BrokerError):
    """There is no such task."""


class Expired(BrokerError):
    """The task has expired."""


class Conflict(BrokerError):
    """Something else already has this name."""


class TooLarge(BrokerError):
    """The body is larger than this broker accepts."""


class HeadersTooLarge(TooLarge):
    """The headers are larger than this broker accepts."""


class TooSlow(BrokerError):
    """The body did not come in time."""


class Unavailable(BrokerError):
    """Something that is needed cannot be reached right now. Try again shortly."""


class StorageUnavailable(Unavailable):
    """The database cannot be reached right now. Try again shortly."""


class IssuerUnavailable(Unavailable):
    """The credential cannot be checked right now. Try again shortly."""
