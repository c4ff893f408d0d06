"""Durable MCP tools: their tasks live in Task Broker, the tool server reports on them.

`AsyncTaskBroker` is for asyncio, `TaskBroker` for threads; they do the same.
"""

from taskbroker_sdk._async import AsyncCreatedTask, AsyncTask, AsyncTaskBroker, AsyncWork
from taskbroker_sdk._current import current_task
from taskbroker_sdk._errors import (
    BrokerError,
    CancelRequested,
    Fault,
    Problem,
    TaskFailed,
    Unreachable,
)
from taskbroker_sdk._receiving import (
    AsyncSignalReceiver,
    SignalHandler,
    SignalReceiver,
    SignalReply,
)
from taskbroker_sdk._signals import Signal, SignalType
from taskbroker_sdk._signing import Headers, sign, verify
from taskbroker_sdk._sync import CreatedTask, Task, TaskBroker, Work
from taskbroker_sdk._tools import elicitation, owner_from, text_result
from taskbroker_sdk._version import __version__
from taskbroker_sdk._wire import Event, Json, NewTask, Status, TaskState

__all__ = [
    "AsyncCreatedTask",
    "AsyncSignalReceiver",
    "AsyncTask",
    "AsyncTaskBroker",
    "AsyncWork",
    "BrokerError",
    "CancelRequested",
    "CreatedTask",
    "Event",
    "Fault",
    "Headers",
    "Json",
    "NewTask",
    "Problem",
    "Signal",
    "SignalHandler",
    "SignalReceiver",
    "SignalReply",
    "SignalType",
    "Status",
    "Task",
    "TaskBroker",
    "TaskFailed",
    "TaskState",
    "Unreachable",
    "Work",
    "__version__",
    "current_task",
    "elicitation",
    "owner_from",
    "sign",
    "text_result",
    "verify",
]
