"""A mixture's gradients are reduced during its last backward pass, also those of experts and packs without tokens.

The distributed optimizer gathers new weights during the next forward pass. test_te_emulation.py has the same test for
TE's grouped experts.
"""

from typing import Any

import pytest

from arpo_megatron.config import ParallelConfig
from tests.actor import cases, overlap
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(1000)
LAYOUTS = {
    2: [{"data": 2}, {"data": 2, "expert": 2, "recompute": "full"}, {"context": 2, "expert": 2}],
    4: [{"data": 4, "expert": 2, "distributed_optimizer": True}],
}
SIMPLER = [{"data": 2, "expert": 2}, {"data": 2, "expert": 2, "distributed_optimizer": True}]
"""Layouts of two ranks whose parts are also in those above."""
SPLITS = [*LAYOUTS.items(), pytest.param(2, SIMPLER, marks=pytest.mark.slow_campaign)]


@pytest.mark.parametrize(("ranks", "layouts"), SPLITS, ids=["2", "4", "simpler"])
def test_overlap_changes_no_update_of_a_mixture(ranks: int, layouts: list[dict[str, Any]]) -> None:
    jobs = [cases.job(ParallelConfig(**fields)) for fields in layouts]
    run_ranks(overlap.check, [(job, cases.QWEN3_MOE) for job in jobs], ranks=ranks)
