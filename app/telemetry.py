"""Logs and metrics. Nothing secret leaves through here: the redaction is the last step of a log.

A task id, a key and a token may each be used by whoever reads them, so a line that would carry
one is cut, wherever it came from: our own words, a library's, a traceback's.
"""

import logging
import re
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Literal, TextIO

import structlog
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from structlog.types import EventDict, Processor

REDACTED = "[redacted]"
_SECRET = re.compile(
    r"""
      \b(?:tbk|tbc)_[\w-]{8,}                 # keys of the broker
    | \bwhsec_[\w+/=-]{8,}                    # webhook secrets
    | (?i:\bbearer)\s+[\x21-\x7e]+            # credentials in a header
    | \beyJ[\w-]{8,}(?:\.[\w-]*){0,2}         # JSON web tokens
    | (?<![\w-])[\w-]{64}(?![\w-])            # task ids
    | (?<![\w-])gAAAA[\w-]{60,}={0,2}         # handles of owners
    | (?<=://)[^\s/@:]*:[^\s/@]*@             # passwords in URLs
    """,
    re.VERBOSE | re.ASCII,
)


def redact(text: str) -> str:
    """The text without anything that looks like a task id, a key, a token or a secret."""
    return _SECRET.sub(REDACTED, text)


def _redacted(value: Any) -> Any:
    match value:
        case str():
            return redact(value)
        case bool() | int() | float() | None:
            return value
        case dict():
            return {_redacted(key): _redacted(item) for key, item in value.items()}
        case list() | tuple():
            return [_redacted(item) for item in value]
        case _:
            return redact(str(value))


def _redact_event(_logger: object, _name: str, event: EventDict) -> EventDict:
    event.pop("color_message", None)  # uvicorn says everything twice
    return {key: _redacted(value) for key, value in event.items()}


def set_up_logs(
    level: str, style: Literal["json", "console"], stream: TextIO | None = None
) -> None:
    """One line for each event, the libraries' own included, on standard error or `stream`."""
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.format_exc_info,
        _redact_event,
    ]
    render: Processor = (
        structlog.processors.JSONRenderer()
        if style == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("sqlalchemy", "alembic", "asyncio"):  # a line for every statement or callback
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


class McpRequests(Collector):
    """MCP requests by method and outcome, and how long they took.

    Every poll is counted, on one thread: plain numbers, turned into metrics when somebody looks,
    cost a tenth of the library's locked ones.
    """

    BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], int] = defaultdict(int)
        self._within: dict[str, list[int]] = defaultdict(lambda: [0] * (len(self.BOUNDS) + 1))
        self._seconds: dict[str, float] = defaultdict(float)

    def count(self, method: str, era: str, outcome: str, seconds: float) -> None:
        """`era`: modern, legacy or none; `outcome`: ok, unavailable, or the JSON-RPC error code."""
        self._counts[method, era, outcome] += 1
        self._within[method][bisect_left(self.BOUNDS, seconds)] += 1
        self._seconds[method] += seconds

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "taskbroker_mcp_requests",
            "MCP requests by method, era and outcome (ok, or the JSON-RPC error code)",
            labels=["method", "era", "outcome"],
        )
        for labels, number in self._counts.items():
            requests.add_metric(labels, number)
        yield requests
        times = HistogramMetricFamily(
            "taskbroker_mcp_request_seconds", "Time to answer an MCP request", labels=["method"]
        )
        for method, within in self._within.items():
            bounds = [*map(str, self.BOUNDS), "+Inf"]
            buckets = list(zip(bounds, accumulate(within), strict=True))
            times.add_metric([method], buckets, self._seconds[method])
        yield times


class Metrics:
    """The counters of one process."""

    def __init__(
        self,
        registry: CollectorRegistry = REGISTRY,
        *,
        waiters: Callable[[], int] = lambda: 0,
        streams: Callable[[], int] = lambda: 0,
        notifications: Callable[[], bool] = lambda: False,
    ) -> None:
        self.registry = registry
        Gauge(
            "taskbroker_waiters",
            "Requests that wait for a task to change, or for signals",
            registry=registry,
        ).set_function(waiters)
        Gauge(
            "taskbroker_streams", "Streams to clients, and waits for a result", registry=registry
        ).set_function(streams)
        Gauge(
            "taskbroker_notifications_arrive",
            "Whether changes of other processes are heard of at once (1), or a second late",
            registry=registry,
        ).set_function(notifications)
        self.mcp = McpRequests()
        registry.register(self.mcp)
        self.missing_mcp_name = Counter(
            "taskbroker_mcp_name_missing",
            "tasks/* requests without the Mcp-Name header, tolerated unless STRICT_HEADERS is set",
            registry=registry,
        )
        self.gateway = Counter(
            "taskbroker_gateway_requests",
            "Requests passed on to tool servers, by what became of them (2xx, 4xx, …, or why not)",
            ["backend", "outcome"],
            registry=registry,
        )
        self.gateway_seconds = Histogram(
            "taskbroker_gateway_answer_seconds",
            "Time until the head of a tool server's answer was there",
            ["backend"],
            registry=registry,
        )
        self.events = Counter(
            "taskbroker_events",
            "Events of tool servers by outcome (a verdict, or the HTTP status of a refusal)",
            ["outcome"],
            registry=registry,
        )
        self.deliveries = Counter(
            "taskbroker_deliveries",
            "Signals sent to callbacks, by what became of each attempt",
            ["backend", "outcome"],
            registry=registry,
        )
        self.delivery_seconds = Histogram(
            "taskbroker_delivery_seconds",
            "Time from a signal's cause to its receipt by the callback",
            ["backend"],
            registry=registry,
            buckets=(0.01, 0.05, 0.1, 0.5, 1, 5, 10, 60, 600, 3600, 36_000),
        )
        self.jwks_fetches = Counter(
            "taskbroker_jwks_fetches",
            "Fetches of an issuer's keys, by what became of them (ok, or why not)",
            ["issuer", "outcome"],
            registry=registry,
        )
        self.created = Counter("taskbroker_tasks_created", "Tasks created", registry=registry)
        self.swept = Counter(
            "taskbroker_swept",
            "Tasks and webhook-ids that the sweeper of this process took care of",
            ["what"],
            registry=registry,
        )
