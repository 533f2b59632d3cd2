"""ARPO on Megatron-Core and SGLang: a group of trajectories is a tree, from the sampler's fork to the gradient.

The packages form layers (docs/internals/structure.md), and each may import only lower ones. This module imports
nothing.
"""

__version__ = "0.1.0"
