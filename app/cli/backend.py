"""`taskbroker backend`: tool servers that may use the broker."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from app.auth.issuing import issue_key, issue_secret
from app.auth.keys import SecretBox
from app.broker.context import Broker
from app.cli.runtime import AsJson, note, print_members, print_rows, run
from app.db import backends
from app.db.database import Connection
from app.domain.addresses import public, url_fault
from app.domain.backends import NAME, Backend, BackendTerms
from app.domain.clock import iso
from app.errors import NotFound, Refused
from app.settings import Settings

app = typer.Typer(help="Tool servers that may use the broker.", no_args_is_help=True)

DAY_MS = 24 * 3600 * 1000
_LIFE = partial(typer.Option, min=1, max=100 * 366 * DAY_MS)
_OR_NONE = partial(typer.Option, min=0, max=100 * 366 * DAY_MS)
REMOVED_AT_ONCE = 5_000
Name = Annotated[str, typer.Argument(help="The backend's name.")]
Overlap = Annotated[
    float,
    typer.Option(
        min=0, max=8784, help="For how many hours what is valid now goes on to be; 0 ends it."
    ),
]


@app.command()
def add(
    name: Name,
    mcp_url: Annotated[str | None, typer.Option(help="Where its MCP endpoint is.")] = None,
    callback_url: Annotated[str | None, typer.Option(help="Where it wants its signals.")] = None,
    allow_anonymous: Annotated[
        bool, typer.Option("--allow-anonymous", help="Tasks may belong to nobody in particular.")
    ] = False,
    max_ttl_ms: Annotated[int | None, _LIFE(help="Longest life of a task.")] = None,
    default_ttl_ms: Annotated[int | None, _LIFE(help="Life of a task when not asked for.")] = None,
    poll_interval_ms: Annotated[
        int | None, typer.Option(min=1, max=DAY_MS, help="How often clients should ask.")
    ] = None,
    forward_unknown_tasks: Annotated[
        bool, typer.Option("--forward-unknown-tasks", help="For servers that keep some tasks.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Register a tool server. Its API key and webhook secret are shown now and never again.

    Example: `taskbroker backend add image-tools --json`
    """
    if NAME.fullmatch(name) is None:
        raise Refused("A name has 1 to 63 of a-z, 0-9 and -, and does not begin with -.")
    terms = BackendTerms(
        mcp_url=mcp_url,
        callback_url=callback_url,
        allow_anonymous=allow_anonymous,
        forward_unknown_tasks=forward_unknown_tasks,
        default_ttl_ms=default_ttl_ms,
        max_ttl_ms=max_ttl_ms,
        poll_interval_ms=poll_interval_ms,
    )
    _check(terms)

    async def action(broker: Broker, settings: Settings) -> tuple[str, str]:
        _warn(terms, settings)
        async with broker.db.transaction() as connection:
            backend = await backends.add(connection, name, terms)
            key = await issue_key(connection, backend.id)
            return key, await issue_secret(connection, backend.id, SecretBox(settings.keys))

    key, secret = run(action)
    print_members({"name": name, "apiKey": key, "webhookSecret": secret}, as_json=as_json)


