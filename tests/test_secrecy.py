"""No task id, token, key or secret appears in a log. Runs last, over the log of the whole run."""

import pytest

from app.telemetry import redact
from tests.support.secrecy import LOGS, issued
from tests.support.service import Service


async def test_the_log_of_the_whole_run_has_no_secret(service: Service) -> None:
    tools, client = await service.tool_server(), service.client()
    task = await tools.create(client)
    await client.get(task.id)
    await service.http.get(f"/v1/tasks/{task.id}", headers=tools.authorization)

    log = "\n".join(path.read_text(errors="replace") for path in LOGS.glob("*.log"))

    assert "request handled" in log  # it was kept, at debug level
    assert len(issued()) > 4
    leaked = [secret for secret in issued() if secret in log]
    assert not leaked


@pytest.mark.parametrize(
    "secret",
    [
        "tbk_" + "a1-_" * 10,
        "tbc_" + "Zz09" * 10,
        "whsec_" + "ab+/" * 11 + "=",
        "A-_9" * 16,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2ln",
        "Bearer some.opaque/token+with=all~of-it",
        "postgresql://user:hunter2@db/x",
    ],
)
def test_whatever_looks_like_a_secret_is_cut_from_a_log(secret: str) -> None:
    said = redact(f"before {secret} after")
    assert secret.removeprefix("postgresql://").removesuffix("db/x") not in said
    assert said.startswith("before ")
    assert said.endswith(" after")


def test_what_operators_need_to_see_is_left_alone() -> None:
    line = "task 01936e1c-7d3a-7cc0-8c5e-2f0f7b1f6a11 of backend image-tools at /v1/tasks"
    assert redact(line) == line
