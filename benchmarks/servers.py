"""The servers under load, each a process of its own, away from the core of the generator."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from app.settings import PREFIX, Settings

ROOT = Path(__file__).resolve().parents[1]
START_SECONDS = 30.0


class Served(NamedTuple):
    port: int
    pid: int


@contextmanager
def on_cores(*, generator: bool) -> Iterator[None]:
    """What is started in the block runs on the generator's core (the first), or on the others."""
    if not hasattr(os, "sched_setaffinity") or len(cores := sorted(os.sched_getaffinity(0))) < 2:
        yield
        return
    os.sched_setaffinity(0, cores[:1] if generator else cores[1:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def broker(settings: Settings, checkout: Path = ROOT) -> Iterator[int]:
    """The real broker of a checkout, by its command line; its port."""
    with _broker(settings, {}, checkout) as served:
        yield served.port


@contextmanager
def replica(settings: Settings) -> Iterator[Served]:
    """One of the brokers on a database, for as many streams of an owner as the settings say."""
    streams = {f"{PREFIX}MAX_STREAMS_PER_OWNER": str(settings.max_streams_per_owner)}
    with _broker(settings, streams, ROOT) as served:
        yield served


@contextmanager
def _broker(settings: Settings, more: dict[str, str], checkout: Path) -> Iterator[Served]:
    environment = {
        f"{PREFIX}DATABASE_URL": str(settings.database_url),
        f"{PREFIX}SECRET_KEYS": ",".join(settings.secret_keys),
        f"{PREFIX}LOG_LEVEL": "error",
        f"{PREFIX}ALLOW_PRIVATE_CALLBACKS": str(settings.allow_private_callbacks),
    }
    command = ["app", "serve", "--port", "{port}"]
    with _server(command, environment | more, checkout) as served:
        yield served


@contextmanager
def bare(answer_bytes: int) -> Iterator[int]:
    """The bare application on the same server with the same options; its port."""
    options = "--loop uvloop --http httptools --ws none --no-access-log --no-server-header"
    quiet = "--lifespan off --log-level warning --timeout-keep-alive 75"
    command = ["uvicorn", "benchmarks.bare:application", *options.split(), *quiet.split()]
    with _server(
        [*command, "--port", "{port}"], {"BENCH_ANSWER_BYTES": str(answer_bytes)}, ROOT
    ) as served:
        yield served.port


@contextmanager
def demo_tools() -> Iterator[int]:
    """The demo tool server by itself; none of its tools that need a broker is called."""
    options = "--loop uvloop --http httptools --ws none --no-access-log --log-level warning"
    environment = {"BROKER_URL": "http://127.0.0.1:9", "BROKER_BACKEND": "demo"}
    with _server(
        ["uvicorn", "demo.tool_server:app", *options.split(), "--port", "{port}"],
        environment | {"BROKER_API_KEY": "unused", "BROKER_WEBHOOK_SECRET": "whsec_" + "A" * 44},
        ROOT,
    ) as served:
        yield served.port


@contextmanager
def _server(module: list[str], environment: dict[str, str], folder: Path) -> Iterator[Served]:
    port = _free_port()
    command = [sys.executable, "-m", *(part.format(port=port) for part in module)]
    with on_cores(generator=False):
        process = subprocess.Popen(command, cwd=folder, env=os.environ | environment)
    try:
        _await_start(process, port)
        yield Served(port, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def _await_start(process: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            time.sleep(0.05)
        else:
            return
    raise RuntimeError(f"{process.args!r} did not start")
