"""`arpo bench pipeline` on small trees: both sides have the same gradient, and one of them repeats ancestors."""

import pytest

from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.bench.pipeline import SPEC, bench_pipeline
from arpo_megatron.packing.balance import CostModel
from arpo_megatron.packing.layout import TreePack
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.plan.synthetic_trees import Mix

BUDGET = 256


def test_both_sides_have_the_same_gradient_and_one_repeats_ancestors() -> None:
    small = Mix(samples=6, initial=3, calls=2, prompt=40, segment=(5, 30), result=(5, 30))
    one, three = bench_pipeline(small, [1, 3], [BUDGET], seconds=0.0)["rows"]
    tree = small.tree(0, SPEC.vocabulary)
    packs = pack_trees([tree], supervised_credit([tree]), token_budget=BUDGET, inherit=False)
    computed = sum(map(len, packs))
    assert one["whole"].items() >= {"groups": 1, "largest_group": tree.unique_tokens, "repeated_share": 0}.items()
    assert one["repeating"].items() >= {"groups": len(packs), "largest_group": max(map(len, packs))}.items()
    assert one["repeating"]["repeated_share"] == pytest.approx(1 - tree.unique_tokens / computed, abs=1e-4)
    assert one["repeating"]["repeated_share"] > 0
    assert (one["trees"], three["trees"], three["whole"]["groups"]) == (1, 3, 3)
    for row in (one, three):
        assert row["gradients_differ_by"] < 1e-5
        assert row["repeating_over_whole"] > 0
    # The stages compute one whole tree in turn. In groups only the largest is computed by one stage alone.
    (whole,) = work(pack_trees([tree], supervised_credit([tree]), token_budget=10**9))
    parts = work(packs)
    assert one["planned"] == pytest.approx((sum(parts) + max(parts)) / (2 * whole), abs=1e-3)


def work(packs: list[TreePack]) -> list[float]:
    cost = CostModel.of(SPEC)
    return [cost.cost(len(pack), pack.attention_pairs, len(pack.predictors)) for pack in packs]
