"""The machine: GPU specs, placement of ranks and engines, environment variables, and CPU-specific calls.

May import `config` and `errors` only.
"""
