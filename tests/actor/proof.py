"""torchrun script of test_exactness.py: the gradient of one minibatch in several layouts of 2 or 4 ranks.

Arguments: a directory. `cases.json` there names layouts; weights are those of the Hugging Face directories in it. Rank
0 writes for every layout, family and packing the loss and the gradients of all parameters, by Hugging Face names.
"""

import json
import sys
from pathlib import Path

import cases
import torch
import torch.distributed as dist
from layouts import join

from arpo_megatron.actor import attention, parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.attention import share_blocks
from arpo_megatron.actor.balance import CostModel
from arpo_megatron.actor.packing import pack_trees
from arpo_megatron.config import AlgorithmConfig, OptimizerConfig, ParallelConfig
from arpo_megatron.weights.export import hf_tensors

CLIP = AlgorithmConfig(clip_low=0.2, clip_high=0.28, dual_clip=1.5)
PACKINGS = {"whole": 10**6, "several": 120, "cut": 24}
"""Token budgets; a tree has about 45 tokens."""
MINIBATCH = 3


def gradient(actor: Actor, budget: int) -> dict[str, torch.Tensor]:
    """The loss, and on the leader all gradients, whole."""
    forest, _, credits = cases.proof_forest(MINIBATCH)
    layout = actor.config.parallel
    packs = pack_trees(forest, credits, token_budget=budget, ranks=layout.data, inherit=layout.nested_packs)
    cost = CostModel.of(actor.shape)
    shares = [share_blocks(pack.subtree_end, pack.inherited, layout.context, cost) for pack in packs if pack.inherited]
    assert not shares or any(map(all, shares)), "no cut pack has queries on all context ranks"
    rows = actor.accumulate(packs, [pack.sampling_logprobs for pack in packs])
    loss = actor._stats(rows, 0.0, skipped=False).loss
    before = [[p.detach().clone() for p in chunk.parameters()] for chunk in actor.chunks]
    with torch.no_grad():
        # Export knows where every piece of every tensor is: let it gather the gradients in the weights' places.
        for chunk in actor.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
        found = {name: tensor.clone() for name, tensor in hf_tensors(actor.chunks, actor.shape)}
        for chunk, kept in zip(actor.chunks, before, strict=True):
            for parameter, value in zip(chunk.parameters(), kept, strict=True):
                parameter.copy_(value)
    return {**found, "loss": torch.tensor(loss)}


def main() -> None:
    root = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name, (families, fields) in json.loads((root / "cases.json").read_text()).items():
        layout = ParallelConfig(**fields)
        join(layout)
        if layout.context > 1:  # blocks as small as the trees, so that all ranks have some
            attention.MAX_BLOCK, attention.CHAIN_STEP, attention.CALL_COST_PAIRS = 8, 4, 1
        for family in families:
            job = cases.job(layout, algorithm=CLIP)
            actor = Actor(job, cases.SHAPES[family], root / family, optimizer=OptimizerConfig(), total_updates=1)
            results = {packing: gradient(actor, budget) for packing, budget in PACKINGS.items()}
            if parallel.is_leader():
                torch.save(results, root / f"{name}.{family}.pt")
            dist.barrier()
    parallel.destroy()


if __name__ == "__main__":
    main()
