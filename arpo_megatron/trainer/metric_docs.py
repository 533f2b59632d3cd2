"""What every metric of metrics.jsonl and sft_metrics.jsonl means; docs/run-directory.md is made from it (`make docs`).

Figures of an update and of packing are described where they are made: the attributes of `UpdateStats` and `PackReport`.
"""

import re

from arpo_megatron.monitor.progress import STEP_PHASES
from arpo_megatron.registry import BUILTIN, ExtensionPoint

_ROLLOUT = {
    "reward": "mean over trajectories, without replayed ones (`algorithm.replay`)",
    "success": "likewise the share of trajectories whose accuracy exceeds `reward.success_threshold`",
    "format_ok": "likewise the share of trajectories that keep to the tag protocol",
    "groups_without_signal": "trees whose trajectories all have the same reward",
    "held_out_success": "of the weights that the step began with, where it was measured (`evaluation`)",
    "staleness": "versions by which the weights that sampled a token are older than those it trains: mean",
    "staleness_max": "the most of it",
    "stale_trees": "trees of the step of which older weights have sampled a part (`rollout.stale=wait` weighs them)",
    "dropped/failed": "trees that could not be finished",
    "dropped/no_signal": "trees left out because their trajectories earned the same (`drop_groups_without_signal`)",
    "dropped/stale": "trees left out as older than `rollout.max_staleness` allows (`rollout.stale=drop`)",
    "dropped/oversampled": "trees given up because the step had enough (`rollout.oversampling`)",
    "cached_prompt_share": "share of prompt tokens that the engine had in its cache",
    "prefill_over_unique": "prompt tokens that the engine computed (not cached) over the tokens of the finished trees; "
    "up to 1.05 is good",
    "prefill_over_given": "the same over tokens of prompts and tool results, which must be computed once; above 1 by "
    "one token a request, and by all that is computed again after a weight push",
    "predicted_cached_share": "what the shape of the trees lets expect of it",
    "tokens_per_s": "tokens sampled a second while trees grow; of a resumed run, since then",
    "forks": "branches taken",
    "trees": "finished trees",
    "trajectories": "root-to-leaf paths",
    "tool_calls_executed": "calls that ran or were answered from the cache",
    "tool_calls_cached": "those of them answered from the cache",
    "tool_calls_inherited": "calls that branches share with the path they forked from",
    "requests_repeated": "generations and tool calls that were made again because a service failed",
    "tokens_sampled": "tokens that the engine sampled",
    "prompt_tokens": "prompt tokens of all requests",
    "cached_tokens": "those of them that the engine had in its cache",
    "prefilled_tokens": "those that it had to compute",
    "predicted_prompt_tokens": "prompt tokens as the shape of the trees predicts them",
    "predicted_cached_tokens": "likewise the cached ones",
    "unique_tokens": "tokens of the trees, each once",
    "flat_tokens": "tokens of all trajectories",
    "given_tokens": "those of the unique tokens that are prompt or tool result",
    "trees_not_stored": "trees of all steps so far not in `trees/`: they wait for a full disk or were given up",
    "selector/left_out": "tasks that the last draw passed over (`algorithm.selector=solvable` or `unsaturated`)",
    "selector/pruned": "tasks that are left out from now on (`algorithm.selector=unsaturated`)",
    "selector/tried": "tasks whose difficulty is known (`algorithm.selector=targeted`)",
    "selector/distance": "mean distance of their success to `difficulty_target`",
    "replay/trees": "trees of the step that hold a stored trajectory (`algorithm.replay`)",
    "replay/stored": "trajectories that are stored",
    "replay/age": "steps since the trees of the replayed ones were begun: mean, where there are any",
    "replay/age_max": "the most of it",
    "logprob_gap": "largest difference between trainer and engine over the tokens sampled by the weights that the step "
    "began with, in nats; null where older ones sampled all",
}
_REWARDS = {
    "reward/verified": "share of mathematical answers that math-verify finds equal",
    "reward/undecided": "share of mathematical answers that it had no time or memory to decide on: they count as wrong",
    "reward/f1": "token F1 of answers in words",
    "reward/exact_match": "share of them that are the expected words",
    "reward/judged": "share of answers that the judge finds right, of those that it decided on",
    "reward/tool_bonus": "bonus for a right answer with both tools",
    "judge/asked": "questions sent to the judge",
    "judge/cached": "questions whose reply was known",
    "judge/repeated": "questions sent again because the judge failed",
    "judge/unreadable": "replies without a verdict; scored by rule",
    "judge/fallbacks": "questions left to the rules because the judge was down (`reward.judge.when_down=fallback`)",
    "judge/waited_s": "seconds that questions waited for a judge that was down, added up over questions",
}
"""Means over the trajectories that have such a part."""
_TRAINER = {
    "trainer/tokens_per_s": "computed tokens a second of the update phase",
    "trainer/flat_tokens_per_s": "likewise tokens of the flattened trajectories",
    "trainer/tflops": "model TFLOP/s of a rank in the update phase: what the mathematics needs, forward and backward",
    "trainer/hardware_tflops": "likewise all that is computed: recomputation, logits twice, repeated ancestors",
    "trainer/mfu": "model TFLOP/s over `monitor.peak_tflops`, where that is given",
    "memory_peak_gb": "most memory that a rank has had since its start, in 10^9 bytes; the largest of all ranks",
    "updates_skipped": "updates whose loss or gradient was not finite",
}
_PHASES = {
    "ratios": "wall time of what an update needs to know before: weights of trajectories and their ratios, with "
    "a loss of whole minibatches (such as gspo) a pass over the packs",
}
_SFT = {
    "epoch": "times that the conversations have been learnt from (`sft.data`)",
    "held_out_loss": "mean loss on held-out conversations, where it was measured, in nats",
}


def metrics() -> dict[str, str]:
    """Every name that a row may have, with its meaning."""
    from arpo_megatron.actor.statistics import UpdateStats
    from arpo_megatron.packing.packs import PackReport

    updates = {name: text for name, text in attributes(UpdateStats).items() if name != "skipped"}
    return {
        "step": "counts from 1; the update, in sft_metrics.jsonl",
        **_ROLLOUT,
        **_REWARDS,
        **{f"reward/{name}": f"term `{name}` times its weight" for name in BUILTIN[ExtensionPoint.REWARD_TERM]},
        **{f"pack/{name}": text for name, text in attributes(PackReport).items()},
        "pack/padding": "tokens that ranks add to packs: FP8, sequence and context parallelism want them of a length",
        **updates,
        **_TRAINER,
        **_SFT,
        **{f"seconds/{name}": _PHASES.get(name, "wall time of that phase") for name in sorted(STEP_PHASES)},
    }


def attributes(owner: type) -> dict[str, str]:
    """The section "Attributes" of a class's docstring: name -> text."""
    section = (owner.__doc__ or "").partition("Attributes:")[2]
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()).removesuffix(".") for name, text in found}
