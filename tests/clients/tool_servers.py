"""Tool servers as processes of their own, which live on when the broker does not."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from tests.clients.drivers import FASTMCP_PYTHON, HERE
from tests.support.processes import (
    ROOT,
    BrokerProcess,
    environment,
    free_port,
    listens,
    open_log,
)
from tests.support.secrecy import secret
from tests.support.waiting import until


@asynccontextmanager
async def demo_tools(broker: BrokerProcess, name: str) -> AsyncIterator[None]:
    """The demo's tools, registered under a name, for clients with a credential only."""
    port = free_port()
    shown = json.loads(await broker.run(f"backend add {name} --mcp-url {url_of(port)} --json"))
    settings = {
        "BROKER_URL": broker.url,
        "BROKER_BACKEND": name,
        "BROKER_API_KEY": secret(shown["apiKey"]),
        "BROKER_WEBHOOK_SECRET": secret(shown["webhookSecret"]),
    }
    uvicorn = [sys.executable, "-m", "uvicorn", "demo.fixtures:app", "--port", str(port)]
    with _serving(uvicorn, port, settings):
        yield


@contextmanager
def fastmcp_tools() -> Iterator[str]:
    """A server that keeps its tasks itself; its URL."""
    port = free_port()
    with _serving([FASTMCP_PYTHON, HERE / "fastmcp/tool_server.py", str(port)], port, {}):
        yield url_of(port)


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}/mcp"


@contextmanager
def _serving(command: Sequence[Path | str], port: int, settings: dict[str, str]) -> Iterator[None]:
    with (
        open_log("tool-servers") as log,
        subprocess.Popen(
            command, cwd=ROOT, env=environment() | settings, stdout=log, stderr=log
        ) as process,
    ):
        try:
            until(lambda: listens(port) or process.poll() is not None)
            assert process.poll() is None, f"the tool server ended, see {log.name}"
            yield
        finally:
            process.terminate()
