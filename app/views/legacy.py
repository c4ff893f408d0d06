"""A task as MCP 2025-11-25 shows it."""

import json
from collections.abc import Sequence
from typing import Any

from app import __version__, rawjson
from app.domain.clock import iso
from app.domain.tasks import InputRequest, JsonText, Status, Task

VERSION = "2025-11-25"
WITHOUT_TASKS = ("2025-06-18", "2025-03-26")
VERSIONS = (VERSION, *WITHOUT_TASKS)
"""Newest first. The later two have no tasks."""

SERVER_INFO = {"name": "task-broker", "version": __version__}
INSTRUCTIONS = (
    "Poll a task with tasks/get, wait for its result with tasks/result, end it with tasks/cancel. "
    "The id of a task works only with the credential that created it."
)
_RELATED = "io.modelcontextprotocol/related-task"
_LONGEST_REASON = 500
_ASKS = json.dumps("Waiting for input: call tasks/result, and accept text/event-stream")
_NO_REASON = "The tool reported an error; tasks/result has it"


def create_task_result(task: Task, task_id: str) -> JsonText:
    """What a tool server returns from a `tools/call` with `task`: the task, nested."""
    return f'{{"task":{task_object(task, task_id)}}}'


def task_object(task: Task, task_id: str) -> JsonText:
    """The result of `tasks/get` and `tasks/cancel`, and an item of `tasks/list`."""
    status_message = _status_message(task)
    message = "" if status_message is None else f',"statusMessage":{status_message}'
    interval = "" if task.poll_interval_ms is None else f',"pollInterval":{task.poll_interval_ms}'
    ttl = "null" if task.ttl_ms is None else task.ttl_ms
    return (
        f'{{"taskId":"{task_id}","status":"{status(task)}"{message},'
        f'"createdAt":"{iso(task.created_at)}","lastUpdatedAt":"{iso(task.updated_at)}",'
        f'"ttl":{ttl}{interval}}}'
    )


def task_list(tasks: Sequence[JsonText], next_cursor: str | None) -> JsonText:
    """The result of `tasks/list`."""
    following = "" if next_cursor is None else f',"nextCursor":{json.dumps(next_cursor)}'
    return f'{{"tasks":[{",".join(tasks)}]{following}}}'


def initialized(version: str, *, listable: bool) -> JsonText:
    """The result of `initialize` on the broker's own endpoint, which has no tools."""
    tasks: dict[str, Any] = {"cancel": {}, **({"list": {}} if listable else {})}
    result = {
        "protocolVersion": version,
        "capabilities": {"tasks": tasks} if version == VERSION else {},
        "serverInfo": SERVER_INFO,
        "instructions": INSTRUCTIONS,
    }
    return json.dumps(result, separators=(",", ":"))


def capability(*, listable: bool) -> dict[str, Any]:
    """`capabilities.tasks` of a tool server whose tasks are read here."""
    return {
        **({"list": {}} if listable else {}),
        "cancel": {},
        "requests": {"tools": {"call": {}}},
    }


def call_result(result: JsonText, task_id: str) -> JsonText:
    """The result of `tasks/result`: what the call would have returned, and whose it is."""
    return _related(result, task_id)


def question(question: InputRequest, task_id: str) -> tuple[str, JsonText]:
    """The method of a question to the client and its params, with whose task it is about."""
    request = dict(rawjson.members(question.request))
    return str(json.loads(request["method"])), _related(request.get("params", "{}"), task_id)


def refused(question: InputRequest) -> JsonText | None:
    """What a client that answers a question with an error has answered, if that can be said."""
    asks_user = dict(rawjson.members(question.request))["method"] == '"elicitation/create"'
    return '{"action":"cancel"}' if asks_user else None


def _related(text: JsonText, task_id: str) -> JsonText:
    """An object with the related-task member in its `_meta`; its other members as they are."""
    related = f'"{_RELATED}":{{"taskId":"{task_id}"}}'
    given = list(rawjson.members(text))
    meta = dict(given).get("_meta")
    if meta is None:
        return _with_member(text, f'"_meta":{{{related}}}', any_others=bool(given))
    kept = list(rawjson.members(meta)) if meta.startswith("{") else []
    inner = [f"{json.dumps(name)}:{raw}" for name, raw in kept if name != _RELATED]
    outer = [f"{json.dumps(name)}:{raw}" for name, raw in given if name != "_meta"]
    merged = f'"_meta":{{{",".join([*inner, related])}}}'
    return f"{{{','.join([*outer, merged])}}}"


def _with_member(text: JsonText, member: str, *, any_others: bool) -> JsonText:
    opened = text.index("{") + 1
    return f"{text[:opened]}{member}{',' if any_others else ''}{text[opened:]}"


def status(task: Task) -> Status:
    # In this era a tool that ran and reports failure is a failed task.
    return Status.FAILED if task.result_is_error else task.status


def _status_message(task: Task) -> JsonText | None:
    """Clients of this era may show nothing but this of a task that failed."""
    if task.status_message is not None:
        return task.status_message
    if task.status is Status.INPUT_REQUIRED:
        return _ASKS
    if not task.result_is_error:
        return None
    return json.dumps(_NO_REASON if task.result is None else _reason(task.result))


def _reason(result: JsonText) -> str:
    """The first text of a tool's result."""
    content = dict(rawjson.members(result)).get("content", "")
    try:
        blocks = json.loads(content, parse_int=str)  # of any length
    except (ValueError, RecursionError):
        blocks = []
    for block in blocks if isinstance(blocks, list) else []:
        text = block.get("text") if isinstance(block, dict) else None
        if isinstance(text, str) and text.strip():
            return text[:_LONGEST_REASON]
    return _NO_REASON
