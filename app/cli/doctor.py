"""`taskbroker doctor`: looks for what is wrong, and says what to do about it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

import typer
from prometheus_client import CollectorRegistry

from app.auth.documents import Documents, NoDocument
from app.auth.issuer_keys import IssuerKeys
from app.auth.keys import SecretBox
from app.broker.context import Broker
from app.cli.demo import NAME as DEMO
from app.cli.demo import is_ours
from app.cli.runtime import AsJson, print_json, run
from app.db import backends, health, migrations, signals
from app.domain.backends import Backend
from app.domain.issuers import Issuer
from app.errors import BrokerError
from app.settings import Settings
from app.telemetry import Metrics
from app.workers.callbacks import Callbacks, Outcome

OLDEST_POSTGRES = 14
SKEW_SECONDS = 2.0
LISTEN_SECONDS = 5.0
CONNECT_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `mend` says what to do when it is not `ok`."""

    check: str
    ok: bool
    found: str
    mend: str | None = None


Check = Callable[[Broker, Settings], Awaitable[Finding]]


def doctor(as_json: AsJson = False) -> None:
    """Check the database, the schema, the clock, the keys, the LISTEN path, the tool servers,
    their callbacks and the issuers of access tokens.

    Ends with 1 if anything needs mending. Example: `taskbroker doctor`
    """

    async def action(broker: Broker, settings: Settings) -> list[Finding]:
        return [finding async for finding in _examine(broker, settings)]

    findings = run(action, on_any_schema=True)
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            print(f"{'ok  ' if finding.ok else 'BAD '} {finding.check}: {finding.found}")
            if finding.mend:
                print(f"       -> {finding.mend}")
    if not all(finding.ok for finding in findings):
        raise typer.Exit(1)


async def _examine(broker: Broker, settings: Settings) -> AsyncIterator[Finding]:
    for name, check in CHECKS.items():
        try:
            finding = await check(broker, settings)
        except BrokerError as error:
            mend = "see that the server runs and that TASKBROKER_DATABASE_URL leads to it"
            finding = Finding(name, False, error.detail, mend)
        yield finding
        if not finding.ok and name in ("database", "schema"):
            return  # nothing else can be looked at


async def _database(broker: Broker, _: Settings) -> Finding:
    major, minor = await health.server_version(broker.db)
    found = f"PostgreSQL {major}.{minor}"
    if major < OLDEST_POSTGRES:
        return Finding("database", False, found, "upgrade the server to PostgreSQL 14 or newer")
    return Finding("database", True, found)


async def _schema(broker: Broker, _: Settings) -> Finding:
    revision, head = await health.revision(broker.db), migrations.head()
    if revision != head:
        return Finding("schema", False, f"at {revision}, needs {head}", "run `taskbroker migrate`")
    return Finding("schema", True, f"at {revision}")


async def _clock(broker: Broker, _: Settings) -> Finding:
    skew = abs((broker.clock() - await health.clock(broker.db)).total_seconds())
    found = f"{skew:.1f} s from the database's"
    if skew > SKEW_SECONDS:
        mend = "run NTP on both machines: expiry and webhook timestamps are read off the clock"
        return Finding("clock", False, found, mend)
    return Finding("clock", True, found)


async def _keys(broker: Broker, settings: Settings) -> Finding:
    box = SecretBox(settings.keys)
    async with broker.db.transaction() as connection:
        secrets = await backends.all_secrets(connection, broker.clock())
    closed = sum(not box.opens(secret) for secret in secrets)
    found = f"{len(settings.keys)} in the ring"
    if closed:
        mend = (
            "put the key that is missing back into TASKBROKER_SECRET_KEYS, "
            "or give their backends new ones: `taskbroker backend rotate-secret NAME "
            "--overlap-hours 0`"
        )
        return Finding("keys", False, f"{found}, {closed} webhook secrets cannot be opened", mend)
    return Finding("keys", True, f"{found}, every webhook secret can be opened")


async def _listen(broker: Broker, _: Settings) -> Finding:
    if not await health.notifications_arrive(broker.db, LISTEN_SECONDS):
        mend = "connect past the pooler, or use session pooling: LISTEN needs a session"
        return Finding("listen", False, "a notification did not arrive", mend)
    return Finding("listen", True, "notifications arrive")


