"""The papers around ARPO, what is built of each and why the rest is not: the table at the end of docs/algorithms.md.

What is built is named as the plug-in points name it, so a name that is gone fails `make docs` and its test. A method
that is added or left out is told here.
"""

from dataclasses import dataclass

from arpo_megatron.registry import BUILTIN, ExtensionPoint

_KEYS = {
    "selector": ExtensionPoint.TASK_SELECTOR,
    "branching": ExtensionPoint.BRANCH_POLICY,
    "advantage": ExtensionPoint.ADVANTAGE,
    "loss": ExtensionPoint.LOSS,
    "replay": ExtensionPoint.REPLAY,
    "term": ExtensionPoint.REWARD_TERM,
}


@dataclass(frozen=True, slots=True)
class Paper:
    """A row.

    Attributes:
        name: of the method, with its paper.
        presets: by name.
        parts: of those that are the paper's own, "loss=NAME" or "term=NAME".
        rest: what differs, what is missing and why, in words.
    """

    name: str
    presets: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    rest: str = ""


FIELD = (
    Paper("ARPO (2507.19849)", ("arpo", "arpo_reference"), ("branching=arpo", "branching=arpo_reference")),
    Paper(
        "GRPO (2402.03300), DAPO (2503.14476), REINFORCE++ (2501.03262), RLOO (2402.14740), GSPO (2507.18071), CISPO "
        "(2506.13585)",
        ("grpo", "dapo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "rloo", "gspo", "cispo"),
        ("advantage=group", "advantage=reinforce_plus_plus", "advantage=rloo", "loss=ppo", "loss=gspo", "loss=cispo"),
    ),
    Paper(
        "GUI-ARPO (2505.16282)",
        ("gui_arpo",),
        ("replay=success_replay", "selector=solvable"),
        "Its GUI environment: another field.",
    ),
    Paper(
        "AEPO, entropy-balanced (2510.14545)",
        ("aepo", "aepo_reference"),
        ("branching=aepo", "branching=aepo_reference", "advantage=entropy_aware", "loss=aepo"),
        "The form of the penalty is the released code's.",
    ),
    Paper(
        "PRS + VSPO (2512.07478)",
        rest="Not built: abstract and notes name the value of a task, the smoothed clipping and the stages of the "
        "reward without a formula.",
    ),
    Paper(
        "SPEAR (2509.22601)",
        ("spear",),
        ("replay=self_imitation", "loss=clip_cov", "term=spear"),
        "Imitated trajectories share the weights and the bounds of covariance of the step's own. Filters of Dr.BoT "
        "(overlong, repetitive, unreadable answers): not built.",
    ),
    Paper(
        "XRPO (2510.06672)",
        ("xrpo",),
        ("advantage=xrpo",),
        "Rollouts allotted by uncertainty: not built, every task of a run has M. Examples in the prompt: see ICPO.",
    ),
    Paper(
        "DeepTravel (2509.21842)",
        rest="Not built: its rewards are verifiers of itineraries and turns whose prompts and rubrics were not "
        "to be found, nor how often failures come back.",
    ),
    Paper(
        "InfoPO",
        rest="Not built: a turn's credit needs log-probs of the next turn with the feedback before it masked, trees "
        "that nobody sampled; an estimator is given rewards and a loss the log-probs of the trees themselves, and no "
        "point asks the actor for another pass.",
    ),
    Paper(
        "INSPO",
        rest="Not built: its system prompts change in the run. A tree that a checkpoint holds finds its prompt by its "
        "task's id in the data when it goes on; another prompt needs a checkpoint that stores it. Prompts are written "
        "by an endpoint, besides.",
    ),
    Paper("Flow-GRPO of AgentFlow (2510.05592)", ("flow_grpo",), ("advantage=flow",), "Its four modules: no."),
    Paper(
        "BAPO (2510.18927)",
        ("bapo",),
        ("loss=bapo",),
        "By the authors' public code and its README, which differ from the paper in share, steps and order.",
    ),
    Paper(
        "ICPO",
        rest="Not built: some trajectories of a group are drawn with examples in the prompt and trained without them; "
        "here a tree is grown from one prompt and trained under it, token by token.",
    ),
    Paper(
        "ROME / IPA (2512.24873)",
        ("ipa",),
        ("advantage=chunks", "loss=ipa"),
        "Resampling from chunks of expert trajectories: not built, there are none.",
    ),
    Paper("EPO (2509.22576)", ("epo",), ("loss=epo",), "Tokens weigh as `aggregation` says instead of turn by turn."),
    Paper(
        "ReMix (2507.06892)",
        ("remix",),
        ("loss=mix_ppg", "replay=rollout_replay"),
        "The first of its two stages; the second is a run of `grpo` with `kl_coefficient` from the weights of the "
        "first, which are then its reference. A mix of KL to base and last policy whose weights move: not built, "
        "`kl_coefficient` is one number of a run, and of past weights only the first are kept. Two updates a batch: "
        "not built, the loop trains a minibatch once.",
    ),
    Paper(
        "HGPO (2602.22817)",
        ("hgpo",),
        ("advantage=hgpo",),
        "States are tool results by their tokens; weights are the paper's, not its code's.",
    ),
    Paper(
        "EAPO of IterResearch (2511.07327)",
        ("eapo",),
        ("term=eapo",),
        "The discount of the first round for the whole trajectory. Down-sampling: not needed, ranks share any number "
        "of packs. Workspaces that are rebuilt: not built, a trajectory only grows.",
    ),
    Paper("MDPO (2005.09814)", ("mdpo",), ("loss=mdpo",), "The divergence is estimated at the sampled tokens."),
    Paper("FAPO (2510.22543)", parts=("term=fapo",), rest="Needs a judge."),
    Paper("SPO, minimaximalist (2401.04056)", parts=("term=spo",), rest="Needs a judge."),
    Paper(
        "Stabilising RL with LLMs (2512.01374)",
        ("minirl",),
        ("advantage=centred", "loss=minirl"),
        "Routing replay is `algorithm.router_replay`; truncated weights of whole trajectories are "
        "`algorithm.trajectory_weight_limit`, masked ones `algorithm.loss=hispo`.",
    ),
    Paper(
        "HAPO (2509.16591)",
        ("hapo",),
        ("advantage=token_group", "loss=hapo"),
        "By the authors' code, with entropies of the minibatch. Adaptive temperature: not built, the engine samples "
        "at one.",
    ),
    Paper(
        "GHPO (2507.10628)",
        rest="Not built: its hints are the first 25, 50 and 75 % of a worked solution, which no data source here has "
        "(the released files hold answers), put into the prompt and sampled again within the step; for prompts that "
        "change see INSPO.",
    ),
    Paper(
        "Difficulty-targeted selection + rollout replay (2506.05316)",
        ("dots",),
        ("selector=targeted", "replay=rollout_replay"),
        "Difficulty is measured, not predicted: the predictor is a trained model over embeddings.",
    ),
    Paper("Demystifying agentic RL (2510.11701)", ("grpo_tcr",), rest="Its data recipes: no."),
    Paper(
        "Agent-R (2501.11425)",
        rest="Not built: trees hold what it splices, a wrong turn with its tool result and a right sibling, but the "
        "cold start learns conversations by whole assistant turns (`sft.data`), and here results stand within one: "
        "they would be learnt. Trees are learnt from for generated tasks alone.",
    ),
    Paper(
        "R3L",
        rest="Not built: a failed path is grown again from where it failed behind a reflection, in a second round; a "
        "branch policy decides on forks while a tree grows and adds no text. Formulas were not checked.",
    ),
    Paper("LOOP (2502.01600)", ("loop",), ("advantage=rloo",)),
    Paper(
        "HisPO of LongCat-Flash-Prover (2603.21065)",
        ("hispo",),
        ("loss=hispo",),
        "Limits of the masks are ours; which ratio is clipped is our reading.",
    ),
    Paper(
        "AEPO, arbitrary entropy (2510.08141)",
        rest="Not built: its REINFORCE term wants right answers sampled at a temperature of their own, a bound of 1 + "
        "wanted entropy - entropy; all trees of a run are sampled, and their log-probs computed, at "
        "`rollout.temperature`.",
    ),
    Paper(
        "SeeUPO (2602.06554)",
        rest="Not built: turns are updated from the last to the first, each with the ratios of those behind it as "
        "they were after their own updates; a step's minibatches divide trees, not turns, and a loss is given the old "
        "and the present log-probs alone. Whether a turn's ratio is a product or a mean could not be checked.",
    ),
    Paper("SRPO", rest="Later: needs log-probs of a teacher."),
    Paper(
        "RAPO of Fathom-DeepResearch (2509.24107)",
        ("rapo",),
        ("selector=unsaturated", "advantage=rapo", "replay=success_replay"),
        "A group gets a replay where its rewards have no spread and a low mean. Step rewards by kind of call: not "
        "built, they are a judge's.",
    ),
    Paper("URPO", rest="Later: the policy would be its own judge within a step."),
    Paper("AMPO, multi-guidance", rest="Later: needs answers of teachers."),
    Paper("A2FM / APO", rest="Later: needs modes in prompt and protocol."),
    Paper("Dyna-Mind / Dyna-GRPO", rest="Later: needs rewards of intermediate states."),
    Paper("DAPO (direct advantage), SPPO, INPO", rest="Later: critics, or preferences offline."),
    Paper("Vision-Zero, mobile-agent generalisation", rest="No: images, phones."),
    Paper(
        "WMAR, OER, OPPO, PA-RL, A2PR, ReLIC, SRL, DR-RPO",
        rest="No: world models, offline and continuous control; no language policy.",
    ),
    Paper("ContextEvolve, discovered multi-agent algorithms", rest="No: evolution of programs."),
)


def table() -> str:
    """The rows in Markdown. KeyError for a name that no plug-in point knows."""
    lines = ["| method | `algorithm.name` | parts | what differs or is missing |", "| --- | --- | --- | --- |"]
    for paper in FIELD:
        for name in paper.presets:
            BUILTIN[ExtensionPoint.PRESET][name]
        presets = ", ".join(f"`{name}`" for name in paper.presets)
        lines.append(f"| {paper.name} | {presets} | {', '.join(map(_part, paper.parts))} | {paper.rest} |")
    return "\n".join(["", *lines, ""])


def _part(part: str) -> str:
    key, name = part.split("=")
    file = BUILTIN[_KEYS[key]][name].partition(":")[0].replace(".", "/")
    return f"[`{part}`](../{file}.py)"
