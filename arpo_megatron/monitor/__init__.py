"""Outputs of a run: events, metrics, profiles, stored trees, and their display in the terminal.

This package may import `jobs` and what lies below it, not the trainer whose numbers it shows.
"""
