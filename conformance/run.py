"""The official MCP conformance suite against the gateway; `make conformance` installs and runs it.

Without --url it starts `taskbroker serve --demo` in a folder of its own and tests `/mcp/demo`,
where the demo tool server offers the fixture tools that the suite calls. The suite takes no
credential, so a server given by --url must admit anonymous callers.

A scenario passes when at least one of its checks passed and none failed. Warnings (SHOULD) are
shown and do not count. The last line says how many scenarios passed and failed; exit code 1 if
any failed.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
NODE = ROOT / ".venv-conformance/bin/node"
SUITE = ROOT / "conformance/node_modules/@modelcontextprotocol/conformance/dist/index.js"
START_SECONDS = 60.0
SCENARIO_SECONDS = 60
DISCOVER_HEADERS = {
    "accept": "application/json, text/event-stream",
    "mcp-protocol-version": "2026-07-28",
    "mcp-method": "server/discover",
}
DISCOVER = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "server/discover",
    "params": {
        "_meta": {
            "io.modelcontextprotocol/protocolVersion": "2026-07-28",
            "io.modelcontextprotocol/clientCapabilities": {},
        }
    },
}


@dataclass(frozen=True)
class Scenario:
    name: str
    without_checks: bool = False
    """The suite knows the scenario and skips all of it."""


SCENARIOS = (
    # the tasks extension
    Scenario("tasks-lifecycle"),
    Scenario("tasks-capability-negotiation"),
    Scenario("tasks-wire-fields"),
    Scenario("tasks-request-state-removal"),
    Scenario("tasks-mrtr-input"),
    Scenario("tasks-request-headers"),
    Scenario("tasks-dispatch-and-envelope"),
    Scenario("tasks-required-task-error"),
    Scenario("tasks-mrtr-composition"),
    Scenario("tasks-status-notifications", without_checks=True),
    # the transport of 2026-07-28
    Scenario("http-header-validation"),
    Scenario("dns-rebinding-protection"),
    Scenario("server-stateless"),
    # 2025-11-25
    Scenario("server-initialize"),
    Scenario("ping"),
    Scenario("tools-list"),
)


class ConformanceError(Exception):
    """The suite cannot be run."""


# --- One scenario ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    scenario: Scenario
    checks: list[dict[str, Any]]
    """What the suite wrote: `id`, `status`, `description`, and perhaps `errorMessage`."""
    seconds: float
    trouble: str | None = None
    """Why the scenario failed beside its checks."""

    def count(self, status: str) -> int:
        return sum(check["status"] == status for check in self.checks)

    @property
    def verdict(self) -> str:
        if self.trouble or self.count("FAILURE"):
            return "failed"
        return "passed" if self.count("SUCCESS") else "skipped"


def run_scenario(scenario: Scenario, url: str, folder: Path) -> Outcome:
    """Runs one scenario; whatever happens is an outcome."""
    command: list[str | Path] = [NODE, SUITE, "server", "--url", url, "--scenario", scenario.name]
    command += ["--output-dir", folder, "--timeout", str(SCENARIO_SECONDS * 1000)]
    started = time.monotonic()
    try:
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, timeout=SCENARIO_SECONDS + 15
        )
    except subprocess.TimeoutExpired:
        return Outcome(scenario, [], time.monotonic() - started, "the suite did not end")
    seconds = time.monotonic() - started
    written = list(folder.glob(f"server-{scenario.name}-*/checks.json"))
    if len(written) != 1:
        said = tail(done.stdout + done.stderr)
        return Outcome(scenario, [], seconds, f"the suite wrote no checks:\n{said}")
    checks = json.loads(written[0].read_text())
    return Outcome(scenario, checks, seconds, beside_the_checks(scenario, checks, done.returncode))


def beside_the_checks(
    scenario: Scenario, checks: list[dict[str, Any]], exit_code: int
) -> str | None:
    statuses = {check["status"] for check in checks}
    if exit_code and "FAILURE" not in statuses:
        return f"the suite ended with code {exit_code}"
    if not statuses & {"SUCCESS", "FAILURE"} and not scenario.without_checks:
        return "no check was made"
    return None


def tail(text: str) -> str:
    return "\n".join(text.splitlines()[-15:])


# --- The broker with its demo tool server ------------------------------------------------------


@contextmanager
def demo_gateway() -> Iterator[str]:
    """A broker with nothing of this shell or folder in it; the URL of its demo backend."""
    with tempfile.TemporaryDirectory(prefix="taskbroker-conformance-") as name:
        folder = Path(name)
        folder.chmod(0o711)  # root's Postgres runs as another user, who must get through
        port = free_port()
        log = folder / "broker.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "app", "serve", "--demo", "--port", str(port)],
                cwd=folder,
                env=surroundings(folder),
                stdout=output,
                stderr=output,
            )
        try:
            wait_until_answering(process, port, log)
            yield f"http://127.0.0.1:{port}/mcp/demo"
        finally:
            end(process)


def surroundings(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if "TASKBROKER_" not in name.upper()}
    return kept | {"TASKBROKER_DATA_DIR": str(folder / "data"), "PYTHONPATH": str(ROOT)}


def wait_until_answering(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if answers(f"http://127.0.0.1:{port}"):
            return
        time.sleep(0.1)
    raise ConformanceError(
        f"`taskbroker serve --demo` did not come to answer:\n{tail(log.read_text())}"
    )


def answers(broker: str) -> bool:
    """Whether the broker is ready, and the demo tool server behind it."""
    try:
        if not httpx.get(f"{broker}/readyz").is_success:
            return False
        return httpx.post(f"{broker}/mcp/demo", json=DISCOVER, headers=DISCOVER_HEADERS).is_success
    except httpx.TransportError:
        return False


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# --- What is shown -----------------------------------------------------------------------------

COLUMNS = ("SUCCESS", "FAILURE", "WARNING", "SKIPPED")


def show_head(url: str) -> None:
    print(f"{url}\n")
    print(f"{'scenario':<30}{'passed':>8}{'failed':>8}{'warned':>8}{'skipped':>8}{'s':>7}")


def show_row(outcome: Outcome) -> None:
    counts = "".join(f"{outcome.count(status):>8}" for status in COLUMNS)
    remark = "" if outcome.verdict == "passed" else f"  {outcome.verdict}"
    print(f"{outcome.scenario.name:<30}{counts}{outcome.seconds:>7.1f}{remark}", flush=True)


def show_remarks(outcome: Outcome) -> None:
    """Everything that did not simply pass, with the suite's own words."""
    remarkable = [check for check in outcome.checks if check["status"] in COLUMNS[1:]]
    if not remarkable and outcome.trouble is None:
        return
    print(f"\n{outcome.scenario.name}")
    if outcome.trouble is not None:
        print(indented(outcome.trouble))
    for check in remarkable:
        print(indented(f"{check['status']} {check['id']}: {check['description']}"))
        if message := check.get("errorMessage"):
            print(indented(message, by=4))
        if check["status"] == "FAILURE" and (details := check.get("details")):
            print(indented(json.dumps(details, ensure_ascii=False), by=4))


