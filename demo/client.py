"""An MCP client made of a library that knows nothing of Task Broker: fastmcp, as published.

It calls a slow tool three times: watches it to its result, cancels it on the way, and answers
what it asks.

    python client.py URL        exit code 0 if each call ended as it should
"""

from __future__ import annotations

import asyncio
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from fastmcp import Client
from fastmcp_tasks import ToolTask, call_tool_task
from fastmcp_tasks.client_models import ClientGetTaskResult
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

PATIENCE_SECONDS = 60.0
SECONDS_BETWEEN_LOOKS = 0.5

console = Console(highlight=False)


@dataclass(frozen=True)
class Act:
    title: str
    arguments: dict[str, Any] = field(default_factory=dict)
    cancel_at: float = 2.0
    """The share of the work after which the client loses interest; never, over 1."""
    ending: str = "completed"
    questions: int = 0


ACTS = (
    Act("A slow tool, watched to its result"),
    Act("The same, cancelled on the way", cancel_at=0.3, ending="cancelled"),
    Act("The same, asked to ask before it begins", {"ask": True}, questions=1),
)


async def play(act: Act, url: str) -> bool:
    """Whether the act ended as it should."""
    answers: list[str] = []

    async def answer(message: str, _type: Any, params: Any, _context: Any) -> dict[str, str]:
        """What a person would be asked in a dialogue; here the first choice is taken."""
        [(name, schema)] = params.requested_schema["properties"].items()
        answers.append(schema["enum"][0])
        say(f"asked:    {message} ({', '.join(schema['enum'])})")
        say(f"answered: {answers[-1]}")
        return {name: answers[-1]}

    async with Client(url, elicitation_handler=answer) as client:
        status = await call_and_watch(act, client)
    return status == act.ending and len(answers) == act.questions


async def call_and_watch(act: Act, client: Client[Any]) -> str:
    """The status that the task ended in."""
    task = await call_tool_task(client, "index_project", act.arguments, raise_on_error=False)
    driving = asyncio.create_task(task.result())  # answers what the task asks
    final = await watch(task, driving, act.cancel_at)
    result = await driving
    if final.status == "completed":
        say("".join(block.text for block in result.content if block.type == "text"))
    return final.status


async def watch(
    task: ToolTask, driving: asyncio.Task[Any], cancel_at: float
) -> ClientGetTaskResult:
    """Shows how the task goes, until it has ended."""
    cancelled = False
    with Display() as display:
        while True:
            over = driving.done()
            seen = await task.status()
            display.show(seen)
            if over:
                return seen
            if share(seen) > cancel_at and not cancelled:
                say("cancelling: the client is no longer interested")
                await task.cancel()
                cancelled = True
            await asyncio.wait([driving], timeout=SECONDS_BETWEEN_LOOKS)


class Display(Progress):
    """A bar on a terminal, lines elsewhere."""

    def __init__(self) -> None:
        columns = ("{task.description:<14}", BarColumn(30), "{task.fields[message]:<20}")
        super().__init__(
            TextColumn(" "),
            SpinnerColumn(finished_text="•"),
            *columns,
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._bar = self.add_task("", total=1.0, message="")
        self._line = ""

    def show(self, task: ClientGetTaskResult) -> None:
        message = task.status_message or ""
        line = f"{task.status:<14} {message}"
        self.update(self._bar, description=task.status, message=message, completed=share(task))
        if self.disable and line != self._line:
            say(line)
        self._line = line


def share(task: ClientGetTaskResult) -> float:
    """How much is done, as far as the tool server's words tell it."""
    counted = re.match(r"(\d+) of (\d+)", task.status_message or "")
    if task.status == "completed":
        return 1.0
    return int(counted[1]) / int(counted[2]) if counted else 0.0


def say(text: str) -> None:
    console.print(f"  {text}", markup=False, soft_wrap=True)


async def main(url: str) -> int:
    ended_well = True
    for number, act in enumerate(ACTS, start=1):
        console.print(f"\n[bold]{number}. {act.title}[/bold]")
        async with asyncio.timeout(PATIENCE_SECONDS):
            if not await play(act, url):
                say("did not end as it should")
                ended_well = False
    return 0 if ended_well else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1])))
