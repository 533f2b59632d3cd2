"""The policy in training: packs of rollout trees through Megatron-Core."""
