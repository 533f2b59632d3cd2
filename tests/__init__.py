"""Tests, by package. A test may import Megatron before any package of ours, here or in a process that it starts."""

from arpo_megatron.hardware import transformer_engine

transformer_engine.prepare()
