"""The settings: environment variables `TASKBROKER_*` and a `.env` file, read once at start."""

import binascii
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

from app.domain.task_ids import KEY_BYTES

PREFIX = "TASKBROKER_"
ENV_FILE = ".env"
_HUNDRED_YEARS_MS = 100 * 366 * 24 * 3600 * 1000
Milliseconds = Annotated[int, Field(ge=1, le=_HUNDRED_YEARS_MS)]
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/*\s]+/?", re.ASCII | re.IGNORECASE)
CommaSeparated = Annotated[tuple[str, ...], NoDecode]

NOT_YET = {
    "OAUTH_ISSUERS": "OAuth access tokens are not verified by this release",
    "INTROSPECTION_URL": "token introspection is not part of this release",
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

WITHOUT_EFFECT = ("RATE_LIMIT_ENABLED", "ADMIN_TOKEN", "PUBLIC_URL")
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
        "secret_keys", "allowed_origins", "allowed_hosts", "trusted_proxies", mode="before"
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
    return settings


def settings_without_effect() -> list[str]:
    """The accepted settings that this release does not use, for the start-up log."""
    given = _given()
    return [f"{PREFIX}{name}" for name in WITHOUT_EFFECT if name in given]


def _given() -> set[str]:
    names = {*dotenv_values(ENV_FILE), *os.environ}
    return {name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)}
