"""What a run shows: metrics on disk and in wandb, the live display, and rollout trees in the terminal."""
