"""The real broker beside a reference, as ratios from runs that took turns.

Reads and events are held to a bare ASGI application on the same server, which only reads the body
and sends a fixed answer of the same size; calls through the gateway to the same calls made
directly. 0.50 means half as many requests a second as the reference. Requests a second are a side
note, they belong to the machine and the moment. With `--against` another checkout of the project
takes its turns too.
"""

import argparse
import asyncio
import base64
import json
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from app.db.embedded import EmbeddedPostgres
from app.db.migrations import migrate
from app.main import create_broker
from app.settings import Settings
from benchmarks import corpus, load, servers

LIVE_TASKS = 5_000
COMPLETED_TASKS = 5_000
EVENTS_A_SECOND = 20_000
REFERENCE = "reference"


class Options(argparse.Namespace):
    json: Path | None
    against: list[Path]
    only: str
    connections: list[int]
    rounds: int
    seconds: int


@dataclass(frozen=True)
class Scenario:
    name: str
    reference: Callable[[], AbstractContextManager[int]]
    """Starts what the broker is held to; its port."""
    requests: Callable[[], Iterator[bytes]]
    answered: str
    """What an answer holds only if the request succeeded."""
    direct: Callable[[], Iterator[bytes]] | None = None
    """What the reference is asked where that differs; it is then answered in earnest."""
    fresh: bool = False
    """Whether a request is good for one use only."""

    def asked_of(self, server: str) -> Iterator[bytes]:
        if server == REFERENCE and self.direct is not None:
            return self.direct()
        return self.requests()

    def expected_of(self, server: str) -> str:
        return "x" if server == REFERENCE and self.direct is None else self.answered


@dataclass(frozen=True)
class Measured:
    """One server under one load: medians over the rounds."""

    scenario: str
    connections: int
    server: str
    ratio: float
    rate: float
    errors: int


def scenarios(stored: corpus.Corpus, settings: Settings, seconds: int) -> list[Scenario]:
    return [
        Scenario(
            "tasks/get, live",
            lambda: servers.bare(520),
            lambda: corpus.gets(stored.live),
            '"working"',
        ),
        Scenario(
            "tasks/get, completed",
            lambda: servers.bare(1_520),
            lambda: corpus.gets(stored.completed),
            '"completed"',
        ),
        Scenario(
            "event (progress)",
            lambda: servers.bare(360),
            lambda: corpus.events(stored.reported, stored.webhook_key, EVENTS_A_SECOND * seconds),
            '"applied":true',
            fresh=True,
        ),
        Scenario(
            "gateway to a bare tool server",
            lambda: _behind_the_gateway(settings, "bare", servers.bare(520)),
            lambda: corpus.calls("/mcp/bare"),
            "x" * 500,
            direct=lambda: corpus.calls("/mcp"),
        ),
        Scenario(
            "gateway to the demo tools (greet)",
            lambda: _behind_the_gateway(settings, "demo", servers.demo_tools()),
            lambda: corpus.calls("/mcp/demo"),
            "Hello, bench!",
            direct=lambda: corpus.calls("/mcp"),
        ),
    ]


@contextmanager
def _behind_the_gateway(
    settings: Settings, name: str, tool_server: AbstractContextManager[int]
) -> Iterator[int]:
    """A tool server that is registered with the broker."""
    with tool_server as port:
        asyncio.run(corpus.register(create_broker(settings), name, f"http://127.0.0.1:{port}/mcp"))
        yield port


def measure(
    scenario: Scenario, ports: dict[str, int], folder: Path, options: Options
) -> Iterator[Measured]:
    """Every server in turn, round after round; the reference is what the others are held to."""
    files = {name: folder / f"requests-{name}" for name in ports}
    for connections in options.connections:
        runs: dict[str, list[load.Load]] = {name: [] for name in ports}
        for _ in range(options.rounds):
            for name, port in ports.items():
                file, wanted = files[name], scenario.expected_of(name)
                if not file.exists() or (scenario.fresh and name != REFERENCE):
                    corpus.write(file, scenario.asked_of(name))
                with servers.on_cores(generator=True):
                    runs[name].append(load.drive(port, file, wanted, connections, options.seconds))
        for name, done in runs.items():
            yield Measured(
                scenario.name,
                connections,
                name,
                median(
                    one.rate / base.rate for one, base in zip(done, runs[REFERENCE], strict=True)
                ),
                median(one.rate for one in done),
                sum(one.errors for one in done),
            )
    for file in files.values():
        file.unlink()


def run(options: Options) -> Iterator[Measured]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="taskbroker-bench-")))
        postgres = stack.enter_context(EmbeddedPostgres(folder / "data"))
        asyncio.run(migrate(postgres.url))
        key = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
        settings = Settings.model_validate({"database_url": postgres.url, "secret_keys": (key,)})
        broker = create_broker(settings)
        stored = asyncio.run(corpus.store(broker, settings, LIVE_TASKS, COMPLETED_TASKS))
        ports = {"broker": stack.enter_context(servers.broker(settings))}
        for other in options.against:
            ports[other.name] = stack.enter_context(servers.broker(settings, other))
        for scenario in scenarios(stored, settings, options.seconds):
            if options.only in scenario.name:
                with scenario.reference() as port:
                    yield from measure(scenario, {REFERENCE: port, **ports}, folder, options)


def show(measured: list[Measured]) -> None:
    names = list(dict.fromkeys(one.server for one in measured))
    table = Table("", "connections", *names, "errors", "requests/s", box=None, header_style="bold")
    for scenario, connections in dict.fromkeys((one.scenario, one.connections) for one in measured):
        row = [m for m in measured if (m.scenario, m.connections) == (scenario, connections)]
        table.add_row(
            scenario,
            str(connections),
            *(f"{one.ratio:.2f}" for one in row),
            str(sum(one.errors for one in row)),
            " / ".join(f"{one.rate:,.0f}" for one in row),
        )
    Console().print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    parser.add_argument(
        "--against",
        type=Path,
        nargs="*",
        default=[],
        metavar="DIR",
        help="other checkouts to compare",
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="scenarios with this in the name"
    )
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=1, help="of each run")
    options = parser.parse_args(namespace=Options())
    print(
        f"load by {load.generator()}, {options.rounds} rounds of {options.seconds} s",
        file=sys.stderr,
    )
    measured = list(run(options))
    show(measured)
    if options.json is not None:
        figures = [asdict(one) for one in measured]
        options.json.write_text(json.dumps({"generator": load.generator(), "measured": figures}))
    return 1 if any(one.errors for one in measured) else 0


if __name__ == "__main__":
    sys.exit(main())
