"""Move weights between Hugging Face files, Megatron's shards and running engines.

May import `engine`, `models` and the layers below them, but not `actor` or `rollout`.
"""

from arpo_megatron.hardware import transformer_engine

transformer_engine.prepare()
