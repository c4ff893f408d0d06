"""The OpenAPI description of the backend API: what routes that read raw bytes really take."""

from typing import Any

from app.backends.inputs import (
    INPUT_METHODS,
    MAX_INPUT_REQUESTS,
    MAX_POLL_INTERVAL_MS,
    MAX_STALL_MS,
    MAX_TEXT,
)
from app.domain.signals import SignalType
from app.domain.tasks import Status

Schema = dict[str, Any]

STATUS: Schema = {"type": "string", "enum": [status.value for status in Status]}
_NAME: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT, "pattern": "^[^\\x00]+$"}
_ERROR: Schema = {
    "type": "object",
    "required": ["code", "message"],
    "properties": {"code": {"type": "integer"}, "message": {"type": "string"}, "data": {}},
    "description": "A JSON-RPC error; with status failed only.",
}
_INPUT_REQUEST: Schema = {
    "type": "object",
    "required": ["method"],
    "properties": {
        "method": {"type": "string", "enum": list(INPUT_METHODS)},
        "params": {"type": "object"},
    },
}
_STATE: Schema = {
    "status": STATUS,
    "statusMessage": {"type": "string"},
    "result": {
        "type": "object",
        "description": "With status completed only. Comes back to the client byte for byte.",
    },
    "error": _ERROR,
    "inputRequests": {
        "type": "object",
        "minProperties": 1,
        "maxProperties": MAX_INPUT_REQUESTS,
        "additionalProperties": _INPUT_REQUEST,
        "description": "With status input_required only. Keys are never used twice on a task.",
    },
    "pollIntervalMs": {"type": "integer", "minimum": 1, "maximum": MAX_POLL_INTERVAL_MS},
    "ttlMs": {
        "type": ["integer", "null"],
        "minimum": 1,
        "description": "Counted from the creation; null is unlimited. Cut to what is allowed.",
    },
    "stallAfterMs": {
        "type": ["integer", "null"],
        "minimum": 1,
        "maximum": MAX_STALL_MS,
        "description": "A working task fails when no event came for so long; null is never.",
    },
}
_OWNER: Schema = {
    "oneOf": [
        {
            "type": "object",
            "required": ["handle"],
            "properties": {"handle": {"type": "string", "description": "The Task-Owner header"}},
        },
        {
            "type": "object",
            "required": ["authorization"],
            "properties": {"authorization": {"type": "string", "examples": ["Bearer …"]}},
        },
        {
            "type": "object",
            "required": ["tokenSha256"],
            "properties": {"tokenSha256": {"type": "string", "pattern": "^[0-9a-fA-F]{64}$"}},
        },
        {
            "type": "object",
            "required": ["issuer", "subject"],
            "properties": {
                "issuer": {"type": "string", "description": "One that the broker accepts"},
                "subject": {"type": "string", "minLength": 1},
                "clientId": {"type": "string", "description": "If the token has one"},
            },
        },
        {
            "type": "object",
            "required": ["anonymous"],
            "properties": {"anonymous": {"const": True}},
        },
    ],
    "description": "The credential of the MCP client whose call this task is for.",
}
_MOMENT: Schema = {"type": "string", "format": "date-time"}
_TASK: Schema = {
    "type": "object",
    "required": ["taskRef", "status", "createdAt", "lastUpdatedAt", "ttlMs"],
    "properties": {
        "taskRef": {"type": "string", "format": "uuid"},
        "externalId": {"type": "string"},
        "tool": {"type": "string"},
        "createdAt": _MOMENT,
        "lastUpdatedAt": _MOMENT,
        **_STATE,
    },
}
_SIGNALS: Schema = {
    "cancelRequested": {"type": "boolean"},
    "inputResponses": {"type": "object", "additionalProperties": {"type": "object"}},
}
_WHOLE_TASK: Schema = {
    **_TASK,
    "required": [*_TASK["required"], *_SIGNALS],
    "properties": {**_TASK["properties"], **_SIGNALS},
}
_CREATED: Schema = {
    "type": "object",
    "required": ["taskRef", "createTaskResult", "createTaskResultLegacy"],
    "properties": {
        "taskRef": {"type": "string", "format": "uuid"},
        "createTaskResult": {"type": "object"},
        "createTaskResultLegacy": {"type": "object"},
    },
}
_REPORTED: Schema = {
    "type": "object",
    "required": ["applied", "task", *_SIGNALS],
    "properties": {
        "applied": {"type": "boolean"},
        "reason": {"type": "string", "enum": ["duplicate", "terminal", "stale"]},
        "task": _TASK,
        **_SIGNALS,
    },
}
_PAGE: Schema = {
    "type": "object",
    "required": ["tasks"],
    "properties": {
        "tasks": {"type": "array", "items": _WHOLE_TASK},
        "nextCursor": {"type": "string"},
    },
}
_SIGNAL: Schema = {
    "type": "object",
    "required": ["webhookId", "type", "timestamp", "data"],
    "properties": {
        "webhookId": {"type": "string", "description": "The same, however often it comes"},
        "type": {"type": "string", "enum": [kind.value for kind in SignalType]},
        "timestamp": _MOMENT,
        "data": {
            "type": "object",
            "required": ["taskRef", "status"],
            "properties": {
                "taskRef": {"type": "string", "format": "uuid"},
                "externalId": {"type": "string"},
                "status": STATUS,
                "inputResponses": {
                    "type": "object",
                    "additionalProperties": {"type": "object"},
                    "description": "With task.input_received: the answers that have come.",
                },
            },
        },
    },
}
_NEWS: Schema = {
    "type": "object",
    "required": ["signals", "cursor"],
    "properties": {
        "signals": {"type": "array", "items": _SIGNAL},
        "cursor": {
            "type": "string",
            "description": "As `after` of the next request it acknowledges these signals.",
        },
    },
}
_PROBLEM: Schema = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["pointer", "detail"],
                "properties": {"pointer": {"type": "string"}, "detail": {"type": "string"}},
            },
        },
    },
}
_REASONS = {
    400: "Not JSON, or a member of the wrong type",
    401: "No valid credential",
    403: "Not allowed, or the backend is disabled",
    404: "No such task, or another backend's",
    409: "The externalId names a task of another owner",
    410: "The task has expired",
    413: "The body is over the limit",
    422: "Well formed, but it does not fit",
    503: "The database cannot be reached; try again after `Retry-After` seconds",
}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _responses(success: dict[int, tuple[str, Schema]], *problems: int) -> dict[int | str, Schema]:
    answers: dict[int | str, Schema] = {
        status: {"description": text, "content": _json(schema)}
        for status, (text, schema) in success.items()
    }
    for status in problems:
        answers[status] = {
            "description": _REASONS[status],
            "content": {"application/problem+json": {"schema": _PROBLEM}},
        }
    return answers


