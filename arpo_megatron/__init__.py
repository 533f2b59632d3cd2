"""ARPO on Megatron-Core and SGLang: a group of trajectories is a tree, from the sampler's fork to the gradient."""

__version__ = "0.1.0"
