"""Train the policy: log-probs, losses and updates of packs on Megatron-Core, and their checkpoints.

May import weights, packing, algorithms and everything below them, but not rollout or the trainer.
"""
