"""The version of SGLang that the engines run."""

SGLANG_VERSION = "0.5.18"
"""The patches and stubs in `engine/server/cpu.py` were checked against it."""
