"""What a step will be made of: trees as the job will grow them, drawn and packed by the trainer's own code.

How long real responses are nobody knows before a run, so two forests are drawn: `typical` for time, with trajectories
half as long as allowed, and `largest` for memory, with every trajectory as long as allowed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean

from arpo_megatron.algorithms.branching import initial_trajectories
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import JobConfig
from arpo_megatron.packing.packs import TreePack, pack_trees, report_packs
from arpo_megatron.plan.synthetic_trees import Mix
from arpo_megatron.tree import Role, RolloutTree

TYPICAL_FILL = 0.5
"""Of the longest response that is allowed: what responses fill in the mean. An assumption."""
TOOL_SHARE = 0.4
"""Of a response: what tool results fill. An assumption; the mixes of `arpo bench pack` have 0.35 and 0.77."""
TOOL_S = 2.0
"""Of a tool call; on a path they wait for each other."""
SEEDS = (0, 1)
"""Of the trees that are drawn."""
FORK_PROBABILITY = 0.5
"""After a tool result, while the budget lasts: the released code's chance at an unchanged entropy."""


@dataclass(frozen=True, slots=True)
class Packing:
    """A tree's packs, in tokens unless said otherwise; means, but `longest`.

    Attributes:
        computed: by the trainer, repeated ancestors included.
        pairs: query-key pairs under the mask.
        targets: predicted tokens.
        longest: most keys of a pack, inherited ones included.
    """

    computed: float
    pairs: float
    targets: float
    longest: int


@dataclass(frozen=True, slots=True)
class Workload:
    """One task's tree: means over several.

    Attributes:
        trees: that the figures are of.
        sampled: MODEL tokens, each once.
        prefilled: tokens of prompt and tool results, each once.
        unique: tokens, each once.
        depth: mean number of tokens before a sampled one.
        trajectories: leaves.
        tools_s: seconds of tool calls that wait for each other.
        straggler: tokens that the longest trajectory of a step samples one after the other.
        bound: tokens of the largest tree that there can be.
    """

    trees: tuple[RolloutTree, ...]
    sampled: float
    prefilled: float
    unique: float
    depth: float
    trajectories: int
    tools_s: float
    straggler: int
    bound: int

    def packing(self, budget: int, *, nested: bool) -> Packing:
        """The tree in packs of so many tokens; `nested`: cuts inherit ancestors."""
        return _packing(self.trees, budget, nested)


def typical(config: JobConfig) -> Workload:
    """For time."""
    return _drawn(_mix(config, TYPICAL_FILL), longest_response(config))


def largest(config: JobConfig) -> Workload:
    """For memory."""
    return _drawn(_mix(config, 1.0), longest_response(config))


def grown(trees: Sequence[RolloutTree]) -> Workload:
    """Of a run's trees: what is left of a plan's error with it is not that of the assumptions above."""
    paths = [[tree.segments[index] for index in tree.path(leaf)] for tree in trees for leaf in tree.leaves()]
    return _of(
        tuple(trees),
        trajectories=round(len(paths) / len(trees)),
        tools_s=max(sum(segment.tool.seconds for segment in path if segment.tool is not None) for path in paths),
        straggler=max(sum(len(segment) for segment in path if segment.role is Role.MODEL) for path in paths),
        bound=max(tree.unique_tokens for tree in trees),
    )


def longest_response(config: JobConfig) -> int:
    """Tokens of a response as long as allowed."""
    return min(config.rollout.max_response_tokens, config.model.max_length - _prompt(config))


def _prompt(config: JobConfig) -> int:
    return config.data.max_prompt_tokens if config.data.kind == "arpo_parquet" else 64


def _mix(config: JobConfig, fill: float) -> Mix:
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


def _around(tokens: float) -> tuple[int, int]:
    return max(1, round(tokens)), max(1, round(tokens))


@cache
def _drawn(mix: Mix, straggler: int) -> Workload:
    # Of the largest tree every trajectory is fresh, only the prompt shared. So many tokens' activations may live at
    # once where packs of a cut tree wait for those that inherit from them: of 200 drawn trees of six calls, in packs
    # of a tenth, the worst had 0.84 of this.
    bound = mix.prompt + mix.samples * ((mix.calls + 1) * mix.segment[1] + mix.calls * mix.result[1])
    trees = tuple(mix.tree(seed, 64) for seed in SEEDS)
    return _of(trees, trajectories=mix.samples, tools_s=mix.calls * TOOL_S, straggler=straggler, bound=bound)


def _of(trees: tuple[RolloutTree, ...], *, trajectories: int, tools_s: float, straggler: int, bound: int) -> Workload:
    sampled = sum(len(segment) for tree in trees for segment in tree.segments if segment.role is Role.MODEL)
    unique = sum(tree.unique_tokens for tree in trees)
    depth = 0.0
    for tree in trees:
        starts = [0] * len(tree.segments)
        for index, segment in enumerate(tree.segments):
            starts[index] = starts[segment.parent] + len(tree.segments[segment.parent]) if segment.parent >= 0 else 0
            if segment.role is Role.MODEL:
                depth += len(segment) * (starts[index] + len(segment) / 2)
    return Workload(
        trees=trees,
        sampled=sampled / len(trees),
        prefilled=(unique - sampled) / len(trees),
        unique=unique / len(trees),
        depth=depth / max(1, sampled),
        trajectories=trajectories,
        tools_s=tools_s,
        straggler=straggler,
        bound=bound,
    )


@cache
def _packing(trees: tuple[RolloutTree, ...], budget: int, nested: bool) -> Packing:
    forests: list[list[TreePack]] = [
        pack_trees([tree], supervised_credit([tree]), token_budget=budget, inherit=nested) for tree in trees
    ]
    reports = [report_packs(packs, [tree]) for packs, tree in zip(forests, trees, strict=True)]
    every = [pack for packs in forests for pack in packs]
    return Packing(
        computed=mean(found.computed for found in reports),
        pairs=sum(pack.attention_pairs for pack in every) / len(trees),
        targets=sum(len(pack.predictors) for pack in every) / len(trees),
        longest=max(len(pack.token_ids) for pack in every),
    )
