"""`taskbroker serve`: the service."""

import asyncio
import ctypes
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Annotated

import structlog
import typer
import uvicorn
from uvicorn.config import STARTUP_FAILURE
from uvicorn.supervisors import Multiprocess

from app.asgi import Application
from app.cli.demo import demo_tool_server
from app.cli.runtime import (
    WAIT_SECONDS,
    embedded_postgres,
    embedded_settings,
    note,
    read_settings,
    with_keys,
)
from app.db.data_dir import DataDir
from app.db.migrations import migrate
from app.http import HttpProtocol
from app.main import create_app
from app.mcp.door import LOOPBACK
from app.settings import PREFIX, Settings, SettingsError, settings_without_effect

log = structlog.get_logger(__name__)

GRACE_SECONDS = 20
KEEP_ALIVE_SECONDS = 75
_PR_SET_PDEATHSIG = 1
_COLLECTIONS_BEFORE_A_FULL_ONE = 1_000
"""Of the middle generation; Python has 10. In a full one everything stands still, for 0.1 ms for
each open stream.
"""


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that answer requests.")] = 1,
    demo: Annotated[
        bool, typer.Option("--demo", help="With a demo tool server behind /mcp/demo.")
    ] = False,
) -> None:
    """Run the service.

    Without TASKBROKER_DATABASE_URL it starts a Postgres of its own in TASKBROKER_DATA_DIR,
    migrates it, and ends it when it ends. Replicas need an external database.

    Example: `taskbroker serve --port 8080`
    """
    settings = read_settings()
    settings = settings.model_copy(
        update={
            "host": settings.host if host is None else host,
            "port": settings.port if port is None else port,
        }
    )
    settings = _with_public_url(settings)
    for name in settings_without_effect():
        log.warning("this setting has no effect in this release", setting=name)
    if not settings.has_oauth:
        log.info(
            "OAuth is not configured: a bearer token is not checked with anyone, it is the "
            "owner of its tasks, and a renewed one is another owner"
        )
    # uvicorn gives a signal back after it has drained; then the blocks below are left in order.
    signal.signal(signal.SIGTERM, _leave)
    try:
        if settings.database_url is not None:
            _listen(with_keys(settings), workers, demo=demo)
        else:
            _serve_embedded(settings, workers, demo=demo)
    except KeyboardInterrupt:
        sys.exit(0)


def _with_public_url(settings: Settings) -> Settings:
    """The settings with the URL for which clients of OAuth are told to get their tokens. A broker
    that only this machine reaches knows it by itself.
    """
    if settings.public_url is not None or not settings.authorization_servers:
        return settings
    if settings.host in LOOPBACK and settings.port:
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        return settings.model_copy(update={"public_url": f"http://{host}:{settings.port}"})
    if settings.oauth_issuers:
        raise SettingsError(
            f"{PREFIX}PUBLIC_URL must be set with {PREFIX}OAUTH_ISSUERS: "
            "clients are told by it for which resource they need a token"
        )
    return settings


def _serve_embedded(settings: Settings, workers: int, *, demo: bool) -> None:
    folder = DataDir(settings.data_dir)
    with folder.claim("serve", WAIT_SECONDS), embedded_postgres(settings) as postgres:
        before, after = asyncio.run(migrate(postgres.url))
        if before != after:
            log.info("schema migrated", revision=after)
        folder.publish(postgres.url)
        _listen(embedded_settings(settings, folder, postgres.url), workers, demo=demo)


def _listen(settings: Settings, workers: int, *, demo: bool) -> None:
    if demo:  # the tools of the demo are on this machine
        settings = settings.model_copy(update={"allow_private_callbacks": True})
    _hand_to_workers(settings)
    config = uvicorn.Config(
        "app.cli.serve:application",
        factory=True,
        host=settings.host,
        port=settings.port,
        workers=workers,
        loop="uvloop",
        http=HttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    listener = _bind(config)
    url = _url(settings, listener)
    with demo_tool_server(settings, url) if demo else nullcontext(_nothing) as end_demo:
        _announce(settings, url, demo=demo)
        if demo and settings.host not in LOOPBACK:
            log.warning("--demo lets anybody who can reach this address call its tools")
        failed = not _run(config, listener, workers, end_demo)
    if failed:
        sys.exit(1)


def _run(
    config: uvicorn.Config, listener: socket.socket, workers: int, first: Callable[[], None]
) -> bool:
    """Serves until it is told to end, and does `first` before it does. Whether it ever served."""
    if workers == 1:
        server = _Server(config)
        server.first = first
        server.run(sockets=[listener])
        return server.started
    supervisor = _Supervisor(config, sockets=[listener])
    supervisor.first = first
    supervisor.run()
    return all(process.exitcode != STARTUP_FAILURE for process in supervisor.processes)


class _Server(uvicorn.Server):
    """One that goes on serving until what must be done first is done."""

    first: Callable[[], None]
    _told = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._told:  # somebody is impatient
            super().handle_exit(sig, frame)
            return
        self._told = True
        # A handler of signals runs in the thread that serves.
        threading.Thread(target=self._end, args=(sig, frame)).start()

    def _end(self, sig: int, frame: FrameType | None) -> None:
        self.first()
        super().handle_exit(sig, frame)


class _Supervisor(Multiprocess):
    first: Callable[[], None]

    def terminate_all(self) -> None:
        self.first()
        super().terminate_all()


def _nothing() -> None:
    pass


def application() -> Application:
    """The application of one worker process, from the environment that `serve` prepared."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        _die_with(parent.pid)
    served = create_app(read_settings())
    _collect_less()
    return served


def _collect_less() -> None:
    """Has full garbage collections be rare, and leave out what is there to the end anyway."""
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _COLLECTIONS_BEFORE_A_FULL_ONE)


def _bind(config: uvicorn.Config) -> socket.socket:
    try:
        return config.bind_socket()
    except SystemExit:  # uvicorn has logged the reason
        raise SettingsError(
            f"cannot listen on {config.host}, port {config.port}: "
            "is something else there? choose another --host or --port"
        ) from None


def _hand_to_workers(settings: Settings) -> None:
    """Workers are fresh processes and read their settings from the environment, as we did."""
    os.environ[f"{PREFIX}DATABASE_URL"] = str(settings.database_url)
    os.environ[f"{PREFIX}SECRET_KEYS"] = ",".join(settings.secret_keys)
    os.environ[f"{PREFIX}HOST"] = settings.host
    if settings.public_url is not None:
        os.environ[f"{PREFIX}PUBLIC_URL"] = settings.public_url
    os.environ[f"{PREFIX}ALLOW_PRIVATE_CALLBACKS"] = str(settings.allow_private_callbacks)


def _die_with(parent: int | None) -> None:
    # After a kill -9 of `serve` nobody would end its workers, and they would keep the port.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit("`taskbroker serve` has ended")


def _leave(_signal: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def _url(settings: Settings, listener: socket.socket) -> str:
    """Where this machine reaches us."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)  # noqa: S104
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


def _announce(settings: Settings, url: str, *, demo: bool) -> None:
    log.info("listening", url=url)
    if settings.log_format == "console":  # somebody is looking
        served = f"  demo tools      {url}/mcp/demo   (for any MCP client)\n" if demo else ""
        note(
            f"""
Task Broker is at {url}   (Ctrl-C ends it)

{served}  MCP endpoint    {url}/mcp
  backend API     {url}/docs
  register a tool server, in another terminal:
                  .venv/bin/taskbroker backend add my-tools
  then follow "Your first task in five minutes" in README.md
"""
        )
