"""Updates with and without overlap, on ranks of test_overlap.py and test_te_emulation.py."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from megatron.core import tensor_parallel
from pytest import approx

from arpo_megatron.actor import actor as actor_module
from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.optimizer import gradient_buffers
from arpo_megatron.actor.schedule import own_groups
from arpo_megatron.config import JobConfig, OptimizerConfig
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.packs import TreePack, pack_trees
from arpo_megatron.tree import RolloutTree
from tests.actor import cases

BUCKET = 300
"""Parameters that are reduced together; Megatron's default would hold the whole model."""
UPDATES = ((3, 120), (2, 24), (1, 1000), (2, 24))
"""Number of trees and token budget. One pack leaves the other ranks without; small packs accumulate."""


def check(cases_: list[tuple[JobConfig, ModelSpec]]) -> None:
    """Assert that the overlap changes no bit of the weights, for each job."""
    for job, spec in cases_:
        together, apart = (train(job, spec, overlap=overlap) for overlap in (True, False))
        for name, weight in together.items():
            assert torch.equal(weight, apart[name]), (job.parallel, name)
    parallel.destroy()


def train(job: JobConfig, spec: ModelSpec, *, overlap: bool) -> dict[str, torch.Tensor]:
    """Return this rank's weights after some updates, in each of which most experts of a mixture get no tokens."""
    layout = job.parallel
    cases.join(layout)
    tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    torch.manual_seed(7)

    def small(*arguments: Any) -> Any:
        found = gradient_buffers(*arguments)
        assert found.overlap_grad_reduce
        gather = overlap and found.overlap_param_gather
        return replace(found, bucket_size=BUCKET, overlap_param_gather=gather)

    with patch.object(actor_module, "gradient_buffers", small):
        actor = Actor(job, spec, None, optimizer=OptimizerConfig(lr=1e-2), total_updates=len(UPDATES))
    (wrapped,) = actor._wrapped
    wrapped.ddp_config.overlap_grad_reduce = overlap
    model, group_of = wrapped.module, wrapped.param_to_bucket_group
    # The head is gathered alone, so no other layer waits for its weight.
    assert group_of[model.shared_embedding_or_output_weight()] is not group_of[model.decoder.final_layernorm.weight]
    for update, (trees, budget) in enumerate(UPDATES):
        packs = packed(spec, update, trees, token_budget=budget, ranks=layout.data, lockstep=layout.expert > 1)
        empty = sum(index >= len(packs) for group in own_groups(packs, layout) for index in group)
        assert layout.data == 1 or trees > 1 or any(parallel.gather_objects(empty))
        last = update == len(UPDATES) - 1
        stats = actor.update(packs, None, await_weights=last)
        in_flight = overlap and layout.distributed_optimizer and not last
        groups = [*wrapped.bucket_groups, *wrapped.expert_parallel_bucket_groups]
        assert all((group.param_gather_handle is not None) == in_flight for group in groups)
        assert stats.routes_replayed == (None if spec.experts is None else approx(1.0)), (update, stats)
        assert stats.grad_norm > 0, (update, stats)
    assert len(groups) > 4
    assert all(group.is_first_batch != overlap for group in groups), "Megatron has not seen all gradients of a batch"
    return {name: weight.detach().clone() for name, weight in actor.model.named_parameters()}


def packed(spec: ModelSpec, update: int, trees: int, **options: Any) -> list[TreePack]:
    """Return packs. Tokens of a mixture all go to the first experts, in odd updates to the last ones."""
    forest, credits = cases.batch(update, count=trees)
    if spec.experts is None:
        return pack_trees(forest, credits, **options)
    order = np.arange(spec.experts.count)[:: -1 if update % 2 else 1]
    chosen = order[: spec.experts.top_k].astype(np.int16)

    def routes(tree: RolloutTree) -> list[np.ndarray]:
        return [np.tile(chosen, (len(segment), spec.layers, 1)) for segment in tree.segments]

    return pack_trees([cases.routed(tree, routes(tree)) for tree in forest], credits, **options)
