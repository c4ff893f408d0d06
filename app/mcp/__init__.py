"""JSON-RPC over Streamable HTTP, towards MCP clients."""
