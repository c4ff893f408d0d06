"""Drivers: small programs that do with an MCP client library what an application does with it.

Each runs in an environment of its own, which `make clients` installs. It reads one ticket from
standard input:

    {"url": "http://…", "token": "…" or null, "acts": {name: act, …}}

plays the acts in their order over one connection, and prints one summary, `{name: outcome, …}`.
The acts:

    call      tool, arguments        as applications call tools; the outcome is the tool's result
    follow    tool, arguments        the call must become a task; followed to its end
    cancel    tool, arguments        the same, and cancelled once it is a task
    leave     tool, arguments, file  the same, and left alone; its id is written to the file
    resume    task                   a task of which only the id is known, followed to its end
    withdraw  task                   the same, cancelled first
    probe     task                   one request of each method about it; the error codes

and of 2026-07-28 only, by EXT_TASKS and MCP

    listen    task, file             a subscription to it, until the stream ends; each status that
                                     is told goes to the file, and questions are answered

whose outcome says how the stream did `end`, and by MCP whether the task was `acknowledged`; and of
2025-11-25 only

    wait      tool, arguments        the call must become a task, whose result is waited for at once
    find      task                   through all `pages` of tasks/list; whether it is `found` there

An outcome has `status`, with `text` and `isError` of the result or with `error`, and in `asked`
the questions that the library put to its user. Users agree to everything and are called Ada.

The Inspector can do neither cancel, leave, wait nor probe, and shows no status of what it follows.
But it has

    tools                            what tools/list says of each tool's execution as a task
"""

import asyncio
import json
import os
from asyncio.subprocess import PIPE
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from app.telemetry import redact
from tests.support.processes import ROOT

HERE = Path(__file__).parent
PATIENCE_SECONDS = 60.0
Act = dict[str, Any]
Outcome = dict[str, Any]


class GaveUp(Exception):
    """The driver could not play its ticket."""


@dataclass(frozen=True)
class Driver:
    name: str
    program: Path | str
    script: Path
    arguments: tuple[str, ...] = ()
    era: Literal["modern", "legacy"] = "modern"

    async def play(
        self, url: str, acts: dict[str, Act], *, token: str | None = None
    ) -> dict[str, Outcome]:
        """The outcome of each act. Raises GaveUp."""
        ticket = {"url": url, "token": token, "acts": acts}
        process = await asyncio.create_subprocess_exec(
            self.program,
            self.script,
            *self.arguments,
            env=_environment(),
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
        )
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                summary, errors = await process.communicate(json.dumps(ticket).encode())
        except TimeoutError:
            process.terminate()
            await process.wait()
            raise
        said = errors.decode() + summary.decode()
        if process.returncode:
            raise GaveUp(redact(said))
        assert redact(said) == said, "the driver has shown a secret"
        outcomes: dict[str, Outcome] = json.loads(summary)
        return outcomes


def _environment() -> dict[str, str]:
    """Without what points to the tests' own Python."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


FASTMCP_PYTHON = ROOT / ".venv-client-fastmcp/bin/python"
FASTMCP = Driver("fastmcp", FASTMCP_PYTHON, HERE / "fastmcp/drive.py")
MCP = Driver("mcp", ROOT / ".venv-client-mcp/bin/python", HERE / "mcp_python/drive.py")
EXT_TASKS = Driver("ext-tasks", "node", HERE / "ext_tasks/drive.mjs")
INSPECTOR = Driver(
    "inspector",
    ROOT / ".venv-conformance/bin/node",  # a newer one than others need
    HERE / "inspector/drive.mjs",
    ("modern",),
)

MCP_1 = Driver(
    "mcp-1",
    ROOT / ".venv-client-mcp-1/bin/python",
    HERE / "mcp_python_old/drive.py",
    era="legacy",
)
SDK_1 = Driver("sdk-1", "node", HERE / "mcp_typescript_old/drive.mjs", era="legacy")


def ext_tasks_of(version: str) -> Driver:
    """The same library when it speaks a version of 2025 only."""
    return replace(EXT_TASKS, name=f"ext-tasks-{version}", arguments=(version,), era="legacy")


EXT_TASKS_LEGACY = ext_tasks_of("2025-11-25")
INSPECTOR_LEGACY = replace(INSPECTOR, name="inspector-legacy", arguments=("legacy",), era="legacy")

MODERN = (EXT_TASKS, FASTMCP, MCP)
LEGACY = (EXT_TASKS_LEGACY, SDK_1, MCP_1)
LISTENERS = (EXT_TASKS, MCP)


def call(tool: str, **arguments: Any) -> Act:
    return {"verb": "call", "tool": tool, "arguments": arguments}


def follow(tool: str, **arguments: Any) -> Act:
    return {"verb": "follow", "tool": tool, "arguments": arguments}


def cancel(tool: str, **arguments: Any) -> Act:
    return {"verb": "cancel", "tool": tool, "arguments": arguments}


def leave(file: Path, tool: str, **arguments: Any) -> Act:
    return {"verb": "leave", "tool": tool, "arguments": arguments, "file": str(file)}


def resume(task: str) -> Act:
    return {"verb": "resume", "task": task}


def withdraw(task: str) -> Act:
    return {"verb": "withdraw", "task": task}


def listen(task: str, file: Path) -> Act:
    return {"verb": "listen", "task": task, "file": str(file)}


def wait(tool: str, **arguments: Any) -> Act:
    return {"verb": "wait", "tool": tool, "arguments": arguments}


def find(task: str) -> Act:
    return {"verb": "find", "task": task}


def probe(task: str) -> Act:
    return {"verb": "probe", "task": task}


TOOLS: Act = {"verb": "tools"}