def _operation(request: Schema | None, security: list[str]) -> Schema:
    extra: Schema = {"security": [{name: []} for name in security]}
    if request is not None:
        extra["requestBody"] = {"required": True, "content": _json(request)}
    return extra


_CREATE_BODY: Schema = {
    "type": "object",
    "required": ["owner"],
    "properties": {"owner": _OWNER, "externalId": _NAME, "tool": _NAME, **_STATE},
}
_EVENT_BODY: Schema = {
    "type": "object",
    "required": ["type", "data"],
    "properties": {
        "type": {"const": "task.updated"},
        "timestamp": _MOMENT,
        "data": {
            "type": "object",
            "anyOf": [{"required": [name]} for name in ("taskRef", "externalId", "taskId")],
            "properties": {
                "taskRef": {"type": "string", "format": "uuid"},
                "externalId": _NAME,
                "taskId": {"type": "string"},
                **_STATE,
            },
        },
    },
}

CREATE: dict[str, Any] = {
    "summary": "Create a task",
    "status_code": 201,
    "openapi_extra": _operation(_CREATE_BODY, ["backendKey"]),
    "responses": _responses(
        {201: ("Created and committed", _CREATED), 200: ("It exists already", _CREATED)},
        400, 401, 403, 409, 410, 413, 422, 503,
    ),
}  # fmt: skip
READ: dict[str, Any] = {
    "summary": "Read one task",
    "openapi_extra": _operation(None, ["backendKey"]),
    "responses": _responses({200: ("The task", _WHOLE_TASK)}, 401, 403, 404, 410, 503),
}
LIST: dict[str, Any] = {
    "summary": "List tasks, newest first",
    "openapi_extra": _operation(None, ["backendKey"]),
    "responses": _responses({200: ("One page", _PAGE)}, 400, 401, 403, 503),
}

SIGNALS: dict[str, Any] = {
    "summary": "Wait for signals, the oldest first",
    "openapi_extra": _operation(None, ["backendKey"]),
    "responses": _responses(
        {200: ("What has not been acknowledged yet, at most 100", _NEWS)}, 400, 401, 403, 503
    ),
}

SECURITY_SCHEMES: Schema = {
    "backendKey": {"type": "http", "scheme": "bearer", "description": "An API key, `tbk_…`"},
    "webhookSignature": {
        "type": "apiKey",
        "in": "header",
        "name": "webhook-signature",
        "description": "Standard Webhooks 1.0, with `webhook-id` and `webhook-timestamp`",
    },
}


def _header(name: str, description: str) -> Schema:
    return {
        "name": name,
        "in": "header",
        "description": description,
        "schema": {"type": "string", "maxLength": MAX_TEXT},
    }


WEBHOOK_PATH: Schema = {
    "post": {
        "tags": ["tasks"],
        "summary": "Report an event of a task",
        "parameters": [
            {"name": "backend", "in": "path", "required": True, "schema": {"type": "string"}},
            _header("webhook-id", "Names the event; one that was applied is never applied again"),
        ],
        **_operation(_EVENT_BODY, ["webhookSignature", "backendKey"]),
        "responses": {
            str(status): answer
            for status, answer in _responses(
                {200: ("Applied, or why not", _REPORTED)}, 400, 401, 403, 404, 410, 413, 422, 503
            ).items()
        },
    }
}
"""The path item of the webhook, which is a plain ASGI endpoint and no route of FastAPI."""
