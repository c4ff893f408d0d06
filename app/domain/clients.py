"""MCP clients that have a key of the broker instead of OAuth."""

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID


@dataclass(frozen=True, slots=True)
class Client:
    id: UUID
    name: str
    created_at: datetime
    revoked_at: datetime | None
