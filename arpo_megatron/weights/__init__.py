"""Move weights between Hugging Face files, Megatron's shards and running engines.

May import engine, models, packing and everything below them, but not actor or rollout.
"""
