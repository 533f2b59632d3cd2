"""Environments of the `verifiers` package, which run in a Python of their own, since their dependencies differ.

May import `tasks.base`, `tasks.protocols`, the rest of `tasks.environments`, `utils` and `errors`.
"""
