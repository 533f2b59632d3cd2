"""Outputs of a run: events, metrics, profiles, stored trees, and their display in the terminal.

May import `jobs` and the layers below it, not the trainer whose metrics it shows.
"""
