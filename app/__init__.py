"""Task Broker: MCP tasks, persisted in Postgres and bound to the client's credential."""

__version__ = "0.1.0"
