"""Transformer Engine on a CPU: its own Python over an emulation of its C++ extension.

TE's modules, contexts, recipes, weight caches and collectives run unchanged. `extension` takes the place of
`transformer_engine_torch`: FP8 tensors hold real FP8 bytes and scales, and a product converts them back to float32
first. `patches` lists the changes to TE's Python. Results differ from a GPU's in the order of additions only.
May import the rest of `hardware`, and no other package of the project.
"""
