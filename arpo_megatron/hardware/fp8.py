"""The format of the engines' FP8 weights, which trainer and engines must agree on."""

BLOCK = 128
"""A scale covers this many rows and columns of weights, or this many features of a token."""
