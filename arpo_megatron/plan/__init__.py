"""The planner: estimates a job's memory and time before it runs, lays it out on nodes, and searches for better layouts.

May import `actor`, `jobs` and the layers below them, but not torch.
"""

from arpo_megatron.hardware.specs import GPUS, Hardware
from arpo_megatron.plan.fit import JobEstimate, plan

__all__ = ["GPUS", "Hardware", "JobEstimate", "plan"]
