"""Seconds of the passes over a step's trees by part, computed by hand."""

from dataclasses import replace

import pytest

from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.jobs import resolve
from arpo_megatron.models.known import KNOWN_MODELS
from arpo_megatron.packing.balance import CostModel
from arpo_megatron.packing.packs import pack_batch, pack_trees, rank_costs, rank_groups, report_packs
from arpo_megatron.plan import GPUS, plan
from arpo_megatron.plan.kernels import backward_bytes, forward_bytes
from arpo_megatron.plan.slowest_rank import TreeSize, most_work, slowest_rank
from arpo_megatron.plan.synthetic_trees import MIXES, Mix
from arpo_megatron.plan.workload import typical

H100 = GPUS["h100-80"]
PRODUCT, ATTENTION, MEMORY = 0.6 * 989e12, 0.3 * 989e12, 0.7 * 3.35e12


def own_trees(recipe: str, *overrides: str) -> float:
    job = resolve.resolve(recipe, overrides=overrides)
    update = job.train.tasks_per_step // job.algorithm.minibatches
    spec = KNOWN_MODELS[job.model.hub_id or ""]
    return job.algorithm.minibatches * slowest_rank(job, spec, typical(job), update)


@pytest.mark.parametrize("recipe", ["deepsearch_14b", "deepsearch_14b+fp8", "moe_30b_a3b"])
def test_products_of_a_forward_pass(recipe: str) -> None:
    """With FP8, head and edge layers stay in bfloat16; only experts are narrow, and one rank has 1.3 times the mean."""
    job = resolve.resolve(recipe, overrides=["parallel.pipeline=1"])
    spec = KNOWN_MODELS[job.model.hub_id or ""]
    packing = typical(job).packing(job, spec)
    edges = 2 / spec.layers if "fp8" in recipe else 1.0
    product = edges / PRODUCT + (1 - edges) / (1979e12 * 0.4)
    mlp = 3 * spec.hidden * spec.ffn * product
    if spec.experts is not None:
        mlp = 1.3 * mlp * spec.experts.top_k / 0.5 + spec.hidden * spec.experts.count * product
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    matrices = 2 * packing.computed * (2 * spec.hidden * (queries + keys) * product + mlp)
    own = own_trees(recipe, "parallel.pipeline=1") / job.parallel.tensor
    found = plan(job, H100).seconds_by_part["logprobs"]
    assert found["matrix_products"] == pytest.approx(own * spec.layers * matrices, rel=1e-4)
    assert found["attention"] == pytest.approx(own * spec.layers * 4 * queries * packing.pairs / ATTENTION, rel=1e-4)
    head = 2 * spec.hidden * spec.vocabulary / PRODUCT + 2 * spec.vocabulary / MEMORY
    assert found["head"] == pytest.approx(own * packing.targets * head, rel=1e-4)


def test_parts_of_an_update() -> None:
    """A backward pass has twice the products, and here repeats 10 of 40 layers; the head repeats its logits."""
    layout = ["parallel.tensor=4", "parallel.recompute=full", "parallel.recompute_layers=10"]
    job = resolve.resolve("deepsearch_14b", overrides=layout)
    spec, own = KNOWN_MODELS["Qwen/Qwen3-14B"], own_trees("deepsearch_14b", *layout)
    packing = typical(job).packing(job, spec)
    parts = plan(job, H100).seconds_by_part
    old, update = parts["logprobs"], parts["update"]
    for part in ("attention", "matrix_products"):
        assert update[part] == pytest.approx(3.25 * old[part])
    one = sum(forward_bytes(spec, job.parallel, 2).values())
    back = sum(backward_bytes(spec, job.parallel, 2).values())
    tokens = own * spec.layers * packing.computed
    assert old["memory_bound_kernels"] == pytest.approx(tokens * one / MEMORY)
    assert update["memory_bound_kernels"] == pytest.approx(tokens * (1.25 * one + back) / MEMORY)
    assert update["tensor_parallelism"] == pytest.approx(2.25 * old["tensor_parallelism"])
    products, rows = own * packing.targets * 2 * spec.hidden * spec.vocabulary / 4 / PRODUCT, spec.vocabulary / 4
    packs = own * packing.packs
    assert packs > job.algorithm.minibatches
    traffic = own * packing.targets * 3 * 2 * rows + packs * 32 * rows * spec.hidden
    assert update["head"] == pytest.approx(4 * products + traffic / MEMORY, rel=1e-4)


