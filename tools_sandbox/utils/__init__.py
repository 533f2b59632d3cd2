"""Helpers that know nothing of tools: framing, log format, Linux calls, HTTP retries, temporary folders.

May import nothing else of this package.
"""
