"""Authorization servers whose access tokens are accepted, and where their documents are."""

from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from app.domain.addresses import url_fault

_AUTHORIZATION_SERVER = "/.well-known/oauth-authorization-server"
_OPENID = "/.well-known/openid-configuration"


@dataclass(frozen=True, slots=True)
class Issuer:
    """An issuer by its exact name, and for whom its tokens must be made."""

    name: str
    audiences: frozenset[str]
    jwks_uri: str | None = None
    """Where its keys are; `None` if its metadata shall tell."""


def metadata_urls(issuer: str) -> list[str]:
    """Where the metadata of an issuer may be (RFC 8414, section 3; OpenID Connect Discovery)."""
    parts = urlsplit(issuer)
    origin, path = f"{parts.scheme}://{parts.netloc}", parts.path.rstrip("/")
    places = (
        f"{origin}{_AUTHORIZATION_SERVER}{path}",
        f"{origin}{_OPENID}{path}",
        f"{origin}{path}{_OPENID}",
    )
    return list(dict.fromkeys(places))


def endpoint_fault(url: str) -> str | None:
    """What is wrong with the URL of an authorization server."""
    fault = url_fault(url)
    if fault is not None:
        return fault
    if not url.startswith("https://") and not is_loopback(url):
        return "A URL must begin with https://, or lead to this machine by a loopback address."
    return None


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
