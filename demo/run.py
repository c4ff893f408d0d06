"""The demonstration behind `make demo`: one broker, one tool server, one MCP client.

Three processes that have nothing in common but the wire: the broker with a Postgres of its own,
a tool server that keeps its tasks there (`tool_server.py`), and a published MCP client library
in its own environment (`client.py`). Exit code 0 if every act ended as it should.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "demo"
LOCK = ROOT / "requirements" / "demo.txt"
CLIENT_ENVIRONMENT = ROOT / ".venv-demo"
CLIENT_PYTHON = CLIENT_ENVIRONMENT / "bin" / "python"
BACKEND = "demo"
START_SECONDS = 60.0

console = Console(highlight=False)


class DemoError(Exception):
    """The demonstration cannot go on."""


@dataclass(frozen=True)
class Act:
    name: str
    title: str
    arguments: dict[str, Any]


ACTS = (
    Act("watch", "A slow tool, watched to its result", {}),
    Act("cancel", "The same, cancelled on the way", {}),
    Act("answer", "A tool that asks before it goes on", {"ask": True}),
)


# --- The client's environment ------------------------------------------------------------------


def prepare_client() -> None:
    """Installs the client library, unless exactly this lock file is installed already."""
    installed = CLIENT_ENVIRONMENT / "installed.txt"
    if installed.exists() and installed.read_bytes() == LOCK.read_bytes():
        return
    with console.status("preparing the MCP client's own environment (once)"):
        venv.create(CLIENT_ENVIRONMENT, clear=True, with_pip=True)
        install = ("-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps")
        done = output_of(CLIENT_PYTHON, *install, "-r", LOCK)
    if done.returncode:
        raise DemoError(f"the MCP client could not be installed:\n{tail(done.stderr)}")
    installed.write_bytes(LOCK.read_bytes())


def output_of(*command: Path | str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, **options)


def tail(text: str) -> str:
    return "\n".join(text.splitlines()[-15:])


# --- The three processes -----------------------------------------------------------------------


@contextmanager
def running(*command: Path | str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """A child that Ctrl-C does not reach: it ends when we end it."""
    process = subprocess.Popen(command, text=True, process_group=0, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class Broker:
    """`python -m app`, away from whatever is configured in this shell or folder."""

    folder: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "broker.log"

    def command(self, *arguments: str) -> tuple[str, ...]:
        return (sys.executable, "-m", "app", *arguments)

    def surroundings(self) -> dict[str, Any]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("TASKBROKER_")}
        own = {"TASKBROKER_DATA_DIR": str(self.folder / "data"), "PYTHONPATH": str(ROOT)}
        return {"env": kept | own, "cwd": self.folder}

    def run(self, *arguments: str) -> dict[str, Any]:
        done = output_of(*self.command(*arguments, "--json"), **self.surroundings())
        if done.returncode:
            raise DemoError(f"`taskbroker {' '.join(arguments)}` failed:\n{tail(done.stderr)}")
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    @contextmanager
    def serving(self) -> Iterator[None]:
        serve = self.command("serve", "--port", str(self.port))
        with (
            self.log.open("w") as log,
            running(*serve, stdout=log, stderr=log, **self.surroundings()) as process,
        ):
            with console.status("starting the broker and its Postgres"):
                self.wait_until_ready(process)
            yield

    def wait_until_ready(self, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            try:
                if httpx.get(f"{self.url}/readyz").is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise DemoError("the broker did not start")


@dataclass(frozen=True)
class ToolServer:
    process: subprocess.Popen[str]

    def call(self, arguments: dict[str, Any], token: str) -> dict[str, Any]:
        """Stands in for `tools/call`."""
        assert self.process.stdin
        assert self.process.stdout
        call = {"authorization": f"Bearer {token}", "arguments": arguments}
        self.process.stdin.write(json.dumps(call) + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise DemoError("the tool server has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def tool_server(broker: Broker) -> Iterator[ToolServer]:
    registered = broker.run("backend", "add", BACKEND)
    settings = {
        "BROKER_URL": broker.url,
        "BROKER_BACKEND": registered["name"],
        "BROKER_API_KEY": registered["apiKey"],
        "BROKER_WEBHOOK_SECRET": registered["webhookSecret"],
    }
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = (sys.executable, DEMO / "tool_server.py")
    with running(*command, env=os.environ | settings, **pipes) as process:
        yield ToolServer(process)


def play(act: Act, broker: Broker, tools: ToolServer, token: str) -> bool:
    """The client is started first, so that it is there when the task is."""
    with running(CLIENT_PYTHON, DEMO / "client.py", stdin=subprocess.PIPE) as client:
        called = tools.call(act.arguments, token)
        created = called["createTaskResult"]
        console.print(
            f"  task {called['taskRef']} created, kept for {created['ttlMs'] // 60_000} min"
        )
        ticket = {"act": act.name, "url": f"{broker.url}/mcp", "token": token, "created": created}
        client.communicate(json.dumps(ticket))
        return client.returncode == 0


# --- The play ----------------------------------------------------------------------------------


def demonstrate(broker: Broker) -> bool:
    with broker.serving(), tool_server(broker) as tools:
        console.print(f"Broker on {broker.url}, tool server `{BACKEND}`, MCP client: fastmcp")
        token = secrets.token_urlsafe(32)
        ended_well = True
        for number, act in enumerate(ACTS, start=1):
            console.print(f"\n[bold]{number}. {act.title}[/bold]")
            if not play(act, broker, tools, token):
                console.print("  [red]did not end as it should[/red]")
                ended_well = False
    return ended_well


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="taskbroker-demo-") as folder:
        Path(folder).chmod(0o711)  # root's Postgres runs as another user, who must get through
        broker = Broker(Path(folder), free_port())
        try:
            prepare_client()
            if demonstrate(broker):
                console.print("\nAll three ended as they should.")
                return 0
        except KeyboardInterrupt:
            return 130
        except DemoError as problem:
            console.print(str(problem), style="red", markup=False, soft_wrap=True)
        finally:
            console.show_cursor()
        if broker.log.exists():
            console.print(f"The broker's last words:\n{tail(broker.log.read_text())}", markup=False)
        return 1


if __name__ == "__main__":
    sys.exit(main())
