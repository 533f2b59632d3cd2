"""The trees of a step: synthetic trees with the job's limits, packed by the trainer's own code.

The lengths of real responses are unknown before a run. So there are two workloads: `typical` for time, with
trajectories of half the maximal length, and `largest` for memory, with all trajectories at the maximal length.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from statistics import mean

from arpo_megatron.algorithms.branching import initial_trajectories
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import JobConfig
from arpo_megatron.jobs.tool_file import searches_per_s
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.packing.balance import CostModel
from arpo_megatron.packing.packs import (
    TreePack,
    fastest_groups,
    group_limits,
    longest_path,
    pack_trees,
    rank_groups,
    report_packs,
)
from arpo_megatron.plan.synthetic_trees import Mix
from arpo_megatron.tasks.protocols.tools import tool_names
from arpo_megatron.tree import Role, RolloutTree

TYPICAL_FILL = 0.5
"""Mean length of responses as a share of the maximal length. Assumption."""
TOOL_SHARE = 0.4
"""Share of tool results in a response. Assumption; the mixes of `arpo bench pack` have 0.35 and 0.77."""
TOOL_S = 2.0
"""Seconds of a tool call, at most `rollout.tool_timeout_s`; the calls of a path are sequential. Assumption."""
SEEDS = (0, 1)
"""Seeds of the synthetic trees."""
FORK_PROBABILITY = 0.5
"""Probability of a fork after a tool result while there is budget: the released code's at unchanged entropy."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Packs of a tree. Values are means in tokens."""

    computed: float
    """Tokens that the trainer computes, including repeated ancestors."""
    pairs: float
    """Unmasked query-key pairs."""
    targets: float
    """Predicted tokens."""
    packs: float
    """Packs. A tree within the budget is a part of one."""
    groups: float
    """Groups of packs: micro-batches of a pipeline. A tree within the budget is a part of one."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The tree of one task. Values are means over several trees."""

    family: Mix
    """Family of the trees."""
    trees: tuple[RolloutTree, ...]
    sampled: float
    """MODEL tokens, each once."""
    prefilled: float
    """Tokens of prompt and tool results, each once."""
    unique: float
    """All tokens, each once."""
    depth: float
    """Mean number of tokens before a sampled one."""
    trajectories: int
    """Leaves."""
    calls: float
    """Tool calls, each once."""
    tools_s: float
    """Seconds of sequential tool calls, or of a step's web searches at the highest rate of requests if that is more."""
    straggler: int
    """Tokens that a step's longest trajectory samples sequentially."""
    bound: int
    """Tokens of the largest possible tree."""

    def packing(self, config: JobConfig, spec: ModelSpec) -> Packing:
        """Pack the tree as the trainer does in an update: of a pipeline's sizes of groups it takes the fastest."""
        limits = tuple(group_limits(config, longest_path(self.trees)))
        parallel, budget = config.parallel, config.train.token_budget
        own = -(-trees_of_update(config) // parallel.data)
        stages, chunks = parallel.pipeline, parallel.virtual_pipeline
        limit = limits[0]
        if len(limits) > 1:
            limit = _fastest_limit(self.trees, budget, limits, own, stages, chunks, CostModel.of(spec))
        return _packing(self.trees, budget, limit)

    def most_keys(self, config: JobConfig) -> int:
        """Return the largest number of keys of a pack, including inherited ones, in the largest allowed groups."""
        budget = config.train.token_budget
        limit = None if config.parallel.nested_packs else config.train.group_tokens
        return max(len(pack.token_ids) for tree in self.trees for pack in _packs(tree, budget, limit))


def trees_of_update(config: JobConfig) -> int:
    """Return the number of trees (of conversations, for a cold start) of one update."""
    return config.sft.batch if config.sft_only else config.train.tasks_per_step // config.algorithm.minibatches


def typical(config: JobConfig) -> Workload:
    """Return the workload for estimates of time. Raises UserError if `sandbox.file` cannot be used."""
    work = _sample(mix(config, TYPICAL_FILL), longest_response(config), call_seconds(config))
    return replace(work, tools_s=max(work.tools_s, _searching_seconds(config, work.calls)))


def largest(config: JobConfig) -> Workload:
    """Return the workload for estimates of memory."""
    return _sample(mix(config, 1.0), longest_response(config), call_seconds(config))


def call_seconds(config: JobConfig) -> float:
    """Return the seconds that a tool call is assumed to take."""
    return min(TOOL_S, config.rollout.tool_timeout_s)


def _searching_seconds(config: JobConfig, calls: float) -> float:
    """Return the least seconds of a step's web searches, if the calls of a tree are spread evenly over the tools."""
    rate, tools = searches_per_s(config.sandbox), tool_names(config.rollout.tools)
    if rate is None or "search" not in tools:
        return 0.0
    return config.train.tasks_per_step * calls / len(tools) / rate


def longest_response(config: JobConfig) -> int:
    """Return the maximal number of tokens of a response."""
    return min(config.rollout.max_response_tokens, config.model.max_length - _prompt(config))


def _prompt(config: JobConfig) -> int:
    return 64 if config.data.is_generated else config.data.max_prompt_tokens


def mix(config: JobConfig, fill: float) -> Mix:
    """Return the family of a job's trees whose responses have this share of the maximal length."""
    rollout, samples = config.rollout, config.algorithm.group_size
    if config.sft_only:  # one path, no forks
        return Mix(
            samples=1,
            initial=1,
            calls=0,
            prompt=64,
            segment=_around((config.model.max_length - 64) * fill),
            result=(1, 1),
        )
    prompt, room = _prompt(config), longest_response(config) * fill
    calls = rollout.max_tool_calls
    result = min(TOOL_SHARE * room / calls, rollout.max_tool_tokens) if calls else 0.0
    return Mix(
        samples=samples,
        initial=initial_trajectories(config.algorithm),
        calls=calls,
        prompt=round(prompt * fill),
        segment=_around((room - calls * result) / (calls + 1)),
        result=_around(result),
        fork_probability=FORK_PROBABILITY,
    )


def varied(family: Mix) -> Mix:
    """Return the family whose MODEL segments have half to three halves of the length."""
    low, high = family.segment[0] // 2, family.segment[1] * 3 // 2
    return replace(family, segment=(max(1, low), max(1, high)))


def _around(tokens: float) -> tuple[int, int]:
    return max(1, round(tokens)), max(1, round(tokens))


@cache
def _sample(mix: Mix, straggler: int, call_s: float) -> Workload:
    # In the largest tree all trajectories are fresh and share only the prompt. The activations of that many tokens may
    # live at once, because packs of a cut tree wait for those that inherit from them. Of 200 sampled trees with six
    # calls, in packs of a tenth, the worst had 0.84 of this bound.
    bound = mix.prompt + mix.samples * ((mix.calls + 1) * mix.segment[1] + mix.calls * mix.result[1])
    trees = tuple(mix.tree(seed, 64) for seed in SEEDS)
    return _measure(mix, trees, tools_s=mix.calls * call_s, straggler=straggler, bound=bound)


def _measure(family: Mix, trees: tuple[RolloutTree, ...], *, tools_s: float, straggler: int, bound: int) -> Workload:
    sampled = sum(len(segment) for tree in trees for segment in tree.segments if segment.role is Role.MODEL)
    unique = sum(tree.unique_tokens for tree in trees)
    calls = sum(segment.role is Role.TOOL for tree in trees for segment in tree.segments)
    depth = 0.0
    for tree in trees:
        starts = [0] * len(tree.segments)
        for index, segment in enumerate(tree.segments):
            starts[index] = starts[segment.parent] + len(tree.segments[segment.parent]) if segment.parent >= 0 else 0
            if segment.role is Role.MODEL:
                depth += len(segment) * (starts[index] + len(segment) / 2)
    return Workload(
        family=family,
        trees=trees,
        sampled=sampled / len(trees),
        prefilled=(unique - sampled) / len(trees),
        unique=unique / len(trees),
        depth=depth / max(1, sampled),
        trajectories=family.samples,
        calls=calls / len(trees),
        tools_s=tools_s,
        straggler=straggler,
        bound=bound,
    )


@cache
def _packs(tree: RolloutTree, budget: int, limit: int | None) -> list[TreePack]:
    return pack_trees([tree], supervised_credit([tree]), token_budget=budget, group_tokens=limit)


@cache
def _fastest_limit(
    trees: tuple[RolloutTree, ...],
    budget: int,
    limits: tuple[int | None, ...],
    own: int,
    stages: int,
    chunks: int,
    cost: CostModel,
) -> int | None:
    """Return the size of groups that the trainer chooses if each data-parallel rank has `own` trees like these."""

    def pack(limit: int | None) -> list[TreePack]:
        return [pack for tree in islice(cycle(trees), own) for pack in _packs(tree, budget, limit)]

    limit, _ = fastest_groups(pack, limits, 1, stages, chunks, cost)
    return limit


@cache
def _packing(trees: tuple[RolloutTree, ...], budget: int, limit: int | None) -> Packing:
    forests = [_packs(tree, budget, limit) for tree in trees]
    reports = [report_packs(packs, [tree]) for packs, tree in zip(forests, trees, strict=True)]
    every = [pack for packs in forests for pack in packs]
    fills = [min(1.0, sum(map(len, packs)) / budget) for packs in forests]
    return Packing(
        computed=mean(found.computed for found in reports),
        pairs=sum(pack.attention_pairs for pack in every) / len(trees),
        targets=sum(len(pack.predictors) for pack in every) / len(trees),
        packs=mean(len(packs) * fill for packs, fill in zip(forests, fills, strict=True)),
        groups=mean(len(rank_groups(packs, 0)) * fill for packs, fill in zip(forests, fills, strict=True)),
    )
