"""The machine: GPU specs, placement of ranks and engines, environment variables, and CPU-specific calls.

Imports `config`, `registry`, `utils` and `errors` only.
"""
