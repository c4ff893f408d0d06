"""Which tasks a message is about, as far as the gateway must know to send it to the right place."""

from msgspec import UNSET, Raw, Struct, UnsetType

from app import rawjson
from app.mcp import jsonrpc
from app.mcp.eras import Params, invalid_params, part

LISTEN = "subscriptions/listen"


class _Filter(Struct):
    taskIds: Raw | UnsetType = UNSET  # noqa: N815 - the wire's name


def wanted_ids(params: Params) -> list[str]:
    """The tasks that a subscription is for. Raises RpcFailure if it has no filter, or a bad one."""
    if params.notifications is UNSET:
        raise invalid_params("params.notifications is missing")
    wanted = part(params.notifications, _Filter, "params.notifications")
    if wanted.taskIds is UNSET:
        return []
    return part(wanted.taskIds, list[str], "params.notifications.taskIds")


def is_about_tasks(method: str) -> bool:
    """Whether a method may be about tasks: subscriptions are only if they name some."""
    return method.startswith("tasks/") or method == LISTEN


def task_ids(body: bytes) -> list[str]:
    """The ids that a message of such a method names. Raises RpcFailure where that is not clear."""
    message = jsonrpc.parse(body)
    if not isinstance(message, jsonrpc.Request) or message.params is None:
        return []
    params = part(message.params, Params, "params")
    if message.method != LISTEN:
        return [] if params.task_id is UNSET else [part(params.task_id, str, "params.taskId")]
    if params.notifications is UNSET:
        return []
    wanted = part(params.notifications, _Filter, "params.notifications")
    if wanted.taskIds is UNSET or not rawjson.is_array(wanted.taskIds):
        return []
    return part(wanted.taskIds, list[str], "params.notifications.taskIds")
