"""Configs and run directories of a job: resolving a recipe, its inputs, and the files of a run.

May import `engine` and the layers below it; not `monitor`, `weights` or the layers above.
"""
