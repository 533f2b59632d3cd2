"""Tools of MCP servers (Model Context Protocol), which the service starts and speaks to over stdio.

May import `tool`, `config`, `answers` and `utils`. `relay` runs as a script and imports only the standard library.
"""
