"""The HTTP service: dispatch of calls, fair queueing, deduplication, the answer cache, metrics and file limits.

May import every package of the tool service except `bench`. Only `__main__` imports it.
"""
