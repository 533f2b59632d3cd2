"""Benchmarks of the tool service, which `arpo bench sandbox` runs.

They start the service as a process. May import `client`, `python_tool.protocol` and `utils`; only `arpo bench` imports
them.
"""
