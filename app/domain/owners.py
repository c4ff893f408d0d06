"""Who a task belongs to: the credential of the MCP client whose call created it."""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class OwnerKind(StrEnum):
    CLIENT_KEY = "client-key"
    OPAQUE_TOKEN = "opaque-token"  # noqa: S105 - a kind of credential, not one
    OAUTH = "oauth"
    ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class Owner:
    """An owner as its kind and the parts that identify the credential; no part is a secret."""

    kind: OwnerKind
    parts: tuple[str, ...] = ()

    def canonical(self) -> bytes:
        """Length-prefixed, so that no two different owners have the same form."""
        return b"".join(
            len(part).to_bytes(4, "big") + part
            for part in (text.encode() for text in (self.kind, *self.parts))
        )

    @classmethod
    def from_canonical(cls, form: bytes) -> "Owner":
        """The owner of a canonical form. ValueError if it is none."""
        texts = []
        while form:
            length = int.from_bytes(form[:4], "big")
            part, form = form[4 : 4 + length], form[4 + length :]
            if len(part) != length:
                raise ValueError("cut off")
            texts.append(part.decode())
        if not texts:
            raise ValueError("empty")
        kind, *parts = texts
        return cls(OwnerKind(kind), tuple(parts))


ANONYMOUS = Owner(OwnerKind.ANONYMOUS)


def client_key_owner(key_id: str) -> Owner:
    return Owner(OwnerKind.CLIENT_KEY, (key_id,))


def opaque_token_owner(token: str) -> Owner:
    return opaque_token_hash_owner(hashlib.sha256(token.encode()).hexdigest())


@lru_cache(maxsize=10_000)
def opaque_token_hash_owner(sha256_hex: str) -> Owner:
    """`sha256_hex`: 64 hexadecimal digits, either case."""
    return Owner(OwnerKind.OPAQUE_TOKEN, (sha256_hex.lower(),))


@lru_cache(maxsize=10_000)
def oauth_owner(issuer: str, subject: str, client_id: str | None) -> Owner:
    """Whoever `subject` is to `issuer`, with the client that it uses: the same for every token."""
    names = (issuer, subject) if client_id is None else (issuer, subject, client_id)
    return Owner(OwnerKind.OAUTH, names)
