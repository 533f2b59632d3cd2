"""Conversations for supervised training: their rows, their tokens, and their order."""
