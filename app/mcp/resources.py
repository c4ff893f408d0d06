"""The doors as protected resources of OAuth: what they are called, and who issues tokens for them.

(RFC 9728, and RFC 6750 for the challenges; MCP 2026-07-28, "Authorization".)
"""

import json
from collections.abc import Sequence

WELL_KNOWN = "/.well-known/oauth-protected-resource"


class ProtectedResources:
    """Without an authorization server or a public URL there are none."""

    def __init__(
        self, public_url: str | None, authorization_servers: Sequence[str], scopes: Sequence[str]
    ) -> None:
        self._public_url = public_url if authorization_servers else None
        self._authorization_servers = list(authorization_servers)
        self._scopes = list(dict.fromkeys(scopes))

    def metadata_url(self, backend: str | None) -> str | None:
        """Where the metadata of the door of a backend is, or of the door to all."""
        if self._public_url is None:
            return None
        return f"{self._public_url}{WELL_KNOWN}{_path(backend)}"

    def metadata(self, backend: str | None) -> bytes | None:
        """The metadata of a door, as JSON."""
        if self._public_url is None:
            return None
        members: dict[str, object] = {
            "resource": f"{self._public_url}{_path(backend)}",
            "authorization_servers": self._authorization_servers,
        }
        if self._scopes:
            members["scopes_supported"] = self._scopes
        members["bearer_methods_supported"] = ["header"]
        return json.dumps(members).encode()


def challenge(metadata_url: str | None, **parameters: str) -> tuple[bytes, bytes]:
    """The header that says which credential is needed; the parameters must need no escaping."""
    if metadata_url is not None:
        parameters["resource_metadata"] = metadata_url
    listed = ", ".join(f'{name}="{value}"' for name, value in parameters.items())
    return b"www-authenticate", f"Bearer {listed}".rstrip().encode()


def _path(backend: str | None) -> str:
    return "/mcp" if backend is None else f"/mcp/{backend}"
