"""torchrun script of test_layouts.py: the same training in several layouts of two ranks.

Arguments: a directory with a checkpoint of one rank (`start`) and room for results. Of each layout: three updates from
that checkpoint and one more after its own checkpoint was loaded again; the leader writes losses.json.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import cases
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from arpo_megatron.actor import parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.packing import pack_trees
from arpo_megatron.config import OptimizerConfig, ParallelConfig

LAYOUTS = {
    "tensor": ParallelConfig(tensor=2),
    "sequence": ParallelConfig(tensor=2, sequence=True),
    "recompute": ParallelConfig(tensor=2, sequence=True, recompute="full"),
    "data": ParallelConfig(data=2),
}
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_fraction=0.2, weight_decay=0.1)
UPDATES = 10


def new_actor(layout: ParallelConfig) -> Actor:
    return Actor(cases.job(layout), cases.QWEN3, None, optimizer=OPTIMIZER, total_updates=UPDATES)


def train(actor: Actor, layout: ParallelConfig, updates: range) -> list[dict[str, float]]:
    """The statistics of the updates, and a sum of the log-probs before each."""
    rows = []
    for seed in updates:
        # Five trees in packs of about two: an odd number, so that two data-parallel ranks have different counts.
        forest, credits = cases.minibatch(seed, count=5)
        packs = pack_trees(forest, credits, token_budget=120, ranks=layout.data)
        before = actor.logprobs(packs)
        stats = actor.update(packs, before if seed % 2 else [pack.sampling_logprobs for pack in packs])
        rows.append({**asdict(stats), "logprobs": float(sum(values.sum(dtype="float64") for values in before))})
    return rows


def join(layout: ParallelConfig) -> None:
    """Megatron's groups anew; torch's own can be made only once under one torchrun."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        # Pipelines keep it in another shape than the other layouts, and no job has both.
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        parallel.lay_out(layout)
        torch.manual_seed(7)
        tensor_parallel.model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    else:
        parallel.initialize(layout, seed=7)


def main() -> None:
    root = Path(sys.argv[1])
    results = {}
    for name, layout in LAYOUTS.items():
        join(layout)
        fresh = train(new_actor(layout), layout, range(1))
        actor = new_actor(layout)
        actor.load(root / "start")
        rows = train(actor, layout, range(3))
        saved = root / name
        if parallel.is_leader():
            saved.mkdir()
        parallel.broadcast_object(None)  # after the directory is there
        cases.save(actor, saved)
        resumed = new_actor(layout)
        resumed.load(saved)
        results[name] = {
            "fresh": fresh,
            "rows": rows,
            "next": train(actor, layout, range(3, 5)),
            "resumed": train(resumed, layout, range(3, 5)),
        }
        if parallel.is_leader():
            (root / "losses.json").write_text(json.dumps(results))
    parallel.destroy()


if __name__ == "__main__":
    main()
