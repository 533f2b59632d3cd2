"""The rollout process, in which the trees of all tasks grow, and the trainer's handle of it.

It may import `engine`, `algorithms`, `tasks` and everything below them, but neither `actor` nor `trainer`.
"""
