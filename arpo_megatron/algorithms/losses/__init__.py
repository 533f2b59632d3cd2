"""Policy losses: a file each. Their names are in `plugins.BUILTIN`."""
