"""tags."""
