"""Tool servers that use the broker."""

import re
from dataclasses import dataclass
from datetime import datetime

NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}", re.ASCII)


@dataclass(frozen=True, slots=True)
class BackendTerms:
    """What an operator decides about a backend."""

    mcp_url: str | None = None
    callback_url: str | None = None
    allow_anonymous: bool = False
    forward_unknown_tasks: bool = False
    default_ttl_ms: int | None = None
    max_ttl_ms: int | None = None
    poll_interval_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Backend:
    """A registered tool server. A disabled one may neither create nor report."""

    id: int
    name: str
    terms: BackendTerms
    disabled_at: datetime | None
    created_at: datetime
    callback_gone_at: datetime | None = None
    """When its callback answered 410: it gets no signals before an operator has looked at it."""
    callback_rests_until: datetime | None = None
    """Until when its callback has asked to be left alone."""
