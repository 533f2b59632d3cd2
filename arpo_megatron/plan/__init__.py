"""What a job will need, before any GPU hour: memory by part, seconds by phase, and layouts that would do better."""

from arpo_megatron.hardware.specs import GPUS, Hardware
from arpo_megatron.plan.fit import Plan, plan

__all__ = ["GPUS", "Hardware", "Plan", "plan"]
