"""The owner of a new task, in the words of the tool server that creates it."""

from collections.abc import Collection

from msgspec import UNSET

from app.auth.callers import Callers, bearer_token
from app.auth.handles import Handles
from app.backends import inputs
from app.backends.inputs import OwnerBody
from app.domain.backends import Backend
from app.domain.claims import name_fault
from app.domain.owners import ANONYMOUS, Owner, oauth_owner, opaque_token_hash_owner
from app.errors import Fault, Forbidden, Refused, Unauthenticated


class Owners:
    """`issuers` are the names of those whose subjects may be owners."""

    def __init__(self, callers: Callers, handles: Handles, issuers: Collection[str]) -> None:
        self._callers = callers
        self._handles = handles
        self._issuers = issuers

    async def named(self, body: OwnerBody, backend: Backend) -> Owner:
        """The owner that a backend names.

        Raises Refused, Forbidden for an anonymous one, or Unavailable.
        """
        owner = await self._understood(body, backend)
        if owner == ANONYMOUS and not backend.terms.allow_anonymous:
            raise Forbidden(f"The backend {backend.name} may not have anonymous owners.")
        return owner

    async def _understood(self, body: OwnerBody, backend: Backend) -> Owner:
        given = [name for name in OwnerBody.__struct_fields__ if getattr(body, name) is not UNSET]
        try:
            if given == ["authorization"]:
                token = bearer_token(str(body.authorization))
                return (await self._callers.identity_of_token(token)).owner
            if given == ["handle"]:
                return self._handles.open(str(body.handle), backend.name)
        except Unauthenticated as error:
            raise Refused(
                "The owner's credential is not valid.",
                faults=[Fault(f"/owner/{given[0]}", error.detail)],
            ) from None
        if given == ["token_sha256"]:
            if not self._callers.takes_opaque_tokens_as_they_are:
                detail = "tokens are introspected here; give the authorization itself"
                raise _malformed("/owner/tokenSha256", detail)
            return opaque_token_hash_owner(inputs.token_hash(body))
        if given == ["anonymous"] and body.anonymous is True:
            return ANONYMOUS
        if given in (["issuer", "subject"], ["issuer", "subject", "client_id"]):
            return self._of_issuer(body)
        raise _malformed(
            "/owner",
            "give exactly one of handle, authorization, tokenSha256, anonymous (true), "
            "or issuer and subject (and clientId, if the token has one)",
        )

    def _of_issuer(self, body: OwnerBody) -> Owner:
        """The owner that a token with these claims would have."""
        if body.issuer not in self._issuers:
            raise _malformed("/owner/issuer", "is none that this broker is configured to accept")
        subject = str(body.subject)
        client_id = None if body.client_id is UNSET else body.client_id
        for pointer, name in (("/owner/subject", subject), ("/owner/clientId", client_id or "")):
            fault = name_fault(name)
            if fault is not None:
                raise _malformed(pointer, fault)
        if not subject:
            raise _malformed("/owner/subject", "must not be empty")
        return oauth_owner(str(body.issuer), subject, client_id)


def _malformed(pointer: str, detail: str) -> Refused:
    return Refused("The owner is not well formed.", faults=[Fault(pointer, detail)])
