"""Runs after all others, and looks into what was logged meanwhile."""

import pytest

from tests.support.secrecy import LOGS, issued

pytestmark = pytest.mark.clients


def test_no_log_has_a_key_or_the_id_of_a_task() -> None:
    logs = "\n".join(path.read_text(errors="replace") for path in LOGS.glob("*.log"))
    assert "request handled" in logs
    assert len(issued()) > 4
    assert not [each for each in issued() if each in logs]
