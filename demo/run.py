"""The demonstration behind `make demo`: a broker, a tool server and an MCP client.

Three processes that have nothing in common but the wire: `taskbroker serve --demo` is the first
two, and a published client library in its own environment (`client.py`) uses the tools. Exit code
0 if every act ended as it should.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

DEMO = Path(__file__).resolve().parent
CLIENT_PYTHON = DEMO.parent / ".venv-client-fastmcp" / "bin" / "python"
START_SECONDS = 60.0


class DemoError(Exception):
    """The demonstration cannot go on."""


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The URL of a broker with demo tools, away from what is configured in this shell."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TASKBROKER_")}
    own = {"TASKBROKER_DATA_DIR": str(folder / "data"), "PYTHONPATH": str(DEMO.parent)}
    command = [sys.executable, "-m", "app", "serve", "--demo", "--port", str(port)]
    with (
        (folder / "broker.log").open("w") as log,
        subprocess.Popen(
            command,
            cwd=folder,
            env=kept | own,
            stdout=log,
            stderr=log,
            process_group=0,  # Ctrl-C is ours
        ) as process,
    ):
        try:
            wait_until_ready(process, url)
            yield url
        finally:
            process.terminate()


def wait_until_ready(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/readyz").is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise DemoError("The broker did not start.")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def demonstrate(folder: Path) -> None:
    with serving(folder) as url:
        print(f"Broker on {url}, its demo tools on {url}/mcp/demo, MCP client: fastmcp")
        client = subprocess.run([CLIENT_PYTHON, DEMO / "client.py", f"{url}/mcp/demo"], check=False)
    if client.returncode:
        raise DemoError("Not every act ended as it should.")
    print("\nAll three ended as they should.")


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="taskbroker-demo-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # root's Postgres runs as another user, who must get through
        try:
            demonstrate(folder)
        except KeyboardInterrupt:
            return 130
        except DemoError as problem:
            log = (folder / "broker.log").read_text().splitlines()
            print(f"{problem} The broker's last words:", *log[-15:], sep="\n", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
