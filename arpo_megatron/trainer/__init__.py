"""One step of RL: rollouts, rewards, batches, updates, pushes, and what a checkpoint and the metrics hold.

May import `rollout`, `actor` and all layers below them, but not `launch` or `plan`.
"""
