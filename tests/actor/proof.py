"""Gradients and updates of small problems in several layouts; the ranks of test_exactness.py run it."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from arpo_megatron.actor import attention_plan, parallel
from arpo_megatron.actor.actor import Actor
from arpo_megatron.actor.attention_plan import share_blocks
from arpo_megatron.actor.optimizer import gradient_norm
from arpo_megatron.actor.optimizer_state import weight_states
from arpo_megatron.actor.stages import StageCommunicator
from arpo_megatron.algorithms.credit import TreeCredit
from arpo_megatron.config import AlgorithmConfig, OptimizerConfig, ParallelConfig
from arpo_megatron.config import validation as rules
from arpo_megatron.packing.balance import CostModel
from arpo_megatron.packing.layout import lay_out
from arpo_megatron.packing.packs import TreePack, pack_trees, report_packs
from arpo_megatron.trainer.batch import Batch, ReadyUpdate, broadcast_batches, finish_credit
from arpo_megatron.tree import RolloutTree
from arpo_megatron.weights.export import hf_tensors
from arpo_megatron.weights.load import load_hf
from tests.actor import cases
from tests.actor.cases import join

WEIGHT = 2.0**-7
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 1.5}
TREE_BUDGETS = {"several": 120, "cut": 24, "cut in groups": 24}
"""Token budgets of packings of trees, which have about 45 tokens."""
GROUPS = {"cut in groups": 36}
"""Largest number of tokens of a group of packs; longer trees are cut into groups that repeat ancestors."""
FLAT_BUDGET = 90
PADDED = 64
"""Each trajectory's pack is padded to a multiple of this many tokens."""
WEIGHT_LIMIT = 1.2
SYSTEM = 20
ADAMW = OptimizerConfig(
    lr=1e-2, schedule="cosine", warmup_fraction=0.2, weight_decay=0.1, beta1=0.8, beta2=0.9, clip_grad=0.05, eps=1e-5
)
"""With a small eps, an entry whose gradient is nearly 0 moves as far as others, so its rounding error shows in full."""
UPDATES = 10
TAKEN = 4
"""Updates that are made of the schedule's `UPDATES`."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Trees, a loss, and the ways to pack them."""

    forest: tuple[RolloutTree, ...]
    algorithm: AlgorithmConfig
    packings: tuple[str, ...]
    """Names of `TREE_BUDGETS`, or `flat` (each trajectory is a tree), or `padded` (each trajectory is a pack)."""
    balance: float = 0.0
    """Coefficient of the router's load-balancing loss."""
    stale: bool = False
    """The old log-probs come from a pass with other weights. Otherwise the sampling log-probs take their place."""
    routes: tuple[list[np.ndarray], ...] | None = None
    """Experts to replay, per tree and segment."""

    @property
    def advantages(self) -> list[np.ndarray]:
        """Advantages of the leaves of each tree."""
        return [cases.dyadic_advantages(tree, index) for index, tree in enumerate(self.forest)]


def _replayed() -> Problem:
    forest = (*(cases.grown(90 + i) for i in range(2)), cases.odd(8))
    routes = tuple(cases.other_routes(tree, seed, cases.SPECS["experts"]) for seed, tree in enumerate(forest))
    return Problem(
        forest=tuple(cases.routed(tree, known) for tree, known in zip(forest, routes, strict=True)),
        algorithm=AlgorithmConfig(**CLIP),
        packings=("several", "cut"),
        routes=routes,
    )


PROBLEMS = {
    "clip": Problem(
        forest=(*(cases.grown(30 + i) for i in range(2)), cases.odd(3)),
        algorithm=AlgorithmConfig(**CLIP),
        packings=("several", "cut", "cut in groups"),
    ),
    "all terms": Problem(
        forest=(*(cases.random_tree(52 + i) for i in range(3)), cases.grown(5), cases.odd(5)),
        algorithm=AlgorithmConfig(**CLIP, kl_coefficient=0.3, entropy_coefficient=0.2),
        balance=0.5,
        packings=("flat", "padded", "cut"),
    ),
    "sequence": Problem(
        forest=(*(cases.grown(70 + i) for i in range(2)), cases.odd(6)),
        algorithm=AlgorithmConfig(
            loss="gspo",
            clip_low=0.1,
            clip_high=0.2,
            dual_clip=None,
            sampling_correction="geometric",
            sampling_ratio_max=WEIGHT_LIMIT,
        ),
        packings=("several", "cut"),
        stale=True,
    ),
    "weighted": Problem(
        # Packs compute the system prompt once, for several trees.
        forest=(*(cases.grown(80 + i, samples=4, system=SYSTEM) for i in range(4)), cases.odd(7)),
        algorithm=AlgorithmConfig(**CLIP, sampling_correction="tis", sampling_ratio_max=WEIGHT_LIMIT),
        packings=("several", "cut"),
        stale=True,
    ),
    "replayed": _replayed(),
}


