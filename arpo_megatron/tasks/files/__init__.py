"""Questions from users' files: formats, columns, mixtures, and files larger than memory.

May import `tasks.base`, `tasks.chat`, `tasks.tags`, `registry`, `config`, `utils` and `errors`.
"""