@app.command()
def update(
    name: Name,
    mcp_url: Annotated[
        str | None, typer.Option(help='Where its MCP endpoint is; "": none.')
    ] = None,
    callback_url: Annotated[
        str | None, typer.Option(help='Where it wants its signals; "": nowhere.')
    ] = None,
    allow_anonymous: Annotated[
        bool | None,
        typer.Option(
            "--allow-anonymous/--no-allow-anonymous",
            help="Tasks may belong to nobody in particular.",
        ),
    ] = None,
    forward_unknown_tasks: Annotated[
        bool | None,
        typer.Option(
            "--forward-unknown-tasks/--no-forward-unknown-tasks",
            help="For servers that keep some tasks.",
        ),
    ] = None,
    max_ttl_ms: Annotated[
        int | None, _OR_NONE(help="Longest life of a task; 0: the broker's.")
    ] = None,
    default_ttl_ms: Annotated[
        int | None, _OR_NONE(help="Life of a task when not asked for; 0: the broker's.")
    ] = None,
    poll_interval_ms: Annotated[
        int | None,
        typer.Option(min=0, max=DAY_MS, help="How often clients should ask; 0: the broker's."),
    ] = None,
) -> None:
    """Change what was set for a backend; what is not named stays. Its tasks stay as they are.

    A callback that was given up because it answered 410 is tried again.

    Example: `taskbroker backend update image-tools --mcp-url https://images.internal/mcp`
    """
    given: dict[str, Any] = {
        "mcp_url": mcp_url,
        "callback_url": callback_url,
        "allow_anonymous": allow_anonymous,
        "forward_unknown_tasks": forward_unknown_tasks,
        "max_ttl_ms": max_ttl_ms,
        "default_ttl_ms": default_ttl_ms,
        "poll_interval_ms": poll_interval_ms,
    }
    changes: dict[str, Any] = {
        field: value if isinstance(value, bool) else value or None
        for field, value in given.items()
        if value is not None
    }
    if not changes:
        raise Refused("Name at least one thing to change; --help lists them.")

    async def action(broker: Broker, settings: Settings) -> None:
        async with broker.db.transaction() as connection:
            backend = await named(connection, name)
            terms = replace(backend.terms, **changes)
            _check(terms)
            _warn(terms, settings)
            await backends.set_terms(connection, backend.id, terms)

    run(action)
    print(f"{name} is updated; running servers know within seconds.")


def _check(terms: BackendTerms) -> None:
    if terms.default_ttl_ms and terms.max_ttl_ms and terms.default_ttl_ms > terms.max_ttl_ms:
        raise Refused("--default-ttl-ms is larger than --max-ttl-ms.")
    for url in filter(None, (terms.mcp_url, terms.callback_url)):
        if fault := url_fault(url):
            raise Refused(fault)


def _warn(terms: BackendTerms, settings: Settings) -> None:
    if terms.callback_url is None or settings.allow_private_callbacks:
        return
    parts = urlsplit(terms.callback_url)
    if parts.scheme != "https" or _is_private(parts.hostname or ""):
        note(
            "Signals are sent by https and to public addresses only, unless the service runs with "
            "TASKBROKER_ALLOW_PRIVATE_CALLBACKS=true; then to private ones too, and there by http."
        )


@app.command("list")
def list_backends(as_json: AsJson = False) -> None:
    """List the backends.

    Example: `taskbroker backend list`
    """

    async def action(broker: Broker, _: Settings) -> list[Backend]:
        async with broker.db.transaction() as connection:
            return await backends.all_of_them(connection)

    rows = [
        {
            "name": backend.name,
            "enabled": backend.disabled_at is None,
            "signals": _way_of_signals(backend),
            "allowAnonymous": backend.terms.allow_anonymous,
            "createdAt": iso(backend.created_at),
        }
        for backend in run(action)
    ]
    print_rows(rows, as_json=as_json, nothing="No backends yet: `taskbroker backend add NAME`.")


@app.command()
def show(name: Name, as_json: AsJson = False) -> None:
    """Show one backend and what was set for it.

    Example: `taskbroker backend show image-tools`
    """

    async def action(broker: Broker, _: Settings) -> tuple[Backend, int]:
        async with broker.db.transaction() as connection:
            backend = await named(connection, name)
            return backend, await backends.live_tasks(connection, backend.id)

    backend, live = run(action)
    members: dict[str, Any] = {
        "name": backend.name,
        "enabled": backend.disabled_at is None,
        "createdAt": iso(backend.created_at),
        "liveTasks": live,
        "mcpUrl": backend.terms.mcp_url,
        "callbackUrl": backend.terms.callback_url,
        "callbackGoneAt": _moment(backend.callback_gone_at),
        "callbackRestsUntil": _moment(backend.callback_rests_until),
        "allowAnonymous": backend.terms.allow_anonymous,
        "forwardUnknownTasks": backend.terms.forward_unknown_tasks,
        "defaultTtlMs": backend.terms.default_ttl_ms,
        "maxTtlMs": backend.terms.max_ttl_ms,
        "pollIntervalMs": backend.terms.poll_interval_ms,
    }
    print_members(members, as_json=as_json)


