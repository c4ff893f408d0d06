"""Reads and events of the real broker, as ratios to a bare ASGI application on the same server.

How to read it: 0.50 means that the broker answers half as many requests a second as an
application that only reads the body and sends a fixed answer of the same size. Ratios compare
runs that took turns; requests a second are a side note, they belong to the machine and the moment.
With `--against` another checkout of the project takes its turns too.
"""

import argparse
import asyncio
import base64
import json
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
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
    requests: Callable[[], Iterator[bytes]]
    answered: str
    """What an answer holds only if the request succeeded."""
    answer_bytes: int
    fresh: bool = False
    """Whether a request is good for one use only."""


@dataclass(frozen=True)
class Measured:
    """One server under one load: medians over the rounds."""

    scenario: str
    connections: int
    server: str
    ratio: float
    rate: float
    errors: int


def scenarios(stored: corpus.Corpus, seconds: int) -> list[Scenario]:
    return [
        Scenario("tasks/get, live", lambda: corpus.gets(stored.live), '"working"', 520),
        Scenario(
            "tasks/get, completed", lambda: corpus.gets(stored.completed), '"completed"', 1_520
        ),
        Scenario(
            "event (progress)",
            lambda: corpus.events(stored.reported, stored.webhook_key, EVENTS_A_SECOND * seconds),
            '"applied":true',
            360,
            fresh=True,
        ),
    ]


def measure(
    scenario: Scenario, ports: dict[str, int], folder: Path, options: Options
) -> Iterator[Measured]:
    """Every server in turn, round after round; "bare" is the one that the others are held to."""
    for connections in options.connections:
        runs: dict[str, list[load.Load]] = {name: [] for name in ports}
        for _ in range(options.rounds):
            for name, port in ports.items():
                file = folder / "requests"
                if not file.exists() or (scenario.fresh and name != "bare"):
                    corpus.write(file, scenario.requests())
                wanted = "x" if name == "bare" else scenario.answered
                with servers.on_cores(generator=True):
                    runs[name].append(load.drive(port, file, wanted, connections, options.seconds))
        for name, done in runs.items():
            yield Measured(
                scenario.name,
                connections,
                name,
                median(one.rate / base.rate for one, base in zip(done, runs["bare"], strict=True)),
                median(one.rate for one in done),
                sum(one.errors for one in done),
            )
    (folder / "requests").unlink()


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
        for scenario in scenarios(stored, options.seconds):
            if options.only in scenario.name:
                with servers.bare(scenario.answer_bytes) as bare:
                    yield from measure(scenario, {"bare": bare, **ports}, folder, options)


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
