"""Advantage estimators, one per file. Their names are in `registry.BUILTIN`."""