@app.command()
def disable(name: Name) -> None:
    """Refuse a backend's requests until it is enabled again. Clients can still read its tasks.

    Example: `taskbroker backend disable image-tools`
    """
    _set_enabled(name, enabled=False)
    print(f"{name} is disabled.")


@app.command()
def enable(name: Name) -> None:
    """Let a disabled backend in again, and try its callback if that was given up after a 410.

    Example: `taskbroker backend enable image-tools`
    """
    _set_enabled(name, enabled=True)
    print(f"{name} is enabled.")


def _set_enabled(name: str, *, enabled: bool) -> None:
    async def action(broker: Broker, _: Settings) -> None:
        async with broker.db.transaction() as connection:
            backend = await named(connection, name)
            if enabled:
                await backends.set_enabled(connection, backend.id)
            else:
                await backends.set_disabled(connection, backend.id, broker.clock())

    run(action)


@app.command()
def rotate_key(name: Name, overlap_hours: Overlap = 24.0, as_json: AsJson = False) -> None:
    """Give a backend a new API key; the present one stays valid for the overlap.

    Example: `taskbroker backend rotate-key image-tools --overlap-hours 1`
    """

    async def action(broker: Broker, _: Settings) -> str:
        async with broker.db.transaction() as connection:
            backend = await named(connection, name)
            now = broker.clock()
            end = now + timedelta(hours=overlap_hours)
            await backends.expire_keys(connection, backend.id, now, end)
            return await issue_key(connection, backend.id)

    print_members({"name": name, "apiKey": run(action)}, as_json=as_json)


@app.command()
def rotate_secret(name: Name, overlap_hours: Overlap = 24.0, as_json: AsJson = False) -> None:
    """Give a backend a new webhook secret; the present one stays valid for the overlap.

    Example: `taskbroker backend rotate-secret image-tools`
    """

    async def action(broker: Broker, settings: Settings) -> str:
        async with broker.db.transaction() as connection:
            backend = await named(connection, name)
            now = broker.clock()
            end = now + timedelta(hours=overlap_hours)
            await backends.expire_secrets(connection, backend.id, now, end)
            return await issue_secret(connection, backend.id, SecretBox(settings.keys))

    print_members({"name": name, "webhookSecret": run(action)}, as_json=as_json)


@app.command()
def remove(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Even with live tasks.")] = False,
) -> None:
    """Remove a backend with its keys, its secrets and all its tasks.

    Example: `taskbroker backend remove image-tools --force`
    """

    async def action(broker: Broker, _: Settings) -> int:
        async with broker.db.transaction() as connection:
            backend = await named(connection, name)
            live = await backends.live_tasks(connection, backend.id)
            if live and not force:
                raise Refused(f"{name} has {live} live tasks; --force removes them too.")
            await backends.set_disabled(connection, backend.id, broker.clock())
        removed = await _in_batches(broker, backend, backends.remove_tasks)
        await _in_batches(broker, backend, backends.remove_signals)
        async with broker.db.transaction() as connection:
            return removed + await backends.remove(connection, backend.id)

    print(f"{name} is removed, with {run(action)} tasks.")


async def _in_batches(
    broker: Broker, backend: Backend, remove: Callable[[Connection, int, int], Awaitable[int]]
) -> int:
    """Removes what belongs to a backend, in bounded transactions; how many."""
    removed, batch = 0, REMOVED_AT_ONCE
    while batch == REMOVED_AT_ONCE:
        async with broker.db.transaction() as connection:
            batch = await remove(connection, backend.id, REMOVED_AT_ONCE)
        removed += batch
    return removed


def _moment(moment: datetime | None) -> str | None:
    return None if moment is None else iso(moment)


def _is_private(host: str) -> bool:
    """Whether a host is an address in itself, and not a public one."""
    try:
        return not public(ip_address(host))
    except ValueError:
        return host == "localhost"


def _way_of_signals(backend: Backend) -> str:
    """How a backend gets its signals."""
    if backend.terms.callback_url is None:
        return "fetches"
    return "callback" if backend.callback_gone_at is None else "callback gone"


async def named(connection: Connection, name: str) -> Backend:
    """The backend of this name. Raises NotFound."""
    backend = await backends.by_name(connection, name)
    if backend is None:
        raise NotFound(f"There is no backend {name}; `taskbroker backend list` shows them.")
    return backend
