"""Benchmarks of `arpo bench`: each logs progress to standard error and returns the figures of one JSON line.

May import every lower layer and `tools_sandbox.client`, but not `studies`.
"""