def packed(problem: Problem, packing: str, layout: ParallelConfig) -> list[TreePack]:
    ranks = layout.data
    pairs = list(zip(problem.forest, problem.advantages, strict=True))
    if packing in TREE_BUDGETS:
        credits = [cases.plain_credit(tree, advantages, WEIGHT) for tree, advantages in pairs]
        return pack_trees(
            problem.forest,
            credits,
            token_budget=TREE_BUDGETS[packing],
            ranks=ranks,
            group_tokens=GROUPS.get(packing),
            lockstep=layout.expert > 1,
        )
    flat: list[tuple[RolloutTree, TreeCredit]] = [
        (single, cases.plain_credit(single, np.array([advantage]), WEIGHT))
        for tree, advantages in pairs
        for single, advantage in zip(cases.flat_trees(tree), advantages, strict=True)
    ]
    if packing == "padded":
        return [replace(lay_out(index, *pair), data_rank=index % ranks) for index, pair in enumerate(flat)]
    singles, credits = zip(*flat, strict=True)
    return pack_trees(singles, credits, token_budget=FLAT_BUDGET, ranks=ranks, share_prompt=False)


def small_blocks(layout: ParallelConfig) -> AbstractContextManager[Any]:
    """Divide attention into blocks as small as the trees inside the context, so that all context ranks have some."""
    limits = {"MAX_BLOCK": 8, "CHAIN_STEP": 4, "CALL_COST_PAIRS": 1}
    return patch.multiple(attention_plan, **limits) if layout.context > 1 else nullcontext()


@contextmanager
def late_stages() -> Iterator[None]:
    """Inside the context, raise if stages of a pipeline send each other shapes, and let odd stages receive late.

    A stage that frees an output before it is sent, or drops its last send, then sends garbage or nothing.
    """
    shapes = StageCommunicator._communicate_shapes

    def late(self: StageCommunicator, *arguments: Any) -> Any:
        time.sleep(0.003 * (self.pp_group.rank() % 2))
        return shapes(self, *arguments)

    with (
        patch.object(P2PCommunicator, "_communicate_shapes", None),
        patch.object(StageCommunicator, "_communicate_shapes", late),
    ):
        yield


@contextmanager
def padding(packing: str, actor: Actor) -> Iterator[None]:
    """Pad packs of the `padded` packing inside the context, as FP8 would, but further."""
    if packing != "padded":
        yield
        return
    with patch.dict(rules.FP8_TOKENS, none=PADDED):
        assert actor._shard.multiple_of >= PADDED
        yield


