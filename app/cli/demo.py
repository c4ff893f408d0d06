"""The demo tool server behind `taskbroker serve --demo`: a process of its own, and a backend."""

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from app.auth.issuing import issue_key, issue_secret
from app.auth.keys import SecretBox
from app.broker.context import Broker
from app.db import backends
from app.domain.backends import Backend, BackendTerms
from app.main import create_broker
from app.settings import PREFIX, Settings, SettingsError

NAME = "demo"
_NEEDS = ("demo", "mcp", "taskbroker_sdk", "uvicorn")
_OVERLAP = timedelta(hours=1)
_PATIENCE_SECONDS = 15.0
_POLL_INTERVAL_MS = 500


@contextmanager
def demo_tool_server(settings: Settings, broker_url: str) -> Iterator[Callable[[], None]]:
    """Runs it, registered as the backend `demo`, for as long as the block lasts.

    Gives a way to end it earlier: it has to report on its tasks, so the broker should end after it.
    Its socket listens before it does, so that the first calls wait instead of failing.
    """
    missing = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        raise SettingsError(
            f"--demo needs packages that are not installed here ({', '.join(missing)}): "
            "`make run` in the repository installs them"
        )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        mcp_url = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        key, secret = asyncio.run(_register(settings, mcp_url))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
        process = subprocess.Popen(
            [sys.executable, "-m", "demo", str(listener.fileno())],
            stdin=subprocess.PIPE,  # when we end, however, it closes, and the tool server ends
            pass_fds=[listener.fileno()],
            process_group=0,  # Ctrl-C is ours
            env=inherited
            | {
                "BROKER_URL": broker_url,
                "BROKER_BACKEND": NAME,
                "BROKER_API_KEY": key,
                "BROKER_WEBHOOK_SECRET": secret,
            },
        )

    def end() -> None:
        process.terminate()
        try:
            process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    try:
        yield end
    finally:
        end()


async def _register(settings: Settings, mcp_url: str) -> tuple[str, str]:
    """The API key and the webhook secret of the backend, which is made if it is not there."""
    broker = create_broker(settings)
    try:
        return await _renew(broker, settings, mcp_url)
    finally:
        await broker.db.close()


async def _renew(broker: Broker, settings: Settings, mcp_url: str) -> tuple[str, str]:
    terms = BackendTerms(mcp_url=mcp_url, allow_anonymous=True, poll_interval_ms=_POLL_INTERVAL_MS)
    now = broker.clock()
    async with broker.db.transaction() as connection:
        backend = await backends.by_name(connection, NAME)
        if backend is None:
            backend = await backends.add(connection, NAME, terms)
        elif not _is_ours(backend):
            raise SettingsError(
                f"there is a backend {NAME} already that is not this demo: "
                f"`taskbroker backend remove {NAME}`, or serve without --demo"
            )
        await backends.set_terms(connection, backend.id, terms)
        await backends.set_disabled(connection, backend.id, None)
        await backends.expire_keys(connection, backend.id, now, now + _OVERLAP)
        await backends.expire_secrets(connection, backend.id, now, now + _OVERLAP)
        key = await issue_key(connection, backend.id)
        return key, await issue_secret(connection, backend.id, SecretBox(settings.keys))


def _is_ours(backend: Backend) -> bool:
    """Whether a backend of this name is what an earlier `serve --demo` has left."""
    left = backend.terms.mcp_url or ""
    return backend.terms.allow_anonymous and left.startswith("http://127.0.0.1:")
