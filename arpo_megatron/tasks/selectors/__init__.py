"""Task selectors, one file per method; `registry.BUILTIN` lists their names.

May import `tasks.base`, `tasks.files`, `registry`, `config` and `errors`.
"""
