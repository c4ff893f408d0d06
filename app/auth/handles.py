"""The `Task-Owner` header: how the gateway tells a tool server whose call it is passing on.

A handle is the owner, sealed: a tool server can neither read it nor make one, it is good for one
backend, and for a short time. Any replica opens what another one sealed.
"""

from collections.abc import Sequence
from functools import partial

from cachetools import TTLCache
from cryptography.fernet import InvalidToken

from app.auth.keys import fernet
from app.domain.clock import Clock
from app.domain.owners import Owner
from app.errors import Unauthenticated

SECONDS = 900
"""How long a handle is good for: a tool may think that long before it makes a task of a call."""

_REUSED_SECONDS = 60


class Handles:
    def __init__(self, keys: Sequence[bytes], clock: Clock) -> None:
        self._fernet = fernet(keys, b"owner-handle")
        self._clock = clock
        self._issued: TTLCache[tuple[str, Owner], str] = TTLCache(
            10_000, _REUSED_SECONDS, timer=partial(_seconds, clock)
        )

    def issue(self, owner: Owner, backend: str) -> str:
        """A handle of `owner` for the backend of this name."""
        handle = self._issued.get((backend, owner))
        if handle is None:
            sealed = self._fernet.encrypt_at_time(
                _addressed(owner, backend), int(_seconds(self._clock))
            )
            handle = self._issued[backend, owner] = sealed.decode("ascii")
        return handle

    def open(self, handle: str, backend: str) -> Owner:
        """The owner in a handle that was issued for this backend. Raises Unauthenticated."""
        try:
            form = self._fernet.decrypt_at_time(
                handle.encode(), SECONDS + _REUSED_SECONDS, int(_seconds(self._clock))
            )
        except InvalidToken:
            raise Unauthenticated(
                "The handle is not valid, or older than "
                f"{SECONDS} s: pass the Task-Owner header of the call on as it came."
            ) from None
        name, _, canonical = form.partition(b"\n")
        if name.decode() != backend:
            raise Unauthenticated("The handle was given to another backend.")
        return Owner.from_canonical(canonical)


def _addressed(owner: Owner, backend: str) -> bytes:
    return backend.encode() + b"\n" + owner.canonical()


def _seconds(clock: Clock) -> float:
    return clock().timestamp()
