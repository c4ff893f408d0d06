"""The owner of a new task, in the words of the tool server that creates it."""

from msgspec import UNSET

from app.auth.callers import Callers, bearer_token
from app.auth.handles import Handles
from app.backends import inputs
from app.backends.inputs import OwnerBody
from app.domain.backends import Backend
from app.domain.owners import ANONYMOUS, Owner, opaque_token_hash_owner
from app.errors import Fault, Forbidden, Refused, Unauthenticated


class Owners:
    def __init__(self, callers: Callers, handles: Handles) -> None:
        self._callers = callers
        self._handles = handles

    async def named(self, body: OwnerBody, backend: Backend) -> Owner:
        """The owner that a backend names. Raises Refused, or Forbidden for an anonymous one."""
        owner = await self._understood(body, backend)
        if owner == ANONYMOUS and not backend.terms.allow_anonymous:
            raise Forbidden(f"The backend {backend.name} may not have anonymous owners.")
        return owner

    async def _understood(self, body: OwnerBody, backend: Backend) -> Owner:
        given = [name for name in OwnerBody.__struct_fields__ if getattr(body, name) is not UNSET]
        try:
            if given == ["authorization"]:
                return await self._callers.owner_of_token(bearer_token(str(body.authorization)))
            if given == ["handle"]:
                return self._handles.open(str(body.handle), backend.name)
        except Unauthenticated as error:
            raise Refused(
                "The owner's credential is not valid.",
                faults=[Fault(f"/owner/{given[0]}", error.detail)],
            ) from None
        if given == ["token_sha256"]:
            return opaque_token_hash_owner(inputs.token_hash(body))
        if given == ["anonymous"] and body.anonymous is True:
            return ANONYMOUS
        if {"issuer", "subject"} & set(given):
            detail = "OAuth parts are not understood by this release"
        else:
            detail = "give exactly one of handle, authorization, tokenSha256, anonymous (true)"
        raise Refused("The owner is not well formed.", faults=[Fault("/owner", detail)])
