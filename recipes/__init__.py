"""One file a recipe: a function `recipe() -> JobConfig` that states only what differs from the defaults."""
