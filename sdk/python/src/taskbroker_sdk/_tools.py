"""Small shapes of MCP that tool servers need."""

from collections.abc import Mapping
from typing import Any


def owner_from(headers: Mapping[str, str]) -> dict[str, Any]:
    """The owner of a new task, from the headers of the MCP request that is being answered.

    The broker's gateway adds `Task-Owner`, a signed handle; without it the client's own
    `Authorization` counts, and without that the task has an anonymous owner.
    """
    by_name = {name.lower(): value for name, value in headers.items()}
    if handle := by_name.get("task-owner"):
        return {"handle": handle}
    if credential := by_name.get("authorization"):
        return {"authorization": credential}
    return {"anonymous": True}


def text_result(text: str, *, is_error: bool = False) -> dict[str, Any]:
    """A tool result of one text. `is_error`: the tool ran, and failed."""
    result: dict[str, Any] = {"content": [{"type": "text", "text": text}]}
    return {**result, "isError": True} if is_error else result


def elicitation(message: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """A question to the client's user, answered by a form of this JSON schema."""
    params = {"mode": "form", "message": message, "requestedSchema": schema}
    return {"method": "elicitation/create", "params": params}
