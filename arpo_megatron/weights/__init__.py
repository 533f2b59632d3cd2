"""Weights between their three homes: Hugging Face files, Megatron's shards and the running engine."""
