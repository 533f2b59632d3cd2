"""The tag protocol between model and tools, for sampling and for scoring.

May import `tasks.protocols`, `tasks.arpo_parquet`, `config` and `utils`.
"""
