"""Questions: data sets as `Task` records, the tag protocol, task selectors, demonstrations, and conversations for SFT.

This package may import `registry`, `config`, `utils` and `tree`.
"""
