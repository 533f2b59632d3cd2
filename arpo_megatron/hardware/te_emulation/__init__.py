"""Transformer Engine on a CPU: its own Python over an emulation of its C++ extension.

TE's modules, contexts, recipes, weight caches and collectives run unchanged. `extension` takes the place of
`transformer_engine_torch`: FP8 tensors hold real FP8 bytes and scales, and a product converts them back to float32
first. `patches` lists the changes to TE's Python. Two things of a GPU are not emulated: the order of additions, and the
precision of the accumulator, which keeps fewer bits than float32 in Hopper's FP8 products.
May import the rest of `hardware`, and no other package of the project.
"""
