"""Gradients are reduced during the last backward pass, also those of experts and packs without tokens.

The distributed optimizer gathers new weights during the next forward pass. test_te_emulation.py has the same test for
TE's grouped experts.
"""

from typing import Any

import pytest

from arpo_megatron.config import ParallelConfig
from arpo_megatron.models.spec import ModelSpec
from tests.actor import cases, overlap
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(1000)
MIXTURE, DENSE = cases.QWEN3_MOE, cases.QWEN2
CASES = {
    2: [
        (MIXTURE, {"data": 2}),
        (MIXTURE, {"data": 2, "expert": 2, "recompute": "full"}),
        (MIXTURE, {"context": 2, "expert": 2}),
        (DENSE, {"data": 2, "distributed_optimizer": True}),  # the head reads the weight that the embedding waited for
    ],
    4: [(MIXTURE, {"data": 4, "expert": 2, "distributed_optimizer": True})],
}
SIMPLER = [(MIXTURE, {"data": 2, "expert": 2}), (MIXTURE, {"data": 2, "expert": 2, "distributed_optimizer": True})]
"""Layouts of two ranks whose parts are also in those above."""
SPLITS = [*CASES.items(), pytest.param(2, SIMPLER, marks=pytest.mark.slow_campaign)]


@pytest.mark.parametrize(("ranks", "own"), SPLITS, ids=["2", "4", "simpler"])
def test_overlap_changes_no_update(ranks: int, own: list[tuple[ModelSpec, dict[str, Any]]]) -> None:
    jobs = [(cases.job(ParallelConfig(**fields)), spec) for spec, fields in own]
    run_ranks(overlap.check, jobs, ranks=ranks)
