"""Task selectors, one file per method; `registry.BUILTIN` lists their names.

May import `tasks.base`, `registry`, `config` and `errors`.
"""
