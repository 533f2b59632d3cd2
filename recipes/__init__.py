"""Recipes: one file each, with a function `recipe() -> JobConfig` that states its difference from a base."""
