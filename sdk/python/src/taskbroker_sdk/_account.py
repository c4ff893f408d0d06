"""Which broker a tool server uses, and how it shows who it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import urlsplit

from taskbroker_sdk._signing import sign, signing_key
from taskbroker_sdk._version import __version__
from taskbroker_sdk._wire import Request

USER_AGENT = f"taskbroker-sdk-python/{__version__}"
_REQUIRED = ("BROKER_URL", "BROKER_BACKEND", "BROKER_API_KEY")


@dataclass(frozen=True)
class Account:
    """A backend's place at a broker. ValueError says which part cannot be right."""

    url: str
    backend: str
    api_key: str = field(repr=False)
    webhook_secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.url.rstrip("/"))
        _check_url(self.url)
        if not self.backend:
            raise ValueError("backend is empty; give the name that `taskbroker backend add` took")
        if not self.api_key or not all("!" <= character <= "~" for character in self.api_key):
            raise ValueError("api_key is empty or has a character that no key has (a line break?)")
        if self.webhook_secret is not None:
            signing_key(self.webhook_secret)

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> Self:
        missing = [name for name in _REQUIRED if not environ.get(name)]
        if missing:
            raise ValueError(
                f"not set: {', '.join(missing)}. "
                "`taskbroker backend add NAME` makes a backend and shows its keys."
            )
        url, backend, api_key = (environ[name] for name in _REQUIRED)
        return cls(url, backend, api_key, environ.get("BROKER_WEBHOOK_SECRET") or None)

    def headers(self, request: Request, now: float) -> dict[str, str]:
        """The headers of one attempt at a request; `now` is in seconds since 1970."""
        headers = {"accept": "application/json", "user-agent": USER_AGENT}
        if request.body is not None:
            headers["content-type"] = "application/json"
        if request.webhook_id is not None:
            headers["webhook-id"] = request.webhook_id
        if request.webhook_id is None or request.body is None or self.webhook_secret is None:
            return {**headers, "authorization": f"Bearer {self.api_key}"}
        signature = sign(self.webhook_secret, request.webhook_id, int(now), request.body)
        return {**headers, "webhook-timestamp": f"{int(now)}", "webhook-signature": signature}


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port  # ValueError if it is none
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("url must look like https://broker.example")
    if parts.username is not None or "?" in url or "#" in url:
        raise ValueError("url must have no user name, no query and no fragment")
