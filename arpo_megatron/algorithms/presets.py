"""Presets: methods by name, as components and the values that belong to the method. Sizes of a recipe stay the
recipe's.

A preset names every component, so nothing of the previous method remains when it replaces one. A preset whose formula
comes only from public notes, not from its paper or its authors' code, is marked experimental. A preset that lacks a
part of its method ends in `_partial`; docs/reference/algorithms.md names it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """A published method by name: the components and config values that make it."""

    about: str
    """One sentence, with the paper."""
    values: Mapping[str, Any]
    """Config values by dotted key."""


def preset(
    about: str,
    *,
    selector: str = "epochs",
    branching: str = "grpo",
    advantage: str = "group",
    loss: str = "ppo",
    replay: str | None = None,
    **others: Any,
) -> Preset:
    """Build a `Preset` from its components.

    `others` are keys of `algorithm`, or with `__` for the dot of any section.
    """
    components = {"selector": selector, "branching": branching, "advantage": advantage, "loss": loss, "replay": replay}
    defaults = {"shared_advantage": "soft", "loss_aggregation": "token-mean", "drop_groups_without_signal": False}
    keys = {**components, **defaults, **others}
    return Preset(about, {key.replace("__", ".") if "__" in key else f"algorithm.{key}": v for key, v in keys.items()})


EXPERIMENTAL = "Experimental: the formula comes from public notes, not from the paper or its authors' code."

ARPO = preset("Entropy-driven forks after tool results, soft credit (arXiv 2507.19849).", branching="arpo")
ARPO_RELEASED = preset(
    "ARPO with the entropy rule and the rounds of the released code, to compare with published runs.",
    branching="arpo_released",
)
RANDOM = preset(
    "Control arm of ARPO: forks at the same places and as often, with a chance that ignores entropy.",
    branching="random",
)
AEPO = preset(
    "Entropy-balanced: initial trajectories set by a probe, a penalty on consecutive forks, a rescaled gradient at the "
    "upper clip, larger advantages where the policy was uncertain (arXiv 2510.14545).",
    branching="aepo",
    advantage="entropy_aware",
    loss="aepo",
    params={"probe_slope": 0.5, "streak_penalty": 0.05, "entropy_advantage": 0.2},
)
AEPO_RELEASED = preset(
    "AEPO with the rule, the probe and the rounds of its released code, which leaves entropy out of the advantage. Its "
    "scripts switch the probe off: algorithm.branching=aepo_scripts.",
    branching="aepo_released",
    loss="aepo",
    params={"streak_penalty": 0.05},
)
ARBITRARY_ENTROPY_PARTIAL = preset(
    "Moves the mean entropy to a target by good samples that are weighted as if they came from a higher or lower "
    "temperature (AEPO, arXiv 2510.08141), by the variant of the authors' code that samples no second batch.",
    loss="entropy_target",
    entropy_coefficient=0.0,
    params={"entropy_target": 0.5, "entropy_hot": 1.2, "entropy_cold": 0.8, "entropy_pull": 0.1},
)
GRPO = preset("Independent trajectories, compared within their group (arXiv 2402.03300).")
DAPO = preset(
    "GRPO with a higher upper clip, token-mean, replacement of groups without signal and a penalty on overlong "
    "responses (arXiv 2503.14476).",
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    kl_coefficient=0.0,
    drop_groups_without_signal=True,
    rollout__max_refills=10,
    reward__terms={"overlong": 1.0},
)
REINFORCE_PLUS_PLUS = preset(
    "Rewards whitened over all tokens of the step (arXiv 2501.03262).",
    advantage="reinforce_plus_plus",
    params={"group_baseline": False},
)
REINFORCE_PLUS_PLUS_BASELINE = preset(
    "REINFORCE++ after subtracting the mean of the group (arXiv 2501.03262).",
    advantage="reinforce_plus_plus",
    params={"group_baseline": True},
)
RLOO = preset(
    "Baseline: the mean of the other trajectories (arXiv 2402.14740). Token-mean equals its sum over a trajectory's "
    "tokens up to a constant of the batch.",
    advantage="rloo",
)
LOOP = preset(
    "Leave-one-out baseline and PPO-clip on each token of an agent's interaction (arXiv 2502.01600).",
    advantage="rloo",
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    kl_coefficient=0.0,
)
GSPO = preset(
    "One ratio per trajectory, the geometric mean of those of its tokens (arXiv 2507.18071).",
    loss="gspo",
    clip_low=3e-4,
    clip_high=4e-4,
)
CISPO = preset(
    "Clips the importance weight, so every token keeps its gradient (arXiv 2506.13585).",
    loss="cispo",
    clip_low=1.0,
    clip_high=5.0,
)
GHPO = preset(
    "Tasks that all trajectories have failed come again with the beginning of their solution (GHPO, arXiv 2507.10628), "
    "by the authors' code. The data need worked solutions (data.columns.hint).",
    selector="hinted",
    params={"hint_step": 0.25, "hint_most": 0.75},
)
GUI_ARPO = preset(
    "GRPO on solvable tasks that replays a stored success if a whole group has failed (Agentic Replay Policy "
    "Optimization, arXiv 2505.16282).",
    selector="solvable",
    replay="success_replay",
    clip_low=0.2,
    clip_high=0.3,
    kl_coefficient=0.0,
    params={"replay_keep": 8, "replay_std_below": 0.05, "replay_mean_below": 0.2},
)
FLOW_GRPO = preset(
    "Every turn gets the outcome of its trajectory, and all turns have equal weight (AgentFlow, arXiv 2510.05592).",
    advantage="flow",
    loss_aggregation="sequence-mean",
)
GRPO_TCR = preset(
    "GRPO with token-mean, a higher upper clip and overlong shaping (Demystifying agentic RL, arXiv 2510.11701).",
    clip_low=0.2,
    clip_high=0.28,
    kl_coefficient=0.0,
    reward__terms={"overlong": 1.0},
)
BAPO = preset(
    "PPO-clip with bounds that move until positive tokens have their share of the objective (arXiv 2510.18927).",
    loss="bapo",
    params={"positive_share": 0.5, "low_start": 0.6, "low_end": 0.9, "high_start": 1.2, "high_end": 3.0},
)
MDPO = preset(
    "Mirror descent: linear in the ratio, limited by a divergence from the policy of the step (arXiv 2005.09814).",
    loss="mdpo",
    params={"mirror_step": 10.0},
)
HGPO = preset(
    "Compares turns in a hierarchy of groups that share more and more history (arXiv 2602.22817).",
    advantage="hgpo",
    params={"hgpo_history": 2, "hgpo_weight": 1.0, "hgpo_discount": 0.95},
)
IPA_PARTIAL = preset(
    f"Credit, ratio and mask per chunk of interaction, imitation of successes (ROME, arXiv 2512.24873). {EXPERIMENTAL}",
    advantage="chunks",
    loss="ipa",
    params={"chunk_discount": 0.95, "chunk_mismatch": 5.0},
)
INFOPO = preset(
    "Credits a turn with how much its tool result changed the next action, more so where the outcome does not "
    "separate trajectories (InfoPO, arXiv 2603.00656). Experimental: the formula comes from the abstract; the "
    "normalisation and the gate are ours.",
    advantage="information",
    params={"information_weight": 0.2, "information_scale": 0.1},
)
INSPO_PARTIAL = preset(
    "Every task gets one of several system prompts; better ones are drawn more often and bad ones leave (INSPO, arXiv "
    f"2512.01945). Set algorithm.params.prompt_file to a file of prompts. {EXPERIMENTAL}",
    selector="prompts",
    params={"prompt_temperature": 0.1, "prompt_every": 256, "prompt_keep": 2},
)
MINIRL = preset(
    "REINFORCE with truncated importance weights against the engine and PPO's clipping (Stabilizing reinforcement "
    "learning with LLMs, arXiv 2512.01374).",
    advantage="centred",
    loss="minirl",
    clip_low=0.2,
    clip_high=0.27,
    kl_coefficient=0.0,
    params={"importance_limit": 5.0},
)
HISPO = preset(
    "PPO-clip that masks trajectories and tokens on which engine and trainer differ (LongCat-Flash-Prover, arXiv "
    f"2603.21065). {EXPERIMENTAL}",
    loss="hispo",
    kl_coefficient=0.0,
    params={"hispo_sequence": 0.05, "hispo_token": 1.0},
)
HAPO_PARTIAL = preset(
    "Bounds and advantages that depend on each token's entropy, the group's mean over tokens (arXiv 2509.16591). By "
    "the authors' code; equation numbers come from public notes, not from the paper.",
    advantage="token_group",
    loss="hapo",
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=10.0,
    kl_coefficient=0.0,
    drop_groups_without_signal=True,
    rollout__max_refills=16,
    reward__terms={"overlong": 1.0},
    params={"hapo_pivot": 0.8, "hapo_clip": 1.0, "hapo_advantage": 1.0},
)
RAPO_PARTIAL = preset(
    "Prunes solved tasks, gives groups with spread the weight of those without, and replays the last success into "
    "failed groups (Fathom, arXiv 2509.24107).",
    selector="unsaturated",
    advantage="rapo",
    replay="success_replay",
    params={"saturated_at": 0.9, "replay_keep": 1, "replay_std_below": 0.05, "replay_mean_below": 0.2},
)
R3L_PARTIAL = preset(
    "Trains only what follows the last fork of a trajectory, and amplifies successes (R3L, arXiv 2601.03715), by the "
    "authors' code. ARPO's forks take the place of retries after a reflection.",
    branching="arpo",
    advantage="pivotal",
    loss="opmd",
    params={"pivotal_success": 1.0, "pivotal_gain": 3.0, "opmd_tau": 1.0},
)
REMIX_PARTIAL = preset(
    "Two fifths of a step are trees of the last two steps, and each token is clipped around the step's policy (ReMix, "
    f"arXiv 2507.06892, its first stage). {EXPERIMENTAL}",
    loss="mix_ppg",
    replay="rollout_replay",
    params={"rollout_share": 0.4, "rollout_age": 2},
)
XRPO_PARTIAL = preset(
    f"Right answers that the policy found unlikely count more (arXiv 2510.06672, advantage sharpening). {EXPERIMENTAL}",
    advantage="xrpo",
    params={"novelty_gain": 2.5, "novelty_limit": 0.5},
)
SEEUPO = preset(
    "One update per turn, from the last to the first, with the ratio of a whole turn (SeeUPO, arXiv 2602.06554). "
    "Experimental: the order comes from the abstract, the correction for later turns from HAPPO (arXiv 2109.11251).",
    loss="seeupo",
    clip_low=0.2,
    clip_high=0.2,
)
SPEAR_PARTIAL = preset(
    "A fading bonus for tool calls (half the paper's weight, because wrong answers earn 0 here instead of -1), replay "
    "of good trajectories against the usual reward, and no gradient for some tokens of high covariance (arXiv "
    "2509.22601). Experimental: the advantage of replayed trajectories comes from public notes.",
    loss="clip_cov",
    replay="self_imitation",
    reward__terms={"spear": 0.5},
    params={
        "covariance_share": 0.0002,
        "covariance_low": 1.0,
        "covariance_high": 5.0,
        "imitation_capacity": 128,
        "imitation_warmup": 200,
    },
)
DOTS = preset(
    "Prefers tasks that the policy solves half of the time; half of the trees of a step are stored ones "
    "(difficulty-targeted selection and rollout replay, arXiv 2506.05316).",
    selector="targeted",
    replay="rollout_replay",
    params={
        "difficulty_target": 0.5,
        "difficulty_temperature": 0.1,
        "rollout_share": 0.5,
        "rollout_capacity": 512,
    },
)
EPO = preset(
    "Keeps the entropy within a corridor around that of earlier steps (arXiv 2509.22576).",
    loss="epo",
    entropy_coefficient=0.0,
    params={"epo_weight": 0.001, "epo_smoothing": 0.1, "epo_low": 0.5, "epo_high": 1.5, "epo_decay": 1.0},
)
EAPO_PARTIAL = preset(
    f"GSPO with a reward that is discounted per round (IterResearch, arXiv 2511.07327). {EXPERIMENTAL}",
    loss="gspo",
    clip_low=3e-4,
    clip_high=4e-4,
    reward__terms={"eapo": 1.0},
)
