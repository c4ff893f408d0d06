"""An MCP client made of a library that knows nothing of Task Broker: fastmcp, as published.

It runs in an environment of its own (`requirements/demo.txt`), is handed one task that was
created for it, follows the task to its end, answers what it asks, and cancels it when told to.

Standard input, one JSON object: `url` and `token` of the MCP endpoint, `created` (what
`tools/call` answered) and `act`: "watch", "cancel" or "answer". The id of a task is a secret:
it arrives on standard input and is never shown. Exit code 0 if the task ended as it should.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time
from typing import Any, Self

from fastmcp import Client
from fastmcp_tasks import ToolTask
from fastmcp_tasks.client_models import ClientCreateTaskResult, ClientGetTaskResult
from mcp_types import ContentBlock, EmbeddedResource, TextContent
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

ENDING = {"watch": "completed", "cancel": "cancelled", "answer": "completed"}
CANCEL_AT = 0.35
PATIENCE_SECONDS = 60.0
SECONDS_BETWEEN_LOOKS = 0.25


class Display:
    """A live bar on a terminal, a line every other second elsewhere."""

    def __init__(self) -> None:
        self.console = Console(highlight=False)
        self.bar = Progress(
            TextColumn(" "),
            SpinnerColumn(finished_text="•"),
            TextColumn("{task.description:<14}"),
            BarColumn(bar_width=30),
            TextColumn("{task.fields[message]:<30}"),
            TimeElapsedColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self.row = self.bar.add_task("connecting", total=1.0, message="")
        self.last_line = (0.0, "")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.bar.stop()

    def show(self, task: ClientGetTaskResult) -> None:
        message = task.status_message or ""
        self.bar.update(self.row, description=task.status, message=message, completed=share(task))
        when, status = self.last_line
        if self.bar.disable and (status != task.status or time.monotonic() - when > 2):
            self.say(f"{task.status:<14} {message}")
            self.last_line = (time.monotonic(), task.status)

    def say(self, text: str) -> None:
        self.console.print(f"  {text}", markup=False, soft_wrap=True)


def share(task: ClientGetTaskResult) -> float | None:
    """How much is done, where the tool server's words tell it."""
    if task.status == "completed":
        return 1.0
    counted = re.match(r"(\d+) of (\d+)", task.status_message or "")
    return int(counted[1]) / int(counted[2]) if counted else None


def describe(block: ContentBlock) -> str:
    match block:
        case TextContent(text=text):
            return text
        case EmbeddedResource(resource=resource):
            return f"attached: {resource.uri}"
    return f"attached: {block.type}"


async def play(act: str, url: str, token: str, created: dict[str, Any]) -> bool:
    questions: list[str] = []

    async def answer(message: str, _type: Any, params: Any, _context: Any) -> dict[str, Any]:
        """What a person would be asked in a dialogue; here the first choice is taken."""
        questions.append(message)
        [(field, schema)] = params.requested_schema["properties"].items()
        choice = schema["enum"][0]
        display.say(f"asked:    {message}  ({' '.join(schema['enum'])})")
        display.say(f"answered: {choice}")
        return {field: choice}

    with Display() as display:
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            Client(url, auth=token, elicitation_handler=answer) as client,
            asyncio.TaskGroup() as group,
        ):
            handle = ClientCreateTaskResult.model_validate(created)
            task = ToolTask(client, "index_folder", handle, raise_on_error=False)
            driving = group.create_task(task.result())
            cancelled = act != "cancel"
            while not driving.done():
                seen = await task.status()
                display.show(seen)
                if not cancelled and (share(seen) or 0.0) > CANCEL_AT:
                    display.say("cancelling: the client is no longer interested")
                    await task.cancel()
                    cancelled = True
                await asyncio.wait([driving], timeout=SECONDS_BETWEEN_LOOKS)
            final = await task.status()
            display.show(final)
    if final.status == "completed":
        for block in driving.result().content:
            display.say(describe(block))
    return final.status == ENDING[act] and bool(questions) == (act == "answer")


def main() -> int:
    ticket = json.load(sys.stdin)
    try:
        return 0 if asyncio.run(play(**ticket)) else 1
    except* Exception as problems:  # noqa: BLE001 - their texts may quote the id of the task
        names = {type(problem).__name__ for problem in problems.exceptions}
        print(f"  the client gave up: {', '.join(names)}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
