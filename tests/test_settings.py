"""Settings come from TASKBROKER_*; what is wrong stops the start and is named, never shown."""

from pathlib import Path

import pytest

from app.domain.issuers import Issuer
from app.settings import SettingsError, load_settings, settings_without_effect
from tests.support.service import new_secret_key

ISSUER = '{"issuer": "https://id.example", "audience": "x"}'


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def test_nothing_needs_to_be_set() -> None:
    settings = load_settings()
    assert settings.database_url is None
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)
    assert (settings.default_ttl_ms, settings.max_ttl_ms) == (3_600_000, 604_800_000)
    assert (settings.max_body_bytes, settings.default_poll_interval_ms) == (1_048_576, 2_000)


def test_the_environment_wins_over_the_env_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path(tmp_path, ".env").write_text("TASKBROKER_PORT=1111\nTASKBROKER_LOG_LEVEL=error\nOTHER=1\n")
    monkeypatch.setenv("TASKBROKER_PORT", "2222")
    settings = load_settings()
    assert (settings.port, settings.log_level) == (2222, "error")


def test_lists_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKBROKER_ALLOWED_ORIGINS", "https://a.example, https://b.example,")
    assert load_settings().allowed_origins == ("https://a.example", "https://b.example")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DEFAULT_TTL", "1"),  # no such setting
        ("MAX_LIVE_TASKS_PER_OWNER", "5"),  # would promise a limit that is not there
        ("OAUTH_ISSUERS", "[]"),
        ("OAUTH_ISSUERS", "hunter2"),
        ("OAUTH_ISSUERS", "[" * 100_000),
        ("OAUTH_ISSUERS", '["hunter2"]'),
        ("OAUTH_ISSUERS", '[{"issuer": "https://a.example"}]'),
        ("OAUTH_ISSUERS", '[{"issuer": "http://a.example", "audience": "x"}]'),
        ("OAUTH_ISSUERS", '[{"issuer": "https://a.example?hunter2", "audience": "x"}]'),
        ("OAUTH_ISSUERS", '[{"issuer": "https://a.example", "audience": []}]'),
        ("OAUTH_ISSUERS", '[{"issuer": "https://a.example", "audience": [""]}]'),
        ("OAUTH_ISSUERS", '[{"issuer": "https://a.example", "audience": "x", "hunter2": 1}]'),
        ("OAUTH_ISSUERS", '[{"issuer": "https://a.example", "audience": "x", "jwks_uri": 1}]'),
        ("OAUTH_ISSUERS", f"[{ISSUER}, {ISSUER}]"),
        ("PUBLIC_URL", "broker.example"),
        ("PUBLIC_URL", "https://broker.example/path"),
        ("PUBLIC_URL", "https://user:hunter2@broker.example"),
        ("INTROSPECTION_URL", "http://id.example/introspect"),
        ("INTROSPECTION_URL", "https://id.example/introspect"),  # needs credentials
        ("INTROSPECTION_CLIENT_SECRET", "hunter2"),
        ("INTROSPECTION_AUDIENCE", "x"),
        ("SCOPES_READ", "tasks:read"),  # nobody has scopes
        ("SCOPES_WRITE", 'a"b'),
        ("DEFAULT_TTL_MS", "soon"),
        ("DEFAULT_TTL_MS", "0"),
        ("DEFAULT_TTL_MS", "999999999999"),  # more than the maximum
        ("MAX_TTL_MS", "99999999999999999999"),
        ("PORT", "70000"),
        ("HOST", ""),
        ("ALLOWED_ORIGINS", "app.example"),
        ("ALLOWED_ORIGINS", "*"),
        ("ALLOWED_HOSTS", "https://app.example"),
        ("LOG_LEVEL", "loud"),
        ("STRICT_HEADERS", "perhaps"),
        ("DATABASE_URL", "mysql://user:hunter2@host/db"),
        ("DATABASE_URL", "postgresql://user:hunter2@host:port/db"),
        ("DATABASE_URL", "postgresql://user:hunter2@host/db?channel_binding=require"),
        ("SECRET_KEYS", "c2hvcnQ"),
        ("SECRET_KEYS", "no base64 at all, hunter2"),
    ],
)
def test_a_bad_setting_is_named_and_its_value_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(f"TASKBROKER_{name}", value)
    with pytest.raises(SettingsError) as refusal:
        load_settings()
    assert f"TASKBROKER_{name}" in str(refusal.value)
    assert "hunter2" not in str(refusal.value)


def test_secrets_are_not_in_the_printed_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    key = new_secret_key()
    monkeypatch.setenv("TASKBROKER_SECRET_KEYS", key)
    monkeypatch.setenv("TASKBROKER_DATABASE_URL", "postgresql://user:hunter2@host/db")
    shown = repr(load_settings())
    assert key not in shown
    assert "hunter2" not in shown


def test_settings_of_features_to_come_are_accepted_and_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TASKBROKER_RATE_LIMIT_ENABLED", "false")
    load_settings()
    assert settings_without_effect() == ["TASKBROKER_RATE_LIMIT_ENABLED"]


def test_issuers_are_a_json_list(monkeypatch: pytest.MonkeyPatch) -> None:
    keys_at = '{"issuer": "https://b.example/t", "audience": ["x", "y"], "jwks_uri": "https://b/k"}'
    monkeypatch.setenv("TASKBROKER_OAUTH_ISSUERS", f"[{ISSUER}, {keys_at}]")
    monkeypatch.setenv("TASKBROKER_PUBLIC_URL", "https://broker.example/")
    settings = load_settings()
    assert settings.oauth_issuers == (
        Issuer("https://id.example", frozenset(["x"])),
        Issuer("https://b.example/t", frozenset(["x", "y"]), "https://b/k"),
    )
    assert settings.public_url == "https://broker.example"


def test_the_secret_of_introspection_is_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("URL", "https://id.example/introspect"),
        ("CLIENT_ID", "broker"),
        ("CLIENT_SECRET", "hunter2"),
    ):
        monkeypatch.setenv(f"TASKBROKER_INTROSPECTION_{name}", value)
    assert "hunter2" not in repr(load_settings())
