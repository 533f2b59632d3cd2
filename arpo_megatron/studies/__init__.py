"""Studies: several methods trained on the same tasks with several seeds, and the page that compares them.

May import `evaluation` and the layers below it, not `bench`; ordinary runs are started as processes.
"""
