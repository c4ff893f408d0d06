"""A tool server with one slow tool, which keeps its tasks in Task Broker.

The tool reads the text files of a folder, checksums each of them and counts their words. That
takes a while, so every call becomes a task: created with one HTTP request, reported with signed
webhooks, stopped when the broker says that the client has lost interest.

A call arrives as one line of JSON on standard input, together with the `Authorization` header
of the client that made it; its answer leaves as one line on standard output. (A tool server that
speaks MCP gets both from `tools/call`, and answers with `createTaskResult` as it is.)
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

Json = dict[str, Any]

REPOSITORY = Path(__file__).resolve().parents[1]
SECONDS_TO_WATCH = 8.0
SECONDS_BETWEEN_REPORTS = 0.4
WORDS_TO_REPORT = 1_000
RETRY_AFTER = (0.2, 0.5, 1.0, 2.0, 5.0)


# --- The broker, seen from a tool server -------------------------------------------------------


@dataclass(frozen=True)
class Broker:
    http: httpx.AsyncClient
    backend: str
    api_key: str
    webhook_secret: str

    async def create_task(self, owner: Json, **task: Any) -> Json:
        return await self.call("POST", "/v1/tasks", {"owner": owner, **task})

    async def read_task(self, ref: str) -> Json:
        return await self.call("GET", f"/v1/tasks/{ref}")

    async def call(self, method: str, path: str, body: Json | None = None) -> Json:
        headers = {"authorization": f"Bearer {self.api_key}"}
        return reply_of(await self.http.request(method, path, json=body, headers=headers))

    async def send_event(self, data: Json) -> Json:
        """Delivers one webhook. Retries carry the same id, so that it is applied only once."""
        event = {"type": "task.updated", "timestamp": now(), "data": data}
        body = json.dumps(event).encode()
        event_id = f"msg_{uuid.uuid4().hex}"
        for pause in (*RETRY_AFTER, None):
            try:
                answer = await self.post_signed(event_id, body)
                if answer.status_code < 500 or pause is None:
                    return reply_of(answer)
            except httpx.TransportError:
                if pause is None:
                    raise
            await asyncio.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    async def post_signed(self, event_id: str, body: bytes) -> httpx.Response:
        """Standard Webhooks: sign exactly the bytes that are sent."""
        timestamp = str(int(time.time()))
        key = base64.b64decode(self.webhook_secret.removeprefix("whsec_"))
        signed = b".".join((event_id.encode(), timestamp.encode(), body))
        signature = base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode()
        headers = {
            "content-type": "application/json",
            "webhook-id": event_id,
            "webhook-timestamp": timestamp,
            "webhook-signature": f"v1,{signature}",
        }
        path = f"/v1/webhooks/{self.backend}"
        return await self.http.post(path, content=body, headers=headers)


def reply_of(answer: httpx.Response) -> Json:
    reply: Json = answer.raise_for_status().json()
    return reply


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class CancelledByClient(Exception):
    """The client asked for the task to be cancelled."""


@dataclass(frozen=True)
class Task:
    broker: Broker
    ref: str

    async def report(self, **event: Any) -> Json:
        return await self.broker.send_event({"taskRef": self.ref, **event})

    async def progress(self, message: str) -> None:
        heed(await self.report(statusMessage=message))

    async def ask(self, key: str, message: str, schema: Json) -> Json:
        """Asks the client one question and waits for what it says."""
        question = {
            "method": "elicitation/create",
            "params": {"mode": "form", "message": message, "requestedSchema": schema},
        }
        state = await self.report(
            status="input_required", statusMessage=message, inputRequests={key: question}
        )
        while key not in heed(state)["inputResponses"]:
            await asyncio.sleep(SECONDS_BETWEEN_REPORTS)
            state = await self.broker.read_task(self.ref)
        answer: Json = state["inputResponses"][key]
        return answer

    async def run(self, work: Callable[[Task], Awaitable[Json]]) -> None:
        """Does the work and reports how it ended."""
        try:
            await self.report(status="completed", statusMessage="done", result=await work(self))
        except CancelledByClient:
            await self.report(status="cancelled", statusMessage="stopped, as the client asked")
        except Exception as problem:  # noqa: BLE001 - whatever it was, the client must hear of it
            error = {"code": -32603, "message": f"{type(problem).__name__} in the tool server"}
            with suppress(httpx.HTTPError):
                await self.report(status="failed", error=error)


def heed(state: Json) -> Json:
    if state["cancelRequested"]:
        raise CancelledByClient
    return state


# --- The tool ----------------------------------------------------------------------------------


@dataclass
class Index:
    checksums: dict[str, str] = field(default_factory=dict)
    files_with: Counter[str] = field(default_factory=Counter)
    words: int = 0

    def add(self, name: str, content: bytes) -> None:
        self.checksums[name] = hashlib.sha256(content).hexdigest()
        found = re.findall(r"\b[^\W\d_]{3,}\b", content.decode().lower().replace("_", " "))
        self.files_with.update(sorted(set(found)))
        self.words += len(found)

    def as_tool_result(self) -> Json:
        common = ", ".join(f"{word} ({n})" for word, n in self.files_with.most_common(6))
        summary = (
            f"{len(self.checksums):,} files, {self.words:,} words, "
            f"{len(self.files_with):,} of them different; in most files: {common}."
        )
        sums = "".join(f"{digest}  {name}\n" for name, digest in self.checksums.items())
        words = json.dumps(dict(self.files_with.most_common(WORDS_TO_REPORT)), ensure_ascii=False)
        return {
            "content": [
                {"type": "text", "text": summary},
                attachment("index:/SHA256SUMS", "text/plain", sums),
                attachment("index:/words.json", "application/json", words),
            ]
        }


def attachment(uri: str, mime_type: str, text: str) -> Json:
    return {"type": "resource", "resource": {"uri": uri, "mimeType": mime_type, "text": text}}


async def index_folder(task: Task, folder: Path, ask: bool) -> Json:
    files = list(text_files(folder))
    if ask:
        files = await narrow(task, files)
    index = Index()
    last_report = 0.0
    for number, path in enumerate(files, start=1):
        index.add(path.relative_to(folder).as_posix(), path.read_bytes())
        if time.monotonic() - last_report > SECONDS_BETWEEN_REPORTS:
            await task.progress(f"{number} of {len(files)} files")
            last_report = time.monotonic()
        await asyncio.sleep(SECONDS_TO_WATCH / len(files))
    return index.as_tool_result()


async def narrow(task: Task, files: list[Path]) -> list[Path]:
    """Lets the client choose which kind of file to index."""
    kinds = Counter(path.suffix for path in files if path.suffix)
    choices = [kind for kind, _ in kinds.most_common(5)]
    schema = {
        "type": "object",
        "properties": {"extension": {"type": "string", "title": "Extension", "enum": choices}},
        "required": ["extension"],
    }
    answer = await task.ask("extension", "Which files shall I index?", schema)
    if answer["action"] != "accept":
        raise CancelledByClient
    return [path for path in files if path.suffix == answer["content"]["extension"]]


def text_files(folder: Path) -> Iterator[Path]:
    for path in tracked_files(folder) or visible_files(folder):
        try:
            path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        yield path


def tracked_files(folder: Path) -> list[Path]:
    git = ["git", "-C", str(folder), "ls-files", "-z"]
    try:
        listing = subprocess.run(git, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return []
    return [folder / name for name in listing.split("\0") if name]


def visible_files(folder: Path) -> list[Path]:
    hidden = re.compile(r"^\.|^node_modules$|^__pycache__$")
    found = (path.relative_to(folder) for path in sorted(folder.rglob("*")) if path.is_file())
    return [folder / path for path in found if not any(map(hidden.search, path.parts))]


# --- The server --------------------------------------------------------------------------------


async def answer_call(broker: Broker, call: Json, running: asyncio.TaskGroup) -> Json:
    arguments = call.get("arguments", {})
    folder = Path(arguments.get("folder", REPOSITORY))
    created = await broker.create_task(
        {"authorization": call["authorization"]},
        tool="index_folder",
        pollIntervalMs=500,
        statusMessage="looking for files",
    )
    task = Task(broker, created["taskRef"])
    running.create_task(
        task.run(lambda task: index_folder(task, folder, ask=arguments.get("ask", False)))
    )
    return created


async def serve() -> None:
    url = os.environ["BROKER_URL"]
    async with httpx.AsyncClient(base_url=url, timeout=10) as http, asyncio.TaskGroup() as running:
        broker = Broker(
            http,
            backend=os.environ["BROKER_BACKEND"],
            api_key=os.environ["BROKER_API_KEY"],
            webhook_secret=os.environ["BROKER_WEBHOOK_SECRET"],
        )
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await answer_call(broker, json.loads(line), running)), flush=True)


if __name__ == "__main__":
    asyncio.run(serve())
