"""What both ends of a weight push agree on: HTTP paths, buckets of tensors, checksums.

The trainer's side imports it without SGLang, the engine's side without the trainer.
"""
