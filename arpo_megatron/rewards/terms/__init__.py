"""Terms that may be added to a reward: a value per trajectory, one file per method.

May import `rewards.base` and `rewards.judge`.
"""
