"""Benchmarks of the tool service, which `arpo bench sandbox` runs.

They start the service as a process and use `client`; nothing imports them.
"""
