"""What a step will be made of: trees as the job will grow them, drawn and packed by the trainer's own code.

How long real responses are nobody knows before a run, so two forests are drawn: `typical` for time, with trajectories
half as long as allowed, and `largest` for memory, with every trajectory as long as allowed.
"""

from dataclasses import dataclass
from functools import cache
from statistics import mean

from arpo_megatron.actor.packing import TreePack, pack_trees, report
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.bench.mixes import Mix
from arpo_megatron.config import JobConfig
from arpo_megatron.rollout.policies import first_trajectories
from arpo_megatron.tree import Role

TYPICAL_FILL = 0.5
"""Of the longest response that is allowed: what responses fill in the mean. An assumption."""
TOOL_SHARE = 0.4
"""Of a response: what tool results fill. An assumption; the mixes of `arpo bench pack` have 0.35 and 0.77."""
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
    """One task's tree.

    Attributes:
        mix: how it is drawn.
        sampled: MODEL tokens, each once.
        prefilled: tokens of prompt and tool results, each once.
        unique: tokens, each once.
        depth: mean number of tokens before a sampled one.
        trajectories: leaves.
        calls: tool calls on a path.
    """

    mix: Mix
    sampled: float
    prefilled: float
    unique: float
    depth: float
    trajectories: int
    calls: int

    @property
    def bound(self) -> int:
        """Tokens of the largest tree that there can be: every trajectory fresh, only the prompt shared.

        So many tokens' activations may live at once where packs of a cut tree wait for those that inherit from them: of
        200 drawn trees of six calls, in packs of a tenth, the worst had 0.84 of this.
        """
        mix = self.mix
        return mix.prompt + mix.samples * ((mix.calls + 1) * mix.segment[1] + mix.calls * mix.result[1])

    def packing(self, budget: int, *, nested: bool) -> Packing:
        """The tree in packs of so many tokens; `nested`: cuts inherit ancestors."""
        return _packing(self.mix, budget, nested)


def typical(config: JobConfig) -> Workload:
    """For time."""
    return _workload(_mix(config, TYPICAL_FILL))


def largest(config: JobConfig) -> Workload:
    """For memory."""
    return _workload(_mix(config, 1.0))


def longest_response(config: JobConfig) -> int:
    """Tokens of a response as long as allowed."""
    return min(config.rollout.max_response_tokens, config.model.max_length - _prompt(config))


def _prompt(config: JobConfig) -> int:
    return config.data.max_prompt_tokens if config.data.kind == "arpo_parquet" else 64


def _mix(config: JobConfig, fill: float) -> Mix:
    rollout, samples = config.rollout, config.algorithm.samples
    if config.cold_start_only:  # one path, no forks
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
        initial=first_trajectories(config.algorithm),
        calls=calls,
        prompt=round(prompt * fill),
        segment=_around((room - calls * result) / (calls + 1)),
        result=_around(result),
        fork_probability=FORK_PROBABILITY,
    )


def _around(tokens: float) -> tuple[int, int]:
    return max(1, round(tokens)), max(1, round(tokens))


@cache
def _workload(mix: Mix) -> Workload:
    trees = [mix.tree(seed, 64) for seed in SEEDS]
    segments = [(segment, tree) for tree in trees for segment in tree.segments]
    sampled = sum(len(segment) for segment, _ in segments if segment.role is Role.MODEL)
    unique = sum(tree.unique_tokens for tree in trees)
    depth = 0.0
    for tree in trees:
        starts = [0] * len(tree.segments)
        for index, segment in enumerate(tree.segments):
            starts[index] = starts[segment.parent] + len(tree.segments[segment.parent]) if segment.parent >= 0 else 0
            if segment.role is Role.MODEL:
                depth += len(segment) * (starts[index] + len(segment) / 2)
    return Workload(
        mix=mix,
        sampled=sampled / len(trees),
        prefilled=(unique - sampled) / len(trees),
        unique=unique / len(trees),
        depth=depth / max(1, sampled),
        trajectories=mix.samples,
        calls=mix.calls,
    )


@cache
def _packing(mix: Mix, budget: int, nested: bool) -> Packing:
    trees = [mix.tree(seed, 64) for seed in SEEDS]
    forests: list[list[TreePack]] = [
        pack_trees([tree], supervised_credit([tree]), token_budget=budget, inherit=nested) for tree in trees
    ]
    reports = [report(packs, [tree]) for packs, tree in zip(forests, trees, strict=True)]
    every = [pack for packs in forests for pack in packs]
    return Packing(
        computed=mean(found.computed for found in reports),
        pairs=sum(pack.attention_pairs for pack in every) / len(trees),
        targets=sum(len(pack.predictors) for pack in every) / len(trees),
        longest=max(len(pack.token_ids) for pack in every),
    )
