"""Worker processes that run search, browse and plug-in tools, and the pool that starts and replaces them.

May import `catalog`, the tools' packages and everything below them, but not `service` or `mcp`.
"""
