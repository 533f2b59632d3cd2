"""The rollout process, in which the trees of all tasks grow, and the trainer's handle of it.

May import `engine`, `algorithms`, `tasks`, everything below them, and `tools_sandbox.client` and `.config`, but
neither `actor` nor `trainer`.
"""
