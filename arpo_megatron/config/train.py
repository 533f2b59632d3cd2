"""Section `train`: steps, packs and checkpoints of the ARPO loop."""

from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, NonNegative, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class TrainConfig:
    """Steps, packs and checkpoints of the ARPO loop."""

    steps: Positive = 100
    """Rollout-and-update rounds."""
    tasks_per_step: Positive = 16
    """Tasks whose trees are sampled in one step."""
    token_budget: Positive = 8192
    """Tokens per pack, the unit of a forward and backward pass."""
    group_tokens: Positive | None = None
    """Largest number of tokens of a cut tree whose packs inherit from each other in a pipeline or with expert
    parallelism, raised to the longest path; a larger tree repeats ancestors. All activations of such a group are in
    memory at once. None: whole trees."""
    save_every: Positive = 1
    """Steps between checkpoints."""
    keep_checkpoints: Positive = 2
    """Number of newest complete checkpoints to keep; older ones are deleted."""
    keep_best: NonNegative = 0
    """Number of checkpoints with the highest held-out success (`evaluation.every`) that are kept, too."""
    keep_every: NonNegative = 0
    """Checkpoints of every n-th step are never deleted; 0: none."""
    weights_every: NonNegative = 0
    """Also store the weights of every n-th step without the optimizer, for `arpo export --step` and `arpo eval --step`;
    they are never deleted, and a run cannot resume from them. 0: none."""
    logprob_gap_limit: PositiveFloat | None = None
    """Largest |trainer - engine| log-prob of a probe, in nats, after a weight push; a larger gap stops the run. None:
    if the gap exceeds 1e-3 in float32, 0.2 in bfloat16, whose activations carry 8 bits, 0.5 with FP8 in the engine, or
    3 in the trainer, and three times the first push's gap, checksums of the weights decide."""
