"""What a task is to its tool server, whatever does the I/O; and which one is running here."""

from contextvars import ContextVar

from taskbroker_sdk._errors import CancelRequested
from taskbroker_sdk._wire import TaskState


class Handle:
    """The name of a task, and whether its work should stop, as far as is known."""

    def __init__(self, ref: str) -> None:
        self.ref = ref
        self.reason_to_stop: CancelRequested | None = None
        """As the replies so far and the heartbeat have told it."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ref}>"

    def check(self) -> None:
        """Raises CancelRequested if there is a reason to stop; asks nobody."""
        if self.reason_to_stop is not None:
            raise self.reason_to_stop.with_traceback(None)

    def stop(self, reason: CancelRequested) -> None:
        """Makes the next `check`, `progress` or `ask` raise this; the first reason counts."""
        self.reason_to_stop = self.reason_to_stop or reason

    def _learn(self, state: TaskState) -> TaskState:
        if state.reason_to_stop is not None:
            self.stop(state.reason_to_stop)
        return state


running: ContextVar[Handle | None] = ContextVar("running", default=None)
"""The task whose work this is."""
