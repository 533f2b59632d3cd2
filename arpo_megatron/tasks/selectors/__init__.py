"""Task selectors, one file per method; `registry.BUILTIN` lists their names.

May import `tasks.base`, `tasks.files`, `tasks.system_prompts`, `registry`, `config` and `errors`.
"""