async def _tool_servers(broker: Broker, _: Settings) -> Finding:
    async with broker.db.transaction() as connection:
        registered = await backends.all_of_them(connection)
    urls = {
        backend.name: backend.terms.mcp_url
        for backend in registered
        if backend.terms.mcp_url is not None and backend.disabled_at is None
    }
    reached = await asyncio.gather(*map(_accepts_connections, urls.values()))
    away = [name for name, there in zip(urls, reached, strict=True) if not there]
    if away:
        mend = (
            "start them, or correct where they are: `taskbroker backend update NAME --mcp-url …`; "
            "`taskbroker backend disable NAME` for one that is to stay away"
        )
        return Finding("tool servers", False, f"cannot be reached: {', '.join(away)}", mend)
    return Finding("tool servers", True, f"{len(urls)} with an mcp-url, all can be reached")


async def _callbacks(broker: Broker, settings: Settings) -> Finding:
    async with broker.db.transaction() as connection:
        registered = await backends.all_of_them(connection)
        troubles = await signals.troubles(connection)
    called = {
        backend: backend.terms.callback_url
        for backend in registered
        if backend.terms.callback_url is not None and backend.disabled_at is None
    }
    faults = await asyncio.gather(*(_look(one, url, settings) for one, url in called.items()))
    found, mends = [], []
    for backend, fault in zip(called, faults, strict=True):
        if backend.callback_gone_at is not None:
            found.append(f"{backend.name} answered 410 and gets no more signals")
            mends.append(f"`taskbroker backend enable {backend.name}` when it is there again")
        elif fault is not None:
            found.append(f"{backend.name}: {fault.kind}")
            mend = fault.detail or f"start it, or `taskbroker backend update {backend.name} …`"
            mends.append(f"{backend.name}: {mend}")
    for trouble in troubles:
        found.append(
            f"of the signals for {trouble.backend}, {trouble.dead} are dead and {trouble.failing} "
            f"have failed {signals.SEVERAL} times or more"
        )
        mends.append(
            f"`taskbroker delivery redeliver --backend {trouble.backend}` when it is well again"
        )
    if found:
        return Finding("callbacks", False, "; ".join(found), "; ".join(mends))
    return Finding("callbacks", True, f"{len(called)}, all can be reached")


async def _look(backend: Backend, url: str, settings: Settings) -> Outcome | None:
    demo = backend.name == DEMO and is_ours(backend)  # `serve --demo` lets it be called
    callbacks = Callbacks(
        private_allowed=demo or settings.allow_private_callbacks, seconds=CONNECT_SECONDS
    )
    try:
        return await callbacks.look(url)
    finally:
        await callbacks.close()


async def _issuers(broker: Broker, settings: Settings) -> Finding:
    documents = Documents()
    faults = await asyncio.gather(
        *(_keys_fault(issuer, documents, broker) for issuer in settings.oauth_issuers)
    )
    await documents.close()
    named = zip(settings.oauth_issuers, faults, strict=True)
    found = [f"{issuer.name}: {fault}" for issuer, fault in named if fault is not None]
    if found:
        mend = (
            "see that this machine reaches them, and that issuer and jwks_uri in "
            "TASKBROKER_OAUTH_ISSUERS are what they call themselves and where their keys are"
        )
        return Finding("issuers", False, "; ".join(found), mend)
    return Finding("issuers", True, f"{len(faults)}, the keys of all can be fetched")


async def _keys_fault(issuer: Issuer, documents: Documents, broker: Broker) -> str | None:
    keys = IssuerKeys(issuer, documents, broker.clock, Metrics(CollectorRegistry()).jwks_fetches)
    try:
        usable = await keys.count()
    except NoDocument as failure:
        return failure.why
    return None if usable else "has no key that can be used"


async def _accepts_connections(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(parts.hostname, port)
    except OSError:  # no time is left, too
        return False
    writer.close()
    return True


CHECKS: dict[str, Check] = {
    "database": _database,
    "schema": _schema,
    "clock": _clock,
    "keys": _keys,
    "listen": _listen,
    "tool servers": _tool_servers,
    "callbacks": _callbacks,
    "issuers": _issuers,
}
