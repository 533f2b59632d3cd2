"""torchrun script of test_experts.py: one update of a mixture of experts in several layouts of two ranks.

Argument: a directory with `cases.json` (layouts) and the weights of one rank as a Hugging Face directory, `model`.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.algorithms.credit import TreeCredit
from arpo_megatron.config import JobConfig, ModelConfig, OptimizerConfig, ParallelConfig
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.tree import RolloutTree
from arpo_megatron.weights.export import hf_tensors
from tests.actor import cases
from tests.actor.cases import join

COEFFICIENT = 0.5


def new_actor(layout: ParallelConfig, path: Path | None) -> Actor:
    job = JobConfig(
        name="test",
        model=ModelConfig(path=Path("not read here"), dtype="float32", router_aux_loss=COEFFICIENT),
        parallel=layout,
    )
    return Actor(job, cases.QWEN3_MOE, path, optimizer=OptimizerConfig(lr=1e-2), total_updates=1)


def weights(actor: Actor) -> dict[str, torch.Tensor]:
    """On the controller, whole and by Hugging Face names."""
    return {name: tensor.clone() for name, tensor in hf_tensors(actor.chunks, actor.spec)}


def found(actor: Actor) -> dict[str, Any]:
    """Gradients of policy and router together, then the weights after an update, and the figures of the experts.

    The gradients with replayed routes come first.
    """
    forest, credits = cases.minibatch(3, count=5)
    layout = actor.config.parallel
    replayed = gradients(actor, [cases.routed(tree, cases.other_routes(tree)) for tree in forest], credits)
    differing = actor.expert_balance.differing
    own = gradients(actor, forest, credits)
    packs = pack_trees(forest, credits, token_budget=50, ranks=layout.data, inherit=layout.nested_packs)
    actor.logprobs(packs)
    stats = actor.update(packs, [pack.sampling_logprobs for pack in packs])
    figures = [stats.expert_busiest, stats.expert_loss, differing]
    return {"replayed": replayed, "gradients": own, "weights": weights(actor), "balance": figures}


def gradients(actor: Actor, forest: list[RolloutTree], credits: list[TreeCredit]) -> dict[str, torch.Tensor]:
    """Those of a minibatch, by Hugging Face names."""
    layout = actor.config.parallel
    packs = pack_trees(forest, credits, token_budget=50, ranks=layout.data, inherit=layout.nested_packs)
    actor.logprobs(packs)  # measures the load
    actor.accumulate(packs, [pack.sampling_logprobs for pack in packs])
    before = [parameter.detach().clone() for parameter in actor.model.parameters()]
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.copy_(parameter.main_grad)
        found = weights(actor)
        for parameter, value in zip(actor.model.parameters(), before, strict=True):
            parameter.copy_(value)
    return found


def start(root: Path) -> dict[str, Any]:
    """On one rank: random weights, saved, and what comes of them."""
    torch.manual_seed(11)
    actor = new_actor(ParallelConfig(), None)
    with torch.no_grad():
        for parameter in actor.model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    (root / "model").mkdir()
    save_file({name: t.contiguous() for name, t in weights(actor).items()}, root / "model/model.safetensors")
    return found(new_actor(ParallelConfig(), root / "model"))


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name, fields in json.loads((root / "cases.json").read_text()).items():
        layout = ParallelConfig(**fields)
        join(layout)
        results = found(new_actor(layout, root / "model"))
        if parallel.is_rank_zero():
            torch.save(results, root / f"{name}.pt")
        dist.barrier()
    parallel.destroy()


if __name__ == "__main__":
    main()
