"""Lay rollout trees out as packs, the unit of one forward and backward pass: pure numpy, equal on all ranks.

May import `algorithms`, `models` and the layers below them, but not torch.
"""
