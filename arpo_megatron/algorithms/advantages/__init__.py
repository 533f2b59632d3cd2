"""Advantage estimators, one per file; `registry.BUILTIN` lists their names.

May import `tree`, and `base`, `credit`, `turns` and `types` of `algorithms`; no torch at module level.
"""
