"""Train the policy: log-probs, losses and updates of packs on Megatron-Core, and their checkpoints.

May import `weights` and the layers below it, but not `rollout` or `trainer`.
"""

from arpo_megatron.hardware import transformer_engine

transformer_engine.prepare()
