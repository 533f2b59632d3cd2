"""Tools of MCP servers (Model Context Protocol), which a worker process starts and speaks to over stdio.

May import `tool`, `config`, `answers` and `utils`. Only `workers` imports it.
"""
