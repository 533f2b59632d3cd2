"""The tag protocol between model and tools, for sampling and for scoring."""
