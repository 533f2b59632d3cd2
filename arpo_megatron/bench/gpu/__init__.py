"""Measurements for a machine with a GPU (`arpo bench gpu`); docs/guides/gpu.md explains their figures.

May import `bench`, `launch` and every layer below it.
"""