def gradient(actor: Actor, problem: Problem, packs: list[TreePack], old: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Return the loss, the router's loss if any, the gradient norm before clipping and, on rank 0, all whole
    gradients."""
    layout = actor.config.parallel
    cost = CostModel.of(actor.spec)
    shares = [share_blocks(pack.subtree_end, pack.inherited, layout.context, cost) for pack in packs if pack.inherited]
    assert not shares or any(map(all, shares)), "no cut pack has queries on all context ranks"
    references = actor.reference_logprobs([packs])
    reference = None if references is None else references[0]
    if problem.stale:
        (batch,) = broadcast_batches([Batch(packs, problem.forest, problem.advantages)])
        ready = finish_credit(actor, batch, old, actor.config, on_policy=False)
    else:
        ready = ReadyUpdate(packs, old, "policy")
    rows = actor.accumulate(ready.packs, ready.old_logprobs, ready.loss, reference_logprobs=reference)
    stats = actor._stats(rows)
    found = {"loss": torch.tensor(ready.statistics.get("loss", stats.loss))}
    if actor.config.model.router_aux_loss:
        found["router loss"] = torch.tensor(stats.expert_loss)
    found["gradient norm"] = torch.tensor(gradient_norm(actor.optimizer))
    if layout.distributed_optimizer:
        gather_gradients(actor)
    before = [[p.detach().clone() for p in chunk.parameters()] for chunk in actor.chunks]
    with torch.no_grad():
        # Export knows where every piece of every tensor is: let it gather the gradients in the weights' places.
        for chunk in actor.chunks:
            for parameter in chunk.parameters():
                parameter.copy_(parameter.main_grad)
        found |= {name: tensor.clone() for name, tensor in hf_tensors(actor.chunks, actor.spec)}
        for chunk, kept in zip(actor.chunks, before, strict=True):
            for parameter, value in zip(chunk.parameters(), kept, strict=True):
                parameter.copy_(value)
    return found


def gather_gradients(actor: Actor) -> None:
    """Gather the gradients of the distributed optimizer: a rank has summed only the ranges of weights that it owns."""
    owned = {id(state.weight): state.span for state in weight_states(actor.optimizer)}
    for parameter in (parameter for chunk in actor.chunks for parameter in chunk.parameters()):
        start, end = owned.get(id(parameter), (0, 0))
        flat = parameter.main_grad.view(-1)
        flat[:start], flat[end:] = 0.0, 0.0
        dense = getattr(parameter, "allreduce", True)  # Megatron's mark: False for experts that are shared out
        group = (
            parallel_state.get_data_parallel_group(with_context_parallel=True)
            if dense
            else parallel_state.get_expert_data_parallel_group()
        )
        dist.all_reduce(flat, group=group)


def on_policy(actor: Actor, packs: list[TreePack]) -> list[list[float]]:
    """Return the largest ratio and k3 of two updates with the log-probs from before the first."""
    old = actor.logprobs(packs)
    updates = [actor.update(packs, old) for _ in range(2)]
    return [[update.ratio_max, update.kl_old] for update in updates]


def solve(root: Path, name: str, layout: ParallelConfig, family: str) -> dict[str, object]:
    """Solve a problem in a layout.

    Returns:
        `gradients` by packing and Hugging Face name, and `ratios` from `on_policy`.
    """
    problem, spec = PROBLEMS[name], cases.SPECS[family]
    balance = 0.0 if spec.experts is None else problem.balance
    job = cases.job(layout, balance=balance, algorithm=problem.algorithm)
    keep = problem.algorithm.kl_coefficient > 0  # the weights that the actor begins with
    actor = Actor(
        job, spec, root / f"{family} first", optimizer=OptimizerConfig(lr=1e-2), total_updates=2, keep_reference=keep
    )
    packs = {packing: packed(problem, packing, layout) for packing in problem.packings}
    old = {
        packing: actor.logprobs(own) if problem.stale else [pack.sampling_logprobs for pack in own]
        for packing, own in packs.items()
    }
    load_hf(actor.chunks, spec, root / family)
    if name == "weighted":
        assert report_packs(packs["several"], problem.forest).saved_by_shared_prompt > 0
    if balance:
        actor.logprobs(packs["cut"])  # measures the load
    gradients = {}
    for packing, own in packs.items():
        with padding(packing, actor):
            gradients[packing] = gradient(actor, problem, own, old[packing])
    return {"gradients": gradients, "ratios": on_policy(actor, packs["cut"]) if name == "all terms" else None}


def train(root: Path, layout: ParallelConfig, family: str) -> dict[str, object]:
    """Return the weights after `TAKEN` updates by Hugging Face name, and gradient norm and learning rate of each
    update."""
    spec = cases.SPECS[family]
    job = cases.job(layout, algorithm=AlgorithmConfig(**CLIP))
    actor = Actor(job, spec, root / family, optimizer=ADAMW, total_updates=UPDATES)
    rows = []
    for update in range(TAKEN):
        packs = pack_trees(
            *cases.batch(update),
            token_budget=TREE_BUDGETS["cut" if update % 2 else "several"],
            ranks=layout.data,
            lockstep=layout.expert > 1,
        )
        stats = actor.update(packs, [pack.sampling_logprobs for pack in packs])
        rows.append((stats.grad_norm, stats.lr))
    return {"weights": {name: t.clone() for name, t in hf_tensors(actor.chunks, spec)}, "rows": rows}


def compute(root: Path, layouts: dict[str, dict[str, Any]], runs: dict[str, list[tuple[str, str]]]) -> None:
    """Write `{layout}.{problem}.{family}.pt` under `root` for each layout's runs.

    Args:
        root: has a Hugging Face directory of weights for each family.
        layouts: fields of `ParallelConfig` by the layout's name.
        runs: problems and families by the layout's name.
    """
    for name, own in runs.items():
        layout = ParallelConfig(**layouts[name])
        join(layout)
        with small_blocks(layout), late_stages():
            for problem, family in own:
                found = train(root, layout, family) if problem == "adamw" else solve(root, problem, layout, family)
                if parallel.is_rank_zero():
                    torch.save(found, root / f"{name}.{problem}.{family}.pt")
                if dist.get_world_size() > 1:
                    dist.barrier()


def compute_and_leave(root: Path, layouts: dict[str, dict[str, Any]], runs: dict[str, list[tuple[str, str]]]) -> None:
    compute(root, layouts, runs)
    parallel.destroy()