def indented(text: str, by: int = 2) -> str:
    return "\n".join(" " * by + line for line in text.splitlines())


# --- The run -----------------------------------------------------------------------------------


class Options(argparse.Namespace):
    url: str | None
    only: list[str]
    list: bool


def options_of_the_command_line() -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="test this MCP endpoint instead of a broker of its own")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=[scenario.name for scenario in SCENARIOS],
        metavar="NAME",
        help="run this scenario; may be given several times",
    )
    parser.add_argument("--list", action="store_true", help="print the scenarios and run nothing")
    return parser.parse_args(namespace=Options())


def run(scenarios: list[Scenario], given_url: str | None) -> list[Outcome]:
    if not (NODE.exists() and SUITE.exists()):
        raise ConformanceError("the suite is not installed: run `make conformance`")
    server = demo_gateway() if given_url is None else nullcontext(given_url)
    outcomes = []
    with server as url, tempfile.TemporaryDirectory(prefix="conformance-checks-") as folder:
        show_head(url)
        for scenario in scenarios:
            outcomes.append(run_scenario(scenario, url, Path(folder)))
            show_row(outcomes[-1])
    return outcomes


def main() -> int:
    options = options_of_the_command_line()
    chosen = [one for one in SCENARIOS if not options.only or one.name in options.only]
    if options.list:
        print("\n".join(scenario.name for scenario in chosen))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        outcomes = run(chosen, options.url)
    except KeyboardInterrupt:
        return 130
    except ConformanceError as problem:
        print(problem, file=sys.stderr)
        return 1
    for outcome in outcomes:
        show_remarks(outcome)
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    print(f"\n{verdicts['passed']} passed, {verdicts['failed']} failed")
    return 1 if verdicts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
