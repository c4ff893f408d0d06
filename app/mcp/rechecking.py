"""An answer that takes its time is for who still has a valid credential."""

import asyncio

from app.auth.callers import Callers
from app.broker.follow import AWAY_SECONDS
from app.errors import Unauthenticated, Unavailable
from app.mcp.scopes import Scopes


class Rechecking:
    def __init__(self, callers: Callers, scopes: Scopes) -> None:
        self._callers = callers
        self._scopes = scopes

    async def __call__(self, authorization: str | None, method: str) -> None:
        """Raises Unauthenticated when the credential is no longer valid, or not for this method.

        While that cannot be found out, nobody gets anything.
        """
        while authorization is not None:
            try:
                identity = await self._callers.identity(authorization)
            except Unavailable:
                await asyncio.sleep(AWAY_SECONDS)
                continue
            if self._scopes.lacking(method, identity.scopes) is not None:
                raise Unauthenticated("The access token has lost the scope that this needs.")
            return
