"""Environments: multi-turn tasks whose state the model's turns change, such as a database or a simulated user.

May import `tasks.base`, `tasks.chat`, `tasks.protocols`, `registry`, `config` and `errors`.
"""
