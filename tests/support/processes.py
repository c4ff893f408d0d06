"""The broker as a process of its own, as an operator runs it, to be ended in every way."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import httpx

from app.db.data_dir import DataDir
from tests.support.clock import ShiftedClock
from tests.support.secrecy import LOGS, secret
from tests.support.service import ToolServer
from tests.support.waiting import until

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "app")


def environment(**settings: str) -> dict[str, str]:
    """The environment of the tests, with these settings of the broker and no others."""
    kept = {name: value for name, value in os.environ.items() if "TASKBROKER" not in name}
    given = {f"TASKBROKER_{name.upper()}": value for name, value in settings.items()}
    return {**kept, "TASKBROKER_LOG_LEVEL": "debug", **given}


def open_log(name: str) -> BinaryIO:
    """A log of the run, which the test of secrecy will read."""
    return Path(LOGS, f"{name}.log").open("ab")


async def run(command: str, log: str, **settings: str) -> str:
    """The output of `taskbroker <command>`, which must succeed."""
    with open_log(log) as errors:
        process = await asyncio.create_subprocess_exec(
            *COMMAND,
            *command.split(),
            cwd=ROOT,
            env=environment(**settings),
            stdout=PIPE,
            stderr=errors,
        )
        output, _ = await process.communicate()
    assert process.returncode == 0, f"`{command}` failed, see {errors.name}"
    return output.decode()


DISK, MEMORY = Path("/tmp"), Path("/dev/shm")  # noqa: S108 - folders of their own are made in them
ENOUGH_BYTES = 6 * 1024**3


def in_memory() -> Path:
    """Where files need no disk, if there is such a place with room enough."""
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ENOUGH_BYTES
    return MEMORY if roomy else DISK


@contextmanager
def folder_for_all(within: Path = DISK) -> Iterator[Path]:
    """A folder with a short path that every user may enter, as root's Postgres must."""
    with tempfile.TemporaryDirectory(prefix="tb-", dir=within, ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)
        yield Path(name)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return ") Z " in Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return True


def listens(port: int) -> bool:
    with socket.socket() as knock:
        return knock.connect_ex(("127.0.0.1", port)) == 0


class BrokerProcess:
    """`taskbroker serve` on an embedded Postgres; it may be started again after its end."""

    def __init__(
        self, data_dir: Path, name: str, *, workers: int = 1, demo: bool = False, **settings: str
    ) -> None:
        self.data_dir = data_dir
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = name
        self._workers = workers
        self._demo = ("--demo",) if demo else ()
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._orphans: list[int] = []

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def postmaster(self) -> int:
        """The process that is the embedded Postgres; 0 when none says that it is."""
        with suppress(OSError, ValueError, IndexError):
            pid_file = self.data_dir / "postgres" / "postmaster.pid"
            return int(pid_file.read_text().splitlines()[0])
        return 0

    def has_another_postgres(self, former: int) -> bool:
        return self.postmaster not in (0, former)

    @property
    def database_url(self) -> str:
        url = DataDir(self.data_dir).running(10)
        assert url is not None, "the broker does not run"
        return url

    @property
    def workers(self) -> list[int]:
        """The processes that answer requests, when there are several."""
        me = self.process.pid
        children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
        command_lines = {int(pid): Path("/proc", pid, "cmdline").read_bytes() for pid in children}
        return [pid for pid, line in command_lines.items() if b"spawn_main" in line]

    def start(self) -> None:
        self.spawn()
        until(self.is_ready, 60)
        secret((self.data_dir / "secret-keys").read_text().strip())

    def spawn(self) -> None:
        """Starts the process, and does not wait for anything."""
        serve = ("serve", "--port", str(self.port), "--workers", str(self._workers), *self._demo)
        settings = environment(data_dir=str(self.data_dir), **self._settings)
        with open_log(self._log) as log:
            self._process = subprocess.Popen(
                [*COMMAND, *serve], cwd=ROOT, env=settings, stdout=log, stderr=log
            )

    def is_ready(self) -> bool:
        assert self.process.poll() is None, f"the broker ended, see {self._log}.log"
        try:
            return httpx.get(f"{self.url}/readyz").is_success
        except httpx.TransportError:
            return False

    def kill(self) -> None:
        """What the kernel does to it, or an impatient operator."""
        self._orphans += self.workers
        self.process.kill()
        self.process.wait(10)

    def terminate(self) -> int:
        """What an orchestrator does to it; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def clean_up(self) -> None:
        """Leaves nothing behind, whatever a test has done or found."""
        postmaster = self.postmaster
        if self.process.poll() is None:
            self.terminate()
        for pid in self._orphans:
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)
        until(lambda: gone(postmaster), 60)

    async def run(self, command: str) -> str:
        """The output of a command beside the running broker."""
        return await run(command, self._log, data_dir=str(self.data_dir))

    @asynccontextmanager
    async def tool_server(self, name: str) -> AsyncIterator[ToolServer]:
        """Registers a backend that talks to the broker over the network."""
        shown = json.loads(await self.run(f"backend add {name} --json"))
        async with httpx.AsyncClient(base_url=self.url, timeout=30) as http:
            yield ToolServer(
                http, ShiftedClock(), name, secret(shown["apiKey"]), secret(shown["webhookSecret"])
            )


@contextmanager
def running_broker(
    name: str, *, workers: int = 1, demo: bool = False, **settings: str
) -> Iterator[BrokerProcess]:
    """A broker in a fresh data folder. Nothing of it is left when the block ends."""
    with folder_for_all() as folder:
        broker = BrokerProcess(folder / "data", name, workers=workers, demo=demo, **settings)
        try:
            broker.start()
            yield broker
        finally:
            broker.clean_up()
