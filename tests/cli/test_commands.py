"""The commands of an operator, on an external database."""

import json
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TextIO

import pytest
from typer.testing import CliRunner, Result

from app import __version__
from app.auth.keys import key_hash
from app.cli import app, main
from app.db.embedded import EmbeddedPostgres
from app.settings import SettingsError
from app.telemetry import set_up_logs
from tests.support.authorization import jwk, rsa_key
from tests.support.processes import COMMAND, ROOT, environment, free_port
from tests.support.secrecy import secret
from tests.support.service import new_secret_key

Command = Callable[..., Result]


@pytest.fixture
def taskbroker(
    database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run_log: TextIO
) -> Iterator[Command]:
    """Runs one command line in this process, as the operator of the test's database."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASKBROKER_DATABASE_URL", database_url)
    monkeypatch.setenv("TASKBROKER_SECRET_KEYS", new_secret_key())

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments))

    yield run
    set_up_logs("debug", "json", run_log)  # each command has set up its own


def data(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_backend_is_registered_and_its_secrets_are_shown_once(taskbroker: Command) -> None:
    shown = data(taskbroker("backend", "add", "image-tools", "--json"))
    assert list(shown) == ["name", "apiKey", "webhookSecret"]
    assert shown["name"] == "image-tools"
    assert re.fullmatch(r"tbk_[\w-]{43}", secret(shown["apiKey"]))
    assert re.fullmatch(r"whsec_[\w+/]{43}=", secret(shown["webhookSecret"]))

    listed = taskbroker("backend", "list", "--json")
    assert [backend["name"] for backend in data(listed)] == ["image-tools"]
    details = taskbroker("backend", "show", "image-tools", "--json")
    assert data(details)["liveTasks"] == 0
    for later in (listed, details):
        assert shown["apiKey"] not in later.output
        assert shown["webhookSecret"] not in later.output


def test_the_terms_of_a_backend_are_kept(taskbroker: Command) -> None:
    taskbroker(
        "backend", "add", "b", "--allow-anonymous", "--max-ttl-ms", "5000", "--default-ttl-ms",
        "4000", "--poll-interval-ms", "100", "--mcp-url", "https://tools.example/mcp",
        "--callback-url", "https://tools.example/hook", "--forward-unknown-tasks",
    )  # fmt: skip
    details = data(taskbroker("backend", "show", "b", "--json"))
    del details["createdAt"]
    assert details == {
        "name": "b",
        "enabled": True,
        "liveTasks": 0,
        "mcpUrl": "https://tools.example/mcp",
        "callbackUrl": "https://tools.example/hook",
        "callbackGoneAt": None,
        "callbackRestsUntil": None,
        "allowAnonymous": True,
        "forwardUnknownTasks": True,
        "defaultTtlMs": 4000,
        "maxTtlMs": 5000,
        "pollIntervalMs": 100,
    }


def test_what_was_set_can_be_changed_and_the_rest_stays(taskbroker: Command) -> None:
    taskbroker("backend", "add", "b", "--mcp-url", "https://old.example/mcp", "--max-ttl-ms", "9")
    changed = taskbroker(
        "backend", "update", "b", "--mcp-url", "http://new.example/mcp", "--allow-anonymous"
    )
    assert changed.exit_code == 0
    details = data(taskbroker("backend", "show", "b", "--json"))
    assert details["mcpUrl"] == "http://new.example/mcp"
    assert details["allowAnonymous"] is True
    assert details["maxTtlMs"] == 9

    taskbroker(
        "backend", "update", "b", "--mcp-url", "", "--no-allow-anonymous", "--max-ttl-ms", "0"
    )
    details = data(taskbroker("backend", "show", "b", "--json"))
    assert details["mcpUrl"] is None
    assert details["maxTtlMs"] is None
    assert details["allowAnonymous"] is False


@pytest.mark.parametrize(
    "url",
    ["ftp://x/mcp", "tools.example/mcp", "http://", "http://x:0/", "http://x:99999/", "http://a b/",
     "http://a..b/mcp", "http://x/\x01", "http://user:pw@x/mcp", "http://x/mcp#part", "http://ä/"],
)  # fmt: skip
def test_an_address_that_cannot_be_called_is_refused(taskbroker: Command, url: str) -> None:
    for option in ("--mcp-url", "--callback-url"):
        assert taskbroker("backend", "add", "b", option, url).exit_code == 1


def test_an_update_names_what_it_changes(taskbroker: Command) -> None:
    taskbroker("backend", "add", "b")
    assert taskbroker("backend", "update", "b").exit_code == 1
    assert taskbroker("backend", "update", "nobody", "--allow-anonymous").exit_code == 1
    wrong_order = ("--max-ttl-ms", "1", "--default-ttl-ms", "2")
    assert taskbroker("backend", "update", "b", *wrong_order).exit_code == 1


@pytest.mark.parametrize("name", ["", "-x", "Upper", "a_b", "x" * 64, "a\n"])
def test_a_backend_needs_a_proper_name(
    taskbroker: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["taskbroker", "backend", "add", "--", name])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "A name has 1 to 63" in capsys.readouterr().err


def test_a_name_is_taken_once(
    taskbroker: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taskbroker("backend", "add", "b")
    monkeypatch.setattr("sys.argv", ["taskbroker", "backend", "add", "b"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "taskbroker: There is a backend b already.\n"


def test_wrong_usage_ends_with_2(taskbroker: Command) -> None:
    assert taskbroker("backend", "add").exit_code == 2
    assert taskbroker("no-such-command").exit_code == 2
    assert taskbroker("backend", "add", "b", "--max-ttl-ms", "0").exit_code == 2


@pytest.mark.parametrize(
    "command",
    ["serve", "migrate", "sweep", "doctor", "keys new", "backend add", "backend list",
     "backend show", "backend update", "backend disable", "backend enable", "backend rotate-key",
     "backend rotate-secret", "backend remove", "client add", "client list", "client revoke",
     "task list", "task show", "task cancel", "task fail", "delivery list", "delivery redeliver"],
)  # fmt: skip
def test_every_command_explains_itself_with_an_example(taskbroker: Command, command: str) -> None:
    shown = taskbroker(*command.split(), "--help")
    assert shown.exit_code == 0
    assert "Example" in shown.output


def test_rotated_keys_and_secrets_overlap(taskbroker: Command) -> None:
    first = data(taskbroker("backend", "add", "b", "--json"))
    second = data(taskbroker("backend", "rotate-key", "b", "--json"))
    assert secret(second["apiKey"]) != secret(first["apiKey"])
    renewed = data(taskbroker("backend", "rotate-secret", "b", "--overlap-hours", "0", "--json"))
    assert secret(renewed["webhookSecret"]) != secret(first["webhookSecret"])


def test_a_client_gets_a_key_until_it_is_revoked(taskbroker: Command) -> None:
    shown = data(taskbroker("client", "add", "desktop", "--json"))
    assert list(shown) == ["name", "apiKey"]
    assert re.fullmatch(r"tbc_[\w-]{43}", secret(shown["apiKey"]))
    assert len(key_hash(shown["apiKey"])) == 32

    assert data(taskbroker("client", "list", "--json"))[0]["valid"] is True
    assert taskbroker("client", "revoke", "desktop").exit_code == 0
    assert data(taskbroker("client", "list", "--json"))[0]["valid"] is False
    assert isinstance(taskbroker("client", "revoke", "desktop").exception, Exception)

    again = data(taskbroker("client", "add", "desktop", "--json"))
    assert secret(again["apiKey"]) != shown["apiKey"]


def test_lists_say_what_to_do_when_they_are_empty(taskbroker: Command) -> None:
    assert "taskbroker backend add" in taskbroker("backend", "list").output
    assert "taskbroker client add" in taskbroker("client", "list").output
    assert taskbroker("task", "list").output == "No such tasks.\n"


def test_keys_are_32_bytes_and_never_the_same(taskbroker: Command) -> None:
    keys = {secret(taskbroker("keys", "new").output.strip()) for _ in range(3)}
    assert len(keys) == 3
    assert all(re.fullmatch(r"[\w-]{43}", key) for key in keys)


def test_the_doctor_finds_nothing_wrong_with_a_good_set_up(taskbroker: Command) -> None:
    findings = data(taskbroker("doctor", "--json"))
    assert [finding["check"] for finding in findings] == [
        "database", "schema", "clock", "keys", "listen", "tool servers", "callbacks", "issuers",
    ]  # fmt: skip
    assert all(finding["ok"] for finding in findings)


def test_the_doctor_says_which_tool_servers_are_away(taskbroker: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = f"http://127.0.0.1:{listener.getsockname()[1]}/mcp"
        taskbroker("backend", "add", "there", "--mcp-url", there)
        assert taskbroker("doctor").exit_code == 0
        taskbroker("backend", "add", "gone", "--mcp-url", f"http://127.0.0.1:{free_port()}/mcp")
        examined = taskbroker("doctor")
    assert examined.exit_code == 1
    assert "BAD  tool servers: cannot be reached: gone\n" in examined.output
    taskbroker("backend", "disable", "gone")
    taskbroker("backend", "disable", "there")
    assert taskbroker("doctor").exit_code == 0


def test_the_doctor_says_what_to_do_about_a_lost_key(
    taskbroker: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    taskbroker("backend", "add", "b")
    monkeypatch.setenv("TASKBROKER_SECRET_KEYS", new_secret_key())
    result = taskbroker("doctor")
    assert result.exit_code == 1
    assert "BAD  keys" in result.output
    assert "rotate-secret" in result.output


def test_the_doctor_is_content_once_the_secrets_of_a_dropped_key_are_replaced(
    taskbroker: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = new_secret_key(), new_secret_key()
    monkeypatch.setenv("TASKBROKER_SECRET_KEYS", old)
    taskbroker("backend", "add", "b")
    monkeypatch.setenv("TASKBROKER_SECRET_KEYS", f"{new},{old}")
    taskbroker("backend", "rotate-secret", "b", "--overlap-hours", "0")
    monkeypatch.setenv("TASKBROKER_SECRET_KEYS", new)
    assert taskbroker("doctor").exit_code == 0


def test_a_sweep_says_what_it_did(taskbroker: Command) -> None:
    assert data(taskbroker("sweep", "--json")) == {
        "cancelled": 0,
        "stalled": 0,
        "expired": 0,
        "purged": 0,
        "eventsForgotten": 0,
        "signalsForgotten": 0,
    }


def test_an_external_database_needs_keys(
    taskbroker: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TASKBROKER_SECRET_KEYS")
    result = taskbroker("backend", "list")
    assert "TASKBROKER_SECRET_KEYS must be set" in str(result.exception)


def test_a_database_without_the_schema_is_said_so(
    taskbroker: Command, monkeypatch: pytest.MonkeyPatch, postgres: EmbeddedPostgres
) -> None:
    monkeypatch.setenv("TASKBROKER_DATABASE_URL", postgres.url)
    assert "run `taskbroker migrate`" in str(taskbroker("backend", "list").exception)
    examined = taskbroker("doctor")
    assert examined.exit_code == 1
    assert "BAD  schema" in examined.output


def test_a_database_that_is_not_there_is_said_so(
    taskbroker: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKBROKER_DATABASE_URL", "postgresql://u:hunter2@127.0.0.1:1/x")
    result = taskbroker("backend", "list")
    assert "cannot be reached" in str(result.exception)
    assert "hunter2" not in result.output + str(result.exception)


def test_the_doctor_says_what_to_do_about_a_database_that_is_away(
    taskbroker: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASKBROKER_DATABASE_URL", "postgresql://u:hunter2@127.0.0.1:1/x")
    result = taskbroker("doctor", "--json")
    assert result.exit_code == 1
    [finding] = json.loads(result.stdout)
    assert (finding["check"], finding["ok"]) == ("database", False)
    assert "TASKBROKER_DATABASE_URL" in finding["mend"]


def test_the_version_is_printed(taskbroker: Command) -> None:
    assert taskbroker("--version").output == f"{__version__}\n"


def test_a_server_that_cannot_listen_says_where_and_ends_with_1(database_url: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        settings = {"database_url": database_url, "secret_keys": new_secret_key()}
        ended = subprocess.run(
            [*COMMAND, "serve", "--port", str(port)],
            cwd=ROOT,
            env=environment(**settings),
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert f"cannot listen on 127.0.0.1, port {port}" in ended.stderr
    assert "Traceback" not in ended.stderr


class _KeysOfAnIssuer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        found = self.path == "/keys"
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"keys": [jwk(rsa_key())]}).encode())


def test_the_doctor_fetches_the_keys_of_each_issuer(
    taskbroker: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _KeysOfAnIssuer) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_port}"
        good = {"issuer": f"{url}/good", "audience": "x", "jwks_uri": f"{url}/keys"}
        bad = {"issuer": f"{url}/bad", "audience": "x"}
        monkeypatch.setenv("TASKBROKER_PUBLIC_URL", "https://broker.example")
        monkeypatch.setenv("TASKBROKER_OAUTH_ISSUERS", json.dumps([good]))
        healthy = taskbroker("doctor")
        monkeypatch.setenv("TASKBROKER_OAUTH_ISSUERS", json.dumps([good, bad]))
        ill = taskbroker("doctor")
        server.shutdown()
    assert healthy.exit_code == 0
    assert "ok   issuers: 1" in healthy.output
    assert ill.exit_code == 1
    assert f"BAD  issuers: {url}/bad: 4xx" in ill.output


def test_clients_of_oauth_must_be_told_where_the_broker_is(
    taskbroker: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a loopback address it knows by itself."""
    issuer = '[{"issuer": "https://id.example", "audience": "x"}]'
    monkeypatch.setenv("TASKBROKER_OAUTH_ISSUERS", issuer)
    result = taskbroker("serve", "--host", "0.0.0.0")  # noqa: S104 - it does not get that far
    assert isinstance(result.exception, SettingsError)
    assert "TASKBROKER_PUBLIC_URL must be set" in str(result.exception)
