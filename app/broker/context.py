"""What the verbs work with."""

from dataclasses import dataclass, replace
from sys import getsizeof
from typing import NamedTuple
from uuid import UUID

from cachetools import TTLCache

from app.db.database import Database
from app.domain.backends import Backend
from app.domain.clock import Clock
from app.domain.lifetimes import Lifetimes
from app.domain.task_ids import Fingerprints, Keyring
from app.domain.tasks import Task

CACHE_SECONDS = 10.0
_TASK_OVERHEAD_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator has set. Milliseconds."""

    lifetimes: Lifetimes
    poll_interval_ms: int
    cancel_grace_ms: int
    expired_grace_ms: int

    def lifetimes_for(self, backend: Backend) -> Lifetimes:
        return self.lifetimes.narrowed(backend.terms.default_ttl_ms, backend.terms.max_ttl_ms)


class TerminalTasks:
    """A bounded memory of terminal tasks, which never change again.

    Bounded in bytes, and in time, so that what an operator removes is forgotten on every replica
    within seconds.
    """

    def __init__(self, max_bytes: int) -> None:
        self._tasks: TTLCache[UUID, Task] = TTLCache(max_bytes, CACHE_SECONDS, getsizeof=_size)

    def get(self, ref: UUID) -> Task | None:
        try:
            return self._tasks[ref]
        except KeyError:
            return None

    def add(self, task: Task) -> None:
        if task.status.terminal and _size(task) <= self._tasks.maxsize:
            self._tasks[task.ref] = replace(task, inputs=())  # nobody is shown them any more


def _size(task: Task) -> int:
    texts = (task.result, task.error, task.status_message)
    return _TASK_OVERHEAD_BYTES + sum(getsizeof(text) for text in texts if text is not None)


class Caller(NamedTuple):
    """An MCP client, and the door that it came through."""

    owner: Fingerprints
    backend_id: int | None = None
    """Behind the door of one backend there are only its own tasks; `None` is the door to all."""
    anonymous: bool = False


@dataclass(frozen=True, slots=True)
class Broker:
    """The verbs' tools, made once by the composition root."""

    db: Database
    keyring: Keyring
    clock: Clock
    policy: Policy
    terminal_tasks: TerminalTasks
