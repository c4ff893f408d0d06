"""Claims as issuers write them: in an access token, and in the answer to an introspection."""

from msgspec import Struct

from app import rawjson
from app.domain.claims import Claims

_Number = int | float | None
_Texts = str | list[str] | None


class _Members(Struct):
    iss: str | None = None
    sub: str | None = None
    aud: _Texts = None
    exp: _Number = None
    nbf: _Number = None
    iat: _Number = None
    client_id: str | None = None
    azp: str | None = None
    scope: _Texts = None
    scp: _Texts = None


def read_claims(document: bytes) -> Claims:
    """The claims in a JSON object. Raises Invalid."""
    given = rawjson.decode_body(document, _Members)
    scopes = given.scp if given.scope is None else given.scope
    return Claims(
        issuer=given.iss,
        subject=given.sub,
        client_id=given.azp if given.client_id is None else given.client_id,
        audiences=frozenset([given.aud] if isinstance(given.aud, str) else given.aud)
        if given.aud is not None
        else None,
        scopes=frozenset(scopes.split() if isinstance(scopes, str) else scopes or ()),
        expires_at=given.exp,
        not_before=given.nbf,
        issued_at=given.iat,
    )
