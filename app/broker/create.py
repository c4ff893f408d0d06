"""Create: a backend hands a new task to the broker."""

import os
from dataclasses import dataclass

from app.broker.context import Broker
from app.db import tasks as stored
from app.db.engine import ForeignKeyViolation
from app.domain import events, tasks
from app.domain.backends import Backend
from app.domain.events import Report
from app.domain.task_ids import Fingerprints, new_task_ref
from app.domain.tasks import Task
from app.errors import Conflict, Expired, Unauthenticated


@dataclass(frozen=True, slots=True)
class NewTask:
    """What a backend asks for. `state` is how the task begins; without a status, working."""

    state: Report
    external_id: str | None = None
    tool: str | None = None


@dataclass(frozen=True, slots=True)
class Created:
    task: Task
    task_id: str
    new: bool
    """False: there was such a task already, and this is it."""


async def create(broker: Broker, backend: Backend, owner: Fingerprints, wanted: NewTask) -> Created:
    """Stores a task for `owner`; it is committed when this returns.

    Repeated with the same `external_id` and owner it gives the first task. Raises Conflict when
    that belongs to another owner, Expired when it has expired, Refused for a bad state.
    """
    task = _begin(broker, backend, owner, wanted)
    while not await _store(broker, task):
        first = await _first(broker, backend, wanted.external_id)
        if first is not None:  # else it was purged meanwhile, and its name is free
            return _again(broker, owner, first)
    return Created(task, broker.keyring.mint(task.ref, owner), new=True)


async def _store(broker: Broker, task: Task) -> bool:
    try:
        return await broker.db.create(task)
    except ForeignKeyViolation:
        raise Unauthenticated("This backend was removed.") from None


def _again(broker: Broker, owner: Fingerprints, first: Task) -> Created:
    if first.owner not in owner:
        raise Conflict(f"externalId {first.external_id!r} names a task of another owner.")
    if first.expired(broker.clock()):
        raise Expired(
            f"The task with externalId {first.external_id!r} has expired; use a new externalId."
        )
    return Created(first, broker.keyring.mint(first.ref, owner, first.key_id), new=False)


def _begin(broker: Broker, backend: Backend, owner: Fingerprints, wanted: NewTask) -> Task:
    now = broker.clock()
    lifetimes = broker.policy.lifetimes_for(backend)
    task = tasks.begin(
        ref=new_task_ref(now, os.urandom(10)),
        backend_id=backend.id,
        owner=owner[0],
        key_id=broker.keyring.newest_kid,
        external_id=wanted.external_id,
        tool=wanted.tool,
        poll_interval_ms=backend.terms.poll_interval_ms or broker.policy.poll_interval_ms,
        now=now,
    )
    events.check_payload(wanted.state)
    task = events.with_ttl(task, wanted.state.ttl_ms, lifetimes)
    return events.apply(task, wanted.state, None, now, lifetimes, broker.policy.cancel_grace_ms)


async def _first(broker: Broker, backend: Backend, external_id: str | None) -> Task | None:
    assert external_id is not None  # nothing else can be taken
    async with broker.db.transaction() as connection:
        ref = await stored.ref_of(connection, backend.id, external_id)
    return None if ref is None else await broker.db.read(ref)
