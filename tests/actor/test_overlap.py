"""A mixture's gradients are reduced during its last backward pass, also those of experts and packs without tokens.

The distributed optimizer gathers new weights during the next forward pass.
"""

import pytest

from arpo_megatron.config import ParallelConfig
from tests.actor import cases, overlap
from tests.ranks import emulated_ranks, run_ranks

pytestmark = pytest.mark.timeout(1000)
LAYOUTS = {
    2: [
        {"data": 2},
        {"data": 2, "expert": 2},
        {"data": 2, "expert": 2, "distributed_optimizer": True},
        {"data": 2, "expert": 2, "recompute": "full"},
        {"context": 2, "expert": 2},
    ],
    4: [{"data": 4, "expert": 2, "distributed_optimizer": True}],
}


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_overlap_changes_no_update_of_a_mixture(ranks: int) -> None:
    jobs = [cases.job(ParallelConfig(**fields)) for fields in LAYOUTS[ranks]]
    run_ranks(overlap.check, [(job, cases.QWEN3_MOE) for job in jobs], ranks=ranks)


def test_overlap_changes_no_update_of_grouped_experts() -> None:
    with emulated_ranks() as run:
        run("overlapped", ranks=2)
