"""selectors."""
