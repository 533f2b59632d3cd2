"""Comparison of mathematical answers: by text and number if possible, else by math-verify in a worker process.

May import only `utils`.
"""
