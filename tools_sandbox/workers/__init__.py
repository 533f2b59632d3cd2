"""Worker processes that run search, browse, plug-in and MCP tools, and the pools that start and replace them.

May import `catalog`, `mcp`, the tools' packages and everything below them, but not `service`.
"""
