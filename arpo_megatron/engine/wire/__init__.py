"""Protocol between both ends of a weight push: HTTP paths, boxes of tensors, groups and memory, checksums.

The trainer's side imports it without SGLang, the engine's side without the trainer. May import no other package of the
project.
"""
