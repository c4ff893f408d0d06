"""A page of docs/recipes in the hands of its reader, who saves the files and types the commands.

A code block with a name is part of the recipe: a file, or commands (`register`, `run`). Ports are
changed to free ones.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes import ROOT, BrokerProcess, environment, free_port, listens, open_log
from tests.support.secrecy import secret
from tests.support.waiting import until

FOLDER = ROOT / "docs/recipes"
_BLOCK = re.compile(r"(?ms)^```\S*[ ]?(?P<name>\S*)\n(?P<code>.*?)^```$")


@dataclass(frozen=True)
class Block:
    name: str
    code: str


def blocks(page: str) -> list[Block]:
    """All code blocks of a page, in order."""
    text = (FOLDER / page).read_text()
    return [Block(**found.groupdict()) for found in _BLOCK.finditer(text)]


class Reader:
    """Somebody who follows a page in a folder of their own.

    `installed` is the bin folder of the environment that they have prepared, and `changes` maps
    printed text to what they write instead.
    """

    def __init__(
        self,
        page: str,
        broker: BrokerProcess,
        folder: Path,
        *,
        installed: Path = ROOT / ".venv/bin",
        port: int | None = None,
        changes: Mapping[str, str] | None = None,
    ) -> None:
        self.page = page
        self.folder = folder
        self.port = port or free_port()
        self.environment = environment(data_dir=str(broker.data_dir))
        self.environment["PATH"] = f"{installed}:{ROOT / '.venv/bin'}:{os.environ['PATH']}"
        self.environment["PYTHONPATH"] = str(ROOT / "sdk/python/src")
        self._save({"8080": str(broker.port), "3000": str(self.port), **(changes or {})})

    def _save(self, changes: Mapping[str, str]) -> None:
        for block in blocks(self.page):
            code = block.code
            for printed, meant in changes.items():
                code = code.replace(printed, meant)
            if block.name:
                (self.folder / block.name).write_text(code)

    def register(self) -> None:
        """Types `register`, in the shell for all that follows."""
        exported = self.type(". ./register && env -0")
        self.environment |= dict(line.split("=", 1) for line in exported.split("\0")[:-1])
        secret(self.environment["BROKER_API_KEY"])
        secret(self.environment["BROKER_WEBHOOK_SECRET"])

    def type(self, commands: str, **variables: str) -> str:
        """Types commands, which must succeed; what they print."""
        with open_log(self.page) as log:
            done = subprocess.run(
                ["bash", "-euc", commands],  # noqa: S607
                cwd=self.folder,
                env={**self.environment, **variables},
                stdout=subprocess.PIPE,
                stderr=log,
                timeout=60,
                check=False,
            )
        assert done.returncode == 0, f"a command of {self.page} failed, see {log.name}"
        return done.stdout.decode()

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Types `run`, and waits until the server listens."""
        with open_log(self.page) as log:
            server = subprocess.Popen(
                ["bash", "-euc", f"exec {(self.folder / 'run').read_text()}"],  # noqa: S607
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        try:
            until(lambda: listens(self.port) or server.poll() is not None)
            assert server.poll() is None, f"the server of {self.page} ended, see {log.name}"
            yield server
        finally:
            end(server)


def end(server: subprocess.Popen[bytes], number: signal.Signals = signal.SIGTERM) -> None:
    if server.poll() is None:
        server.send_signal(number)
        server.wait(30)