def test_head_is_on_the_last_stage_and_bubbles_are_those_of_layers() -> None:
    """The stages but one wait for the layers of a group; interleaved ones wait for a part of them."""
    one, four, interleaved = (
        plan(
            resolve.resolve(
                "deepsearch_14b",
                overrides=["parallel.tensor=4", "parallel.data=1", "parallel.recompute=none",
                           "parallel.recompute_layers=null", "train.group_tokens=8192", *more],
            ),
            H100,
        ).seconds_by_part["logprobs"]
        for more in ([], ["parallel.pipeline=4"], ["parallel.pipeline=4", "parallel.virtual_pipeline=2"])
    )  # fmt: skip
    assert "pipeline_bubble" not in one
    job = resolve.resolve("deepsearch_14b", overrides=["parallel.pipeline=4", "train.group_tokens=8192"])
    spec = KNOWN_MODELS["Qwen/Qwen3-14B"]
    packing = typical(job).packing(job, spec)
    layers = sum(seconds for name, seconds in four.items() if name not in ("head", "pipeline_bubble"))
    # One data-parallel rank has all trees. The tree is cut for groups, which repeat ancestors.
    updates, groups = job.algorithm.minibatches, job.train.tasks_per_step * packing.groups
    assert four["pipeline_bubble"] == pytest.approx(3 * layers * updates / groups)
    assert interleaved["pipeline_bubble"] == pytest.approx(four["pipeline_bubble"] / 2)
    assert four["head"] == pytest.approx(one["head"])
    whole = typical(job).packing(replace(job, parallel=replace(job.parallel, pipeline=1)), spec).computed
    assert packing.computed > whole
    share = packing.computed / whole / 4
    assert four["matrix_products"] == pytest.approx(one["matrix_products"] * share, rel=1e-4)


@pytest.mark.parametrize("limit", ["8192", "32768", "null"])
def test_groups_of_a_pipeline_are_those_of_the_trainer(limit: str) -> None:
    """The limit of the groups' size allows larger groups, but smaller ones are faster here."""
    job = resolve.resolve("reasoning_3b+16nodes", overrides=["parallel.data=1", f"train.group_tokens={limit}"])
    spec, work = KNOWN_MODELS[job.model.hub_id or ""], typical(job)
    job = replace(job, train=replace(job.train, tasks_per_step=4 * job.algorithm.minibatches))
    trees = 2 * work.trees
    packs = pack_batch(trees, supervised_credit(trees), job, spec)
    found = work.packing(job, spec)
    assert found.computed == pytest.approx(sum(map(len, packs)) / 4)
    assert found.groups == pytest.approx(len(rank_groups(packs, 0)) / 4)
    assert found.computed > 1.05 * work.unique, "smaller groups repeat ancestors"


def test_slowest_rank_has_the_costliest_share() -> None:
    costs = [5.0, 4.0, 3.0, 3.0, 3.0]
    assert most_work(costs, 1, lockstep=False) == 18
    assert most_work(costs, 2, lockstep=False) == 10, "5 + 3 against 4 + 3 + 3"
    assert most_work(costs, 5, lockstep=False) == most_work(costs, 8, lockstep=False) == 5
    assert most_work(costs, 2, lockstep=True) == 5 + 3 + 3, "in every pass the costlier tree"


def test_slowest_rank_of_equal_trees_has_the_mean_and_of_different_ones_more() -> None:
    job = resolve.resolve("deepsearch_14b")
    spec, work = KNOWN_MODELS["Qwen/Qwen3-14B"], typical(job)
    same = replace(work, family=Mix(samples=1, initial=1, calls=0, prompt=100, segment=(1, 1), result=(1, 1)))
    four = replace(job, parallel=replace(job.parallel, data=4))
    assert slowest_rank(four, spec, same, 16) == pytest.approx(4)
    assert 4 < slowest_rank(four, spec, work, 16) < 4.5
    assert slowest_rank(replace(four, parallel=replace(four.parallel, data=1)), spec, work, 16) == pytest.approx(16)


def test_size_of_a_tree_is_that_of_its_packs_and_ranks_are_divided_as_in_training() -> None:
    trees = [MIXES["reasoning"].tree(seed, 64) for seed in range(12)]
    spec = KNOWN_MODELS["Qwen/Qwen3-8B"]
    cost = CostModel.of(spec)
    sizes = [TreeSize.of(tree) for tree in trees]
    for tree, size in zip(trees, sizes, strict=True):
        (pack,) = pack_trees([tree], supervised_credit([tree]), token_budget=10**6)
        assert (size.tokens, size.pairs, size.targets) == (len(pack), pack.attention_pairs, len(pack.predictors))
    packs = pack_trees(trees, supervised_credit(trees), token_budget=10**5, ranks=4, share_prompt=False, cost=cost)
    slowest = most_work([cost.cost(s.tokens, s.pairs, s.targets) for s in sizes], 4, lockstep=False)
    assert slowest == pytest.approx(max(rank_costs(packs, 4, cost)))
    assert report_packs(packs, trees, ranks=4, cost=cost).imbalance > 0
