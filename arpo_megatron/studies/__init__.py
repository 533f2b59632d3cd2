"""Studies: several methods trained on the same tasks with several seeds, and the page that compares them.

They start ordinary runs as processes; they import `evaluation` and lower layers, not `bench`.
"""
