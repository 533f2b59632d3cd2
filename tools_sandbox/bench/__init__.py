"""Benchmarks of the tool service, which `arpo bench sandbox` runs.

They start the service as a process. May import `client` and `python_tool.protocol`; only `arpo bench` imports them.
"""
