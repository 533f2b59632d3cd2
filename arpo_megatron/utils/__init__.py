"""Helpers that know no domain: atomic files, process groups, signals, rank entry point, readers, clients, text.

May import `errors` and `tools_sandbox.utils`.
"""
