"""The tag protocol between model and tools, for sampling and for scoring.

May import `utils` only.
"""
