"""Configs and run directories of a job: resolving a recipe, its inputs, and the files of a run.

Imports `engine`, `tasks`, `models`, `rewards`, `algorithms`, `config` and the layers below them.
"""
