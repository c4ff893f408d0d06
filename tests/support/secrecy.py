"""Every secret that a test hands out is noted here; no log of the run may contain one."""

import secrets
import tempfile
from pathlib import Path

LOGS = Path(tempfile.mkdtemp(prefix="taskbroker-test-logs-"))
"""Where everything under test writes its log, at debug level."""

_issued: set[str] = set()


def secret(text: str) -> str:
    """Notes a secret, and gives it back."""
    _issued.add(text)
    return text


def new_token(kind: str = "canary") -> str:
    """A fresh opaque bearer token."""
    return secret(f"{kind}-{secrets.token_urlsafe(24)}")


def issued() -> frozenset[str]:
    return frozenset(_issued)
