"""Policy losses, one per file. Their names are in `registry.BUILTIN`."""
