"""Questions: data sets as `Task` records, the tag protocol, task selectors, demonstrations, and conversations for SFT.

May import `registry`, `config`, `utils`, `tree` and `errors`, but not `models`.
"""
