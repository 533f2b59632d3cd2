"""Advantage estimators: a file each. Their names are in `plugins.BUILTIN`."""
