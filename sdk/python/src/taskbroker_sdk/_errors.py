"""What can go wrong, and what ends work early.

    BaseException
    ├── CancelRequested           raised into work that should stop
    │   └── Stopped               because the tool server is being stopped (not exported)
    └── Exception
        ├── BrokerError           the broker, or the way to it; by itself, a closed client
        │   ├── Problem           the broker refused; it says why
        │   └── Unreachable       no usable answer in all attempts
        └── TaskFailed            raised by work: end the task with this JSON-RPC error

CancelRequested is no Exception, like asyncio.CancelledError: `except Exception`, of which there is
one around each tool of the official Python SDK, never swallows a wish to cancel.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class BrokerError(Exception):
    """Base of what a call to the broker raises; by itself, a client that is closed."""


def closed() -> BrokerError:
    return BrokerError("This client is closed.")


class Fault(NamedTuple):
    """One thing that is wrong with what was sent."""

    pointer: str
    """JSON pointer to the member, for instance `/data/status`."""
    detail: str
    """What to do about it."""


class Problem(BrokerError):
    """The broker's refusal, an RFC 9457 problem document. The same call again will not help."""

    def __init__(self, status: int, document: Mapping[str, Any]) -> None:
        super().__init__(status, document)
        self.status = status
        self.document = document
        self.title = str(document.get("title") or f"HTTP status {status}")
        self.detail = str(document.get("detail") or "")
        self.errors = tuple(_faults(document.get("errors")))

    def __str__(self) -> str:
        sentence = f"{self.title}: {self.detail}" if self.detail else self.title
        return sentence + "".join(f" [{fault.pointer}: {fault.detail}]" for fault in self.errors)


def _faults(errors: object) -> list[Fault]:
    if not isinstance(errors, list):
        return []
    return [
        Fault(str(error.get("pointer", "")), str(error.get("detail", "")))
        for error in errors
        if isinstance(error, dict)
    ]


class Unreachable(BrokerError):
    """The attempts are used up: no connection, no answer in time, 408, 429, 5xx, or an answer that
    is not in a broker's words (an error page of a proxy, a wrong URL) each time.
    """


class CancelRequested(BaseException):
    """The work should stop: its client has lost interest, or its task has ended already.

    Work may raise it by itself as well; the task then ends `cancelled` with this message.
    """

    def __init__(self, message: str = "stopped, as the client asked") -> None:
        super().__init__(message)


def ended_already(status: str) -> CancelRequested:
    return CancelRequested(f"the task has ended already: {status}")


def gone(why: str) -> CancelRequested:
    return CancelRequested(f"the task is gone: {why}")


class Stopped(CancelRequested):
    """The work should stop because its tool server does."""

    def __init__(self, message: str = "the tool server was stopped") -> None:
        super().__init__(message)


class TaskFailed(Exception):
    """Raised by work: the task fails with this JSON-RPC error.

    For errors of the protocol only. A tool that ran and has to report a failure returns
    `text_result("…", is_error=True)`.
    """

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(code, message, data)
        self.code = code
        self.message = message
        self.data = data

    def __str__(self) -> str:
        return f"{self.message} ({self.code})"
