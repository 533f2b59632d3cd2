"""Methods by name: which parts, and the numbers that belong to the method. Numbers of a recipe stay the recipe's.

A preset names every part, so that nothing of another method is left where one takes its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Preset:
    """A method.

    Attributes:
        about: one sentence, with the paper.
        values: dotted keys of the config and their values.
    """

    about: str
    values: Mapping[str, Any]


def preset(
    about: str,
    *,
    selector: str = "epochs",
    branching: str = "grpo",
    advantage: str = "group",
    loss: str = "ppo",
    store: str | None = None,
    **others: Any,
) -> Preset:
    """A `Preset` by its parts; `others` are keys of `algorithm`, and with `__` for the dot of any section."""
    parts = {"selector": selector, "branching": branching, "advantage": advantage, "loss": loss, "replay": store}
    defaults = {"shared_advantage": "soft", "loss_aggregation": "token-mean", "drop_groups_without_signal": False}
    keys = {**parts, **defaults, **others}
    return Preset(about, {key.replace("__", ".") if "__" in key else f"algorithm.{key}": v for key, v in keys.items()})


ARPO = preset("Entropy-driven forks after tool results, soft credit (arXiv 2507.19849).", branching="arpo")
ARPO_REFERENCE = preset(
    "ARPO by the released code's arithmetic, defects included, for comparison with published runs.",
    branching="arpo_reference",
)
RANDOM = preset("The control arm of ARPO: forks at the same places without regard to entropy.", branching="random")
AEPO = preset(
    "Entropy-balanced: budget from a probe, consecutive forks cost chance, rescaled gradient at the upper clip, larger "
    "advantages where the policy was uncertain (arXiv 2510.14545).",
    branching="aepo",
    advantage="entropy_aware",
    loss="aepo",
    params={"probe_slope": 0.5, "streak_penalty": 0.05, "entropy_advantage": 0.2},
)
AEPO_REFERENCE = preset(
    "AEPO as its released scripts run it: no probe, no entropy in the advantage, entropy a round late.",
    branching="aepo_reference",
    loss="aepo",
    params={"streak_penalty": 0.05},
)
GRPO = preset("Independent trajectories compared within their group (arXiv 2402.03300).")
DAPO = preset(
    "GRPO with a higher upper clip, token-mean, groups without signal replaced and overlong responses punished "
    "(arXiv 2503.14476).",
    clip_low=0.2,
    clip_high=0.28,
    dual_clip=None,
    kl_coefficient=0.0,
    drop_groups_without_signal=True,
    rollout__max_refills=10,
    reward__terms={"overlong": 1.0},
)
REINFORCE_PLUS_PLUS = preset(
    "Rewards whitened over the tokens of the step (arXiv 2501.03262).",
    advantage="reinforce_plus_plus",
    params={"group_baseline": False},
)
REINFORCE_PLUS_PLUS_BASELINE = preset(
    "REINFORCE++ with the mean of the group subtracted first (arXiv 2501.03262).",
    advantage="reinforce_plus_plus",
    params={"group_baseline": True},
)
RLOO = preset(
    "The mean of the other trajectories as baseline (arXiv 2402.14740); token-mean is its sum over a trajectory's "
    "tokens up to a constant of the minibatch.",
    advantage="rloo",
)
LOOP = preset(
    "Leave-one-out baseline with PPO-clip at each token of an agent's interaction (arXiv 2502.01600).",
    advantage="rloo",
    clip_low=0.2,
    clip_high=0.2,
    dual_clip=None,
    kl_coefficient=0.0,
)
GSPO = preset(
    "One ratio a trajectory, the geometric mean of its tokens' (arXiv 2507.18071).",
    loss="gspo",
    clip_low=3e-4,
    clip_high=4e-4,
)
CISPO = preset(
    "The importance weight is clipped and every token keeps its gradient (arXiv 2506.13585).",
    loss="cispo",
    clip_low=1.0,
    clip_high=5.0,
)
GUI_ARPO = preset(
    "GRPO that replays a task's successes where all have failed, on tasks that can be solved (Agentic Replay Policy "
    "Optimization, arXiv 2505.16282).",
    selector="solvable",
    replay="success_replay",
    clip_low=0.2,
    clip_high=0.3,
    kl_coefficient=0.0,
    trajectory_weight_limit=2.0,
    params={"replay_keep": 8, "replay_std_below": 0.05, "replay_mean_below": 0.2},
)
FLOW_GRPO = preset(
    "One outcome for every turn of a trajectory, and turns weigh alike (AgentFlow, arXiv 2510.05592).",
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
    "PPO-clip whose bounds move until positive tokens have their share of the objective (arXiv 2510.18927).",
    loss="bapo",
    params={"positive_share": 0.5, "low_start": 0.6, "low_end": 0.9, "high_start": 1.2, "high_end": 3.0},
)
MDPO = preset(
    "Mirror descent: linear in the ratio, held by the distance to the policy of the step (arXiv 2005.09814).",
    loss="mdpo",
    params={"mirror_step": 10.0},
)
HGPO = preset(
    "Turns compared in groups by how much of what they saw they share (arXiv 2602.22817).",
    advantage="hgpo",
    params={"hgpo_history": 2, "hgpo_weight": 1.0, "hgpo_discount": 0.95},
)
IPA = preset(
    "Credit, ratio and mask by chunk of interaction; what succeeds is imitated (ROME, arXiv 2512.24873).",
    advantage="chunks",
    loss="ipa",
    params={"chunk_discount": 0.95, "chunk_mismatch": 5.0},
)
MINIRL = preset(
    "REINFORCE with truncated importance weights against the engine and PPO's clipping (Stabilizing reinforcement "
    "learning with LLMs, arXiv 2512.01374).",
    advantage="centred",
    loss="minirl",
    clip_low=0.2,
    clip_high=0.27,
    kl_coefficient=0.0,
    trajectory_weight_limit=None,
    params={"importance_limit": 5.0},
)
HISPO = preset(
    "PPO-clip that leaves out trajectories and tokens where engine and trainer differ (LongCat-Flash-Prover, arXiv "
    "2603.21065).",
    loss="hispo",
    kl_coefficient=0.0,
    params={"hispo_sequence": 0.05, "hispo_token": 1.0},
)
HAPO = preset(
    "Bounds and advantages of each token by its entropy, the group's mean over tokens (arXiv 2509.16591).",
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
RAPO = preset(
    "Solved tasks are pruned, groups with spread stand in for those without, failed ones get the last success (Fathom, "
    "arXiv 2509.24107).",
    selector="unsaturated",
    advantage="rapo",
    replay="success_replay",
    trajectory_weight_limit=2.0,
    params={"saturated_at": 0.9, "replay_keep": 1, "replay_std_below": 0.05, "replay_mean_below": 0.2},
)
REMIX = preset(
    "Trees of the last two steps are two fifths of a step, every token clipped around the step's policy (ReMix, arXiv "
    "2507.06892, its first stage).",
    loss="mix_ppg",
    replay="rollout_replay",
    trajectory_weight_limit=None,
    params={"rollout_share": 0.4, "rollout_age": 2},
)
XRPO = preset(
    "Right answers that the policy found unlikely count more (arXiv 2510.06672, advantage sharpening).",
    advantage="xrpo",
    params={"novelty_gain": 2.5, "novelty_limit": 0.5},
)
SPEAR = preset(
    "A fading bonus for tool calls (of weight 1 where wrong answers earn -1, which is 0 here), good trajectories "
    "trained again against the usual reward, and tokens of high covariance left out (arXiv 2509.22601).",
    loss="clip_cov",
    replay="self_imitation",
    trajectory_weight_limit=2.0,
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
    "Tasks that the policy solves half of the time are drawn most, and half of the trees of a step are stored ones "
    "(difficulty-targeted selection and rollout replay, arXiv 2506.05316).",
    selector="targeted",
    replay="rollout_replay",
    trajectory_weight_limit=2.0,
    params={
        "difficulty_target": 0.5,
        "difficulty_temperature": 0.1,
        "rollout_share": 0.5,
        "rollout_capacity": 512,
    },
)
EPO = preset(
    "Entropy is wanted within a corridor around its own past (arXiv 2509.22576).",
    loss="epo",
    entropy_coefficient=0.0,
    params={"epo_weight": 0.001, "epo_smoothing": 0.1, "epo_low": 0.5, "epo_high": 1.5, "epo_decay": 1.0},
)
EAPO = preset(
    "GSPO with a reward that falls by a factor for every round (IterResearch, arXiv 2511.07327).",
    loss="gspo",
    clip_low=3e-4,
    clip_high=4e-4,
    reward__terms={"eapo": 1.0},
)
