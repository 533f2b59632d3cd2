"""The tag protocol between model and tools, for sampling and for scoring.

May import `tasks.base`, `tasks.protocols`, `tasks.chat`, `config` and `utils`.
"""
