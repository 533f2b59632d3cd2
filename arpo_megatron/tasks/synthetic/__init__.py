"""Tasks generated from a seed, with demonstrations of how tools solve them.

May import `tasks.base`, `tree` and `errors`.
"""
