"""Which scopes a client's token must have for what it wants of its tasks."""

from dataclasses import dataclass

from app.mcp.subjects import LISTEN

ANSWER = "tasks/update"
_READING = frozenset(("tasks/get", "tasks/result", "tasks/list", LISTEN))
_WRITING = frozenset((ANSWER, "tasks/cancel"))


@dataclass(frozen=True, slots=True)
class Scopes:
    """For each kind of method, the scopes of which one is needed; with none, none is."""

    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()

    def lacking(self, method: str, granted: frozenset[str] | None) -> str | None:
        """The scope to ask for, if what was granted is not enough."""
        needed = self._needed(method)
        if granted is None or not needed or not granted.isdisjoint(needed):
            return None
        return needed[0]

    def _needed(self, method: str) -> tuple[str, ...]:
        if method in _READING:
            return self.read
        return self.write if method in _WRITING else ()
