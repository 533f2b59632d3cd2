"""Conversations for supervised training: their rows, their tokens, and their order.

May import `tasks.base`, `utils`, `tree` and `errors`.
"""
