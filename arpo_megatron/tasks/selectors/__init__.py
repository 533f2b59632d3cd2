"""Task selectors, one file per method. Their names are in `registry.BUILTIN`."""
