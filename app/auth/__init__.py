"""Who is calling: MCP clients by their credential, tool servers by key or signature."""
