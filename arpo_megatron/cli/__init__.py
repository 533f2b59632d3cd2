"""The `arpo` commands, one file per family, and their entry points for nemo-run and login nodes.

May import every layer, and `tools_sandbox.bench`; torch and other slow packages only inside commands.
"""
