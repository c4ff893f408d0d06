"""The demo tool server behind `taskbroker serve --demo`: a process of its own, and a backend."""

import asyncio
import importlib.util
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import structlog

from app.auth.issuing import issue_key, issue_secret
from app.auth.keys import SecretBox
from app.broker.context import Broker
from app.db import backends
from app.domain.backends import Backend, BackendTerms
from app.errors import BrokerError
from app.main import create_broker
from app.settings import PREFIX, Settings, SettingsError

log = structlog.get_logger(__name__)

T = TypeVar("T")
NAME = "demo"
_NEEDS = ("demo", "mcp", "taskbroker_sdk", "uvicorn")
_OVERLAP = timedelta(hours=1)
_PATIENCE_SECONDS = 15.0
_PAUSE_SECONDS = 1.0
_LOCAL = "127.0.0.1,localhost,::1"
_POLL_INTERVAL_MS = 500
_HERE = "http://127.0.0.1:"


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
        url = f"{_HERE}{listener.getsockname()[1]}"
        key, secret = asyncio.run(_with_broker(settings, partial(_register, url=url)))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}
        environment = inherited | {
            "BROKER_URL": broker_url,
            "BROKER_BACKEND": NAME,
            "BROKER_API_KEY": key,
            "BROKER_WEBHOOK_SECRET": secret,
            "NO_PROXY": ",".join(filter(None, (os.environ.get("NO_PROXY"), _LOCAL))),
        }
        keeper = _Keeper(listener.fileno(), environment)
        try:
            yield keeper.end
        finally:
            keeper.end()
            asyncio.run(_with_broker(settings, partial(_leave, url=url)))


class _Keeper:
    """Runs the tool server, and again when it dies, until it shall end."""

    def __init__(self, listener: int, environment: dict[str, str]) -> None:
        self._listener = listener
        self._environment = environment
        self._ending = threading.Event()
        self._process = self._start()
        self._thread = threading.Thread(target=self._keep, name="demo-keeper", daemon=True)
        self._thread.start()

    def end(self) -> None:
        if self._ending.is_set():
            return
        self._ending.set()
        self._process.terminate()
        self._thread.join(_PATIENCE_SECONDS)
        if self._thread.is_alive():
            self._process.kill()
            self._thread.join()

    def _keep(self) -> None:
        while True:
            status = self._process.wait()
            if self._ending.is_set():
                return
            log.error("the demo tool server has died; it is started again", status=status)
            self._ending.wait(_PAUSE_SECONDS)
            self._process = self._start()
            if self._ending.is_set():
                self._process.terminate()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # -P: what is in the working folder is not what was installed.
            [sys.executable, "-P", "-m", "demo", str(self._listener)],
            stdin=subprocess.PIPE,  # when we end, however, it closes, and the tool server ends
            pass_fds=[self._listener],
            process_group=0,  # Ctrl-C is ours
            env=self._environment,
        )


async def _with_broker(settings: Settings, action: Callable[..., Awaitable[T]]) -> T:
    broker = create_broker(settings)
    try:
        return await action(broker, SecretBox(settings.keys))
    finally:
        await broker.db.close()


async def _register(broker: Broker, box: SecretBox, *, url: str) -> tuple[str, str]:
    """The API key and the webhook secret of the backend, which is made if it is not there."""
    terms = BackendTerms(
        mcp_url=f"{url}/mcp",
        callback_url=f"{url}/signals",
        allow_anonymous=True,
        poll_interval_ms=_POLL_INTERVAL_MS,
    )
    now = broker.clock()
    async with broker.db.transaction() as connection:
        backend = await backends.by_name(connection, NAME)
        if backend is None:
            backend = await backends.add(connection, NAME, terms)
        elif not is_ours(backend):
            raise SettingsError(
                f"there is a backend {NAME} already that is not this demo: "
                f"`taskbroker backend remove {NAME}`, or serve without --demo"
            )
        await backends.set_terms(connection, backend.id, terms)
        await backends.set_enabled(connection, backend.id)
        await backends.expire_keys(connection, backend.id, now, now + _OVERLAP)
        await backends.expire_secrets(connection, backend.id, now, now + _OVERLAP)
        return (
            await issue_key(connection, backend.id),
            await issue_secret(connection, backend.id, box),
        )


async def _leave(broker: Broker, _: SecretBox, *, url: str) -> None:
    """Takes the addresses away: the port may soon be somebody else's."""
    with suppress(BrokerError):
        async with broker.db.transaction() as connection:
            backend = await backends.by_name(connection, NAME)
            if backend is not None and backend.terms.mcp_url == f"{url}/mcp":
                terms = replace(backend.terms, mcp_url=None, callback_url=None)
                await backends.set_terms(connection, backend.id, terms)


def is_ours(backend: Backend) -> bool:
    """Whether a backend with the name of the demo is what `serve --demo` has made."""
    left = filter(None, (backend.terms.mcp_url, backend.terms.callback_url))
    return backend.terms.allow_anonymous and all(url.startswith(_HERE) for url in left)
