"""One recipe per file: a function `recipe() -> JobConfig` with the values that differ from the defaults.

May import `config`, other recipes, and the layers below `config`.
"""
