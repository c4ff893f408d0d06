"""The settings: environment variables `TASKBROKER_*` and a `.env` file, read once at start."""

import binascii
import json
import os
import re
from base64 import b64encode, urlsafe_b64decode
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qs, urlsplit

from dotenv import dotenv_values
from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from app.domain.addresses import url_fault
from app.domain.issuers import Issuer, endpoint_fault
from app.domain.task_ids import KEY_BYTES

PREFIX = "TASKBROKER_"
ENV_FILE = ".env"
_HUNDRED_YEARS_MS = 100 * 366 * 24 * 3600 * 1000
Milliseconds = Annotated[int, Field(ge=1, le=_HUNDRED_YEARS_MS)]
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/*\s]+/?", re.ASCII | re.IGNORECASE)
_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+", re.ASCII)
CommaSeparated = Annotated[tuple[str, ...], NoDecode]

NOT_YET = {
    "MAX_LIVE_TASKS_PER_OWNER": "quotas are not part of this release",
    "MAX_LIVE_TASKS_PER_BACKEND": "quotas are not part of this release",
}
"""Settings that would promise protection which is not there: they stop the start."""

LIBPQ_ONLY = frozenset(
    ("channel_binding", "connect_timeout", "gssencmode", "keepalives", "keepalives_count",
     "keepalives_idle", "keepalives_interval", "requirepeer", "sslcompression",
     "tcp_user_timeout")
)  # fmt: skip
"""Parameters of a database URL that libpq has and our driver would take for server settings."""

WITHOUT_EFFECT = ("RATE_LIMIT_ENABLED", "ADMIN_TOKEN")
"""Settings of features to come that do no harm: accepted, and named in the start-up log."""


class SettingsError(Exception):
    """A setting is unknown or has a bad value. The message names it, never its value."""


class Settings(BaseSettings):
    """Everything that can be set. Durations are milliseconds, sizes bytes."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_file=ENV_FILE,
        frozen=True,
        extra="ignore",
        hide_input_in_errors=True,
    )

    database_url: str | None = Field(default=None, repr=False)
    pooler: Literal["session", "transaction"] = "session"
    data_dir: Path = Path(".taskbroker")
    postgres_bin: Path | None = None
    secret_keys: CommaSeparated = Field(default=(), repr=False)

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    allowed_origins: CommaSeparated = ()
    allowed_hosts: CommaSeparated = ()
    trusted_proxies: CommaSeparated = ()
    strict_headers: bool = False
    legacy: bool = True

    public_url: str | None = None
    oauth_issuers: Annotated[tuple[Issuer, ...], NoDecode] = ()
    introspection_url: str | None = None
    introspection_client_id: str | None = None
    introspection_client_secret: str | None = Field(default=None, repr=False)
    introspection_issuer: str | None = None
    introspection_audience: CommaSeparated = ()
    scopes_read: CommaSeparated = ()
    scopes_write: CommaSeparated = ()

    default_ttl_ms: Milliseconds = 3_600_000
    max_ttl_ms: Milliseconds = 604_800_000
    allow_unlimited_ttl: bool = False
    default_poll_interval_ms: Annotated[int, Field(ge=1, le=86_400_000)] = 2_000
    expired_grace_ms: Annotated[int, Field(ge=0, le=_HUNDRED_YEARS_MS)] = 3_600_000
    cancel_grace_ms: Milliseconds = 30_000
    sweep_interval_ms: Annotated[int, Field(ge=10, le=86_400_000)] = 1_000

    allow_private_callbacks: bool = False

    max_streams: Annotated[int, Field(ge=1)] = 20_000
    max_streams_per_owner: Annotated[int, Field(ge=1)] = 100
    max_tasks_per_stream: Annotated[int, Field(ge=1, le=10_000)] = 100

    gateway_timeout_ms: Milliseconds = 300_000
    gateway_max_answer_bytes: Annotated[int, Field(ge=1024)] = 64 * 1024 * 1024

    max_body_bytes: Annotated[int, Field(ge=1024, le=256 * 1024 * 1024)] = 1_048_576
    cache_bytes: Annotated[int, Field(ge=0)] = 64 * 1024 * 1024

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"

    @field_validator(
        "secret_keys",
        "allowed_origins",
        "allowed_hosts",
        "trusted_proxies",
        "introspection_audience",
        "scopes_read",
        "scopes_write",
        mode="before",
    )
    @classmethod
    def _split(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(part.strip() for part in value.split(",") if part.strip())

    @field_validator("allowed_origins")
    @classmethod
    def _origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(_ORIGIN.fullmatch(origin) for origin in value):
            raise ValueError("must list origins like https://app.example, without a path or *")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if any(set(host) & set("/*") for host in value):
            raise ValueError("must list host names like broker.example, without a scheme or *")
        return value

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        try:
            for network in value:
                ip_network(network)
        except ValueError:
            raise ValueError("must list addresses or networks like 10.0.0.0/8") from None
        return value

    @field_validator("public_url")
    @classmethod
    def _public_origin(cls, value: str | None) -> str | None:
        if value is None:
            return None
        if not value.startswith(("https://", "http://")) or not _ORIGIN.fullmatch(value):
            raise ValueError("must be an origin like https://broker.example, without a path")
        if not _is_plain(value):
            raise ValueError("must have a host name and no user name, query or fragment")
        return value.rstrip("/")

    @field_validator("oauth_issuers", mode="before")
    @classmethod
    def _issuers(cls, value: Any) -> Any:
        return _read_issuers(value) if isinstance(value, str) else value

    @field_validator("introspection_url")
    @classmethod
    def _endpoint(cls, value: str | None) -> str | None:
        fault = None if value is None else endpoint_fault(value)
        if fault is not None:
            raise ValueError(fault)
        return value

    @field_validator("scopes_read", "scopes_write")
    @classmethod
    def _scope_names(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not all(_SCOPE.fullmatch(scope) for scope in value):
            raise ValueError("must list names of scopes, separated by commas")
        return value

    @field_validator("database_url")
    @classmethod
    def _libpq_style(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("postgresql://", "postgres://")):
            raise ValueError("must look like postgresql://user@host/database")
        try:
            url = urlsplit(value or "")
            unknown = LIBPQ_ONLY.intersection(parse_qs(url.query))
            _ = url.port  # checks it
        except ValueError:
            raise ValueError("is not a URL") from None
        if unknown:
            raise ValueError(f"the driver has no {', '.join(sorted(unknown))}; leave that out")
        return value

    @field_validator("secret_keys")
    @classmethod
    def _keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for position, key in enumerate(value, 1):
            if len(decode_key(key)) != KEY_BYTES:
                raise ValueError(
                    f"key {position} is not {KEY_BYTES} bytes in base64url; "
                    "`taskbroker keys new` prints a good one"
                )
        return value

    @field_validator("log_level", "log_format", mode="before")
    @classmethod
    def _lower(cls, value: Any) -> Any:
        return value.lower() if isinstance(value, str) else value

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The secret keys as bytes, newest first."""
        return tuple(decode_key(key) for key in self.secret_keys)

    @property
    def has_oauth(self) -> bool:
        """Whether any bearer token but the broker's own keys is checked with anyone."""
        return bool(self.oauth_issuers) or self.introspection_url is not None

    @property
    def authorization_servers(self) -> tuple[str, ...]:
        """Where clients get their tokens, as far as that is known."""
        named = [issuer.name for issuer in self.oauth_issuers]
        if self.introspection_issuer is not None:
            named.append(self.introspection_issuer)
        return tuple(dict.fromkeys(named))


def _is_plain(url: str) -> bool:
    return url_fault(url) is None and not set(url) & set('?#"\\')


def _read_issuers(text: str) -> tuple[Issuer, ...]:
    """The issuers in a JSON list. ValueError says which one is wrong, and how."""
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None
    if not isinstance(listed, list) or not listed:
        raise ValueError("must be a list of at least one object with issuer and audience")
    issuers = []
    for position, entry in enumerate(listed, 1):
        try:
            issuers.append(_read_issuer(entry))
        except ValueError as error:
            raise ValueError(f"number {position}: {error}") from None
    if len({issuer.name for issuer in issuers}) < len(issuers):
        raise ValueError("an issuer is listed twice; give it a list of audiences instead")
    return tuple(issuers)


def _read_issuer(entry: Any) -> Issuer:
    if not isinstance(entry, dict) or not {"issuer", "audience"} <= set(entry):
        raise ValueError("must be an object with issuer and audience")
    if set(entry) - {"issuer", "audience", "jwks_uri"}:
        raise ValueError("has a member other than issuer, audience and jwks_uri")
    name, audience, jwks_uri = entry["issuer"], entry["audience"], entry.get("jwks_uri")
    if not isinstance(name, str) or not _is_plain(name):
        raise ValueError("issuer must be a URL without query and fragment")
    if fault := endpoint_fault(name):
        raise ValueError(f"issuer: {fault}")
    audiences = [audience] if isinstance(audience, str) else audience
    if not isinstance(audiences, list) or not audiences:
        raise ValueError("audience must be a text or a list of texts")
    if not all(isinstance(one, str) and one for one in audiences):
        raise ValueError("audience must be a text or a list of texts")
    if jwks_uri is not None:
        fault = endpoint_fault(jwks_uri) if isinstance(jwks_uri, str) else "must be a URL"
        if fault:
            raise ValueError(f"jwks_uri: {fault}")
    return Issuer(name, frozenset(audiences), jwks_uri)


def decode_key(text: str) -> bytes:
    """The bytes of a base64url text, padded or not; empty if it is not one."""
    try:
        raw = urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except (binascii.Error, ValueError):
        return b""
    canonical = b64encode(raw, altchars=b"-_").decode().rstrip("=")
    return raw if canonical == text.rstrip("=") else b""


def load_settings() -> Settings:
    """The settings of this process. Raises SettingsError for the first thing that is wrong.

    A variable of the environment wins over the same one in the `.env` file of the working folder.
    """
    for name in _given():
        if name in NOT_YET:
            raise SettingsError(f"{PREFIX}{name}: {NOT_YET[name]}; unset it")
        if name.lower() not in Settings.model_fields and name not in WITHOUT_EFFECT:
            raise SettingsError(f"{PREFIX}{name} is not a setting of Task Broker")
    try:
        settings = Settings()
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0]).upper() if first["loc"] else "settings"
        detail = first["msg"].removeprefix("Value error, ")
        raise SettingsError(f"{PREFIX}{name}: {detail}") from None
    if settings.default_ttl_ms > settings.max_ttl_ms:
        raise SettingsError(f"{PREFIX}DEFAULT_TTL_MS is larger than {PREFIX}MAX_TTL_MS")
    _check_oauth(settings)
    return settings


def _check_oauth(settings: Settings) -> None:
    """What one setting needs of another."""
    credentials = (settings.introspection_client_id, settings.introspection_client_secret)
    if settings.introspection_url is not None and not all(credentials):
        raise SettingsError(
            f"{PREFIX}INTROSPECTION_URL needs {PREFIX}INTROSPECTION_CLIENT_ID "
            f"and {PREFIX}INTROSPECTION_CLIENT_SECRET"
        )
    for name in ("client_id", "client_secret", "issuer", "audience"):
        if getattr(settings, f"introspection_{name}") and settings.introspection_url is None:
            raise SettingsError(
                f"{PREFIX}INTROSPECTION_{name.upper()} has no meaning "
                f"without {PREFIX}INTROSPECTION_URL"
            )
    for name in ("SCOPES_READ", "SCOPES_WRITE"):
        if getattr(settings, name.lower()) and not settings.has_oauth:
            raise SettingsError(
                f"{PREFIX}{name} would protect nothing: only tokens that are verified "
                f"({PREFIX}OAUTH_ISSUERS, {PREFIX}INTROSPECTION_URL) have scopes"
            )


def settings_without_effect() -> list[str]:
    """The accepted settings that this release does not use, for the start-up log."""
    given = _given()
    return [f"{PREFIX}{name}" for name in WITHOUT_EFFECT if name in given]


def _given() -> set[str]:
    names = {*dotenv_values(ENV_FILE), *os.environ}
    return {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}
