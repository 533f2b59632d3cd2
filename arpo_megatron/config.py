"""Every knob of a job: typed, frozen, documented, and strict.

A recipe (a function in `recipes/`) returns a `JobConfig`; `--config file.yaml` and `key=value` words are laid over it
by `resolve`. An unknown key, a wrong type or an impossible combination raises `UserError` with one line before any
process is started. The attribute docstrings are the reference: docs/configuration.md is generated from them.
"""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from arpo_megatron import config_rules

_STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)

Positive = Annotated[int, Field(gt=0)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
PositiveFloat = Annotated[float, Field(gt=0.0)]
NonNegativeFloat = Annotated[float, Field(ge=0.0)]
Fp8Recipe = Literal["none", "delayed", "current", "blockwise"]
Platform = Literal["auto", "cpu"]


@dataclass(frozen=True, config=_STRICT)
class ModelConfig:
    """Which weights to start from, and in which number format to train them."""

    path: Path | None = None
    """Hugging Face directory to start from. None: the recipe makes a tiny random model (`shape`) and its tokenizer."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Parameters and activations of the trainer and of the engine."""
    fp8: Fp8Recipe = "none"
    """Matrix products of the trainer's layers in FP8 (Hopper GPU, transformer-engine, bfloat16); named after what a
    scale comes from: `delayed` the tensor's earlier values (so that ratios before any update are only nearly 1),
    `current` the tensor, `blockwise` 128 features of one token."""
    bf16_edge_layers: NonNegative = 0
    """With fp8 `current` or `blockwise`: this many first and as many last layers keep bfloat16 products."""
    hidden_size: Positive = 192
    """Width of the made model (used when `path` is None, like the next five)."""
    layers: Positive = 4
    """Transformer layers of the made model."""
    heads: Positive = 6
    """Query heads of the made model."""
    kv_heads: Positive = 6
    """Key/value heads of the made model."""
    ffn_size: Positive = 512
    """Width of the made model's gated MLP."""
    vocabulary_size: Positive = 2048
    """Largest vocabulary of a tokenizer trained on the data (byte-level BPE; the generated tasks need fewer)."""
    router_aux_loss: NonNegativeFloat | Literal["model"] = 0.0
    """Coefficient of the loss that levels the load of a mixture's experts, counted over trajectories; a level load has
    a loss of 1 a layer. 0, usual in reinforcement learning: none. `model`: its config.json's `router_aux_loss_coef`."""
    max_length: Annotated[int, Field(ge=64)] = 2048
    """Longest trajectory in tokens: prompt, model and tool tokens together."""


@dataclass(frozen=True, config=_STRICT)
class ParallelConfig:
    """How Megatron-Core lays the model over ranks. World size = tensor * context * pipeline * data."""

    tensor: Positive = 1
    """Tensor-parallel ranks."""
    data: Positive = 1
    """Data-parallel ranks."""
    pipeline: Positive = 1
    """Pipeline stages."""
    virtual_pipeline: Positive = 1
    """Model chunks a stage (interleaved schedule); above 1 it needs pipeline > 1."""
    context: Positive = 1
    """Context-parallel ranks: the tokens of a pack are divided among them."""
    expert: Positive = 1
    """Ranks that share out the experts of a mixture-of-experts model; divides tensor * context * data."""
    sequence: bool = False
    """Sequence parallelism inside the tensor-parallel group; needs tensor > 1."""
    distributed_optimizer: bool = False
    """Divide the optimizer's state among the data-parallel ranks."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, those of core attention, or every layer's."""

    @property
    def world_size(self) -> int:
        """Number of trainer ranks."""
        return self.tensor * self.context * self.pipeline * self.data

    @property
    def expert_tensor(self) -> int:
        """Tensor-parallel ranks that divide an expert.

        Shared-out experts are whole: the ranks of a divided one would have to gather tokens of unequal number (which
        gloo cannot) after every exchange, for slices too thin to be fast. Experts that are not shared out are divided
        like every other matrix, because Megatron sums the gradients of whole ones over data-parallel ranks only.
        """
        return self.tensor if self.expert == 1 else 1

    @property
    def nested_packs(self) -> bool:
        """Whether packs of a cut tree inherit from each other: pipelines and experts fix another order of passes."""
        return self.pipeline == 1 and self.expert == 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        config_rules.check_parallel(self)
        return self


@dataclass(frozen=True, config=_STRICT)
class DataConfig:
    """Where tasks come from."""

    kind: Literal["generated", "arpo_parquet"] = "generated"
    """`generated`: calculator and look-up tasks made from the seed. `arpo_parquet`: the released ARPO files."""
    path: Path | None = None
    """Parquet file of training questions (`arpo_parquet`)."""
    search_cache: Path | None = None
    """JSON file of stored searches that serves as the search index (`arpo_parquet`); None: search_cache.json beside
    `path` where there is one."""
    max_prompt_tokens: Positive = 1536
    """A longer prompt is a bad row: counted, named and skipped."""
    tasks: Positive = 2000
    """How many training tasks to generate (`generated`)."""
    held_out: Positive = 200
    """How many tasks are kept for evaluation only."""


@dataclass(frozen=True, config=_STRICT)
class AlgorithmConfig:
    """How trajectories branch and how their rewards become gradients."""

    name: Literal["arpo", "arpo_reference", "random", "grpo"] = "arpo"
    """`arpo`: entropy-driven forks after tool results, as in the paper. `arpo_reference`: by the released code's
    arithmetic, defects included. `random`: the control arm, forks without regard to entropy. `grpo`: `samples` fresh
    trajectories, no forks."""
    samples: Positive = 16
    """M: trajectories a task."""
    initial: Positive = 8
    """N: trajectories sampled from the prompt before branching; the rest is the forking budget. `grpo` ignores it."""
    beam: Positive = 2
    """Z: most MODEL children of one fork point, the measured path included."""
    branch_probability: Fraction = 0.5
    """alpha: chance of a fork when the entropy has not changed."""
    entropy_weight: NonNegativeFloat = 0.2
    """beta: how much a rise of the normalised entropy adds to that chance."""
    threshold: Fraction | None = None
    """tau: fork when the chance exceeds it. None: compared with a seeded uniform draw, as the released code does."""
    entropy_tokens: Positive = 20
    """k: entropy is measured on this many tokens after a tool result."""
    attribution: Literal["soft", "hard"] = "soft"
    """Advantage of a shared token: each leaf's own (soft) or the mean over the leaves below (hard)."""
    aggregation: Literal["token-mean", "sequence-mean"] = "token-mean"
    """Weight of a token: 1 / model tokens of the minibatch, or 1 / (trajectories * own length)."""
    clip_low: Fraction = 0.2
    """PPO ratio is clipped below 1 - clip_low."""
    clip_high: NonNegativeFloat = 0.2
    """PPO ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = 3.0
    """Bound c of the ratio for negative advantages; None: no bound."""
    ratio: Literal["token", "sequence"] = "token"
    """`token`: PPO's ratio of each token. `sequence`: one ratio a trajectory, the geometric mean of its tokens' (GSPO,
    arXiv 2507.18071); its bounds are clip_low and clip_high too, and want to be about a hundred times smaller.
    `aggregation` (it is always sequence-mean) and dual_clip (there is none) have no part in it."""
    trajectory_weight_limit: PositiveFloat | None = None
    """Weigh each trajectory by min(limit, its probability under the step's policy over that at which the engine sampled
    it), which corrects for older weights and other arithmetic; None: no weights."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the k3 penalty for leaving the first weights; above 0 a copy of them is kept in host memory."""
    entropy_coefficient: NonNegativeFloat = 0.0
    """Weight of the bonus for entropy."""
    router_replay: Literal["none", "rollout"] = "none"
    """`rollout`: in training a mixture of experts sends each token where the engine had sent it (rollout routing
    replay, arXiv 2510.11370), with weights of the trainer's own routers; engines then have no router before them.
    `none`: where the trainer's routers send it."""
    minibatches: Positive = 1
    """Optimizer updates a step; the tasks of a step are divided among them."""
    drop_groups_without_signal: bool = False
    """Replace trees whose trajectories all earned the same (DAPO's dynamic sampling, arXiv 2503.14476)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.name != "grpo" and self.initial > self.samples:
            raise ValueError(f"algorithm.initial={self.initial} exceeds algorithm.samples={self.samples}")
        if self.samples < 2:
            raise ValueError("algorithm.samples must be at least 2: an advantage compares trajectories of a group")
        if self.ratio == "sequence" and (self.kl_coefficient or self.entropy_coefficient):
            raise ValueError(
                "algorithm.ratio=sequence has neither penalty nor bonus: set algorithm.kl_coefficient and "
                "algorithm.entropy_coefficient to 0"
            )
        if self.ratio == "sequence" and self.attribution == "hard":
            raise ValueError("algorithm.ratio=sequence gives every trajectory its own advantage: attribution=soft")
        return self


@dataclass(frozen=True, config=_STRICT)
class RolloutConfig:
    """Limits and sampling of a trajectory."""

    temperature: PositiveFloat = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; training wants 1."""
    max_tool_calls: NonNegative = 3
    """Tool calls a trajectory, so one turn of the model more; a call beyond it ends the trajectory."""
    max_response_tokens: Positive = 4096
    """Tokens after the prompt, model and tool together."""
    stop_at_answer: bool = False
    """End a trajectory at </answer> instead of waiting for the end-of-sequence token (which then is not learnt)."""
    max_tool_tokens: Positive = 1024
    """A longer tool result is cut to this many tokens."""
    tool_timeout_s: PositiveFloat = 30.0
    """Deadline of a tool call in seconds; the model reads that it timed out."""
    max_staleness: NonNegative = 0
    """0: a step trains the trees that it began. n: twice a step's trees are under way, also while the trainer trains,
    and a tree is trained at most n versions of the policy after the one that began it."""
    across_push: Literal["keep", "drain"] = "keep"
    """What a weight push does to trees under way: they go on with the new weights from where they were, or are finished
    first."""
    stale: Literal["correct", "refuse"] = "correct"
    """What becomes of trees that older weights have sampled in part: corrected by `algorithm.trajectory_weight_limit`,
    or left out and replaced (with `max_staleness=0` only: all that is grown ahead would be left out)."""
    oversampling: NonNegativeFloat = 0.0
    """Share of trees begun beyond a step's need; the last to finish are given up. Favours short trajectories."""
    max_refills: NonNegative = 8
    """Rounds of new tasks in a step for those that failed or were left out, before it goes on with fewer."""


@dataclass(frozen=True, config=_STRICT)
class EngineConfig:
    """The SGLang servers."""

    replicas: Positive = 1
    """Engines, each with a copy of the model. A tree keeps to one of them."""
    tensor: Positive = 1
    """Tensor-parallel GPUs of an engine."""
    router: Literal["auto", "sglang", "none"] = "auto"
    """What divides trees among engines. `sglang`: its own router, the least busy engine first; `none`: a hash of the
    tree's task; `auto`: the router where it is installed and there are several engines."""
    max_running_requests: Positive = 64
    """Decoding batch."""
    max_total_tokens: Positive | None = None
    """KV pool in tokens; None lets SGLang size it from `memory_fraction`."""
    memory_fraction: Fraction | None = None
    """Share of the device's memory for weights and KV pool. None: 0.3 on a GPU that the trainer uses too, else 0.6."""
    attention_backend: Literal["auto", "fa3", "flashinfer", "triton"] = "auto"
    """Attention kernels on a GPU. `auto`: SGLang's choice (fa3 on Hopper), in float32 triton."""
    placement: Literal["auto", "colocated", "split"] = "auto"
    """`colocated`: engines share the trainer's GPUs and give their memory back while it trains. `split`: they have
    their own. `auto`: split where there are GPUs enough, and on a CPU."""
    quantization: Literal["none", "fp8"] = "none"
    """`fp8`, on a GPU: the engine quantizes the weights it is sent, a scale a row. Trajectories are then sampled from
    a policy that differs from the trained one by the rounding."""
    deterministic: bool = False
    """On a GPU: kernels whose result for a request does not depend on the others of its batch; slower."""
    startup_timeout_s: PositiveFloat = 300.0
    """Deadline of the health gate in seconds."""
    request_timeout_s: PositiveFloat = 600.0
    """Deadline of one generation in seconds."""
    hang_timeout_s: PositiveFloat = 120.0
    """A service (engine, tools, rollout process) that does not answer its probe for so many seconds is restarted. It
    must exceed the longest pause of a healthy one: a bucket of a weight push, a kernel's compilation."""
    restarts: NonNegative = 10
    """Services (engines, tools, rollout process, router) that are restarted in a run; one more that dies stops it."""
    retry_for_s: PositiveFloat = 600.0
    """Seconds after its first failure in which a generation or tool call is repeated: time to restart an engine."""


@dataclass(frozen=True, config=_STRICT)
class SyncConfig:
    """Weights from the trainer into the engines."""

    transport: Literal["auto", "broadcast", "ipc", "disk"] = "auto"
    """`broadcast`: gloo, on GPUs NCCL. `ipc`: memory that trainer and engine share, CUDA's where they share a GPU.
    `disk`: files, for engines that no network joins with the trainer. `auto`: `ipc` on a shared GPU, else
    `broadcast`."""
    bucket_mb: Positive = 256
    """Tensors are gathered and sent in buckets of so many MiB; the trainer's first rank holds two at a time. A
    parameter that is larger is a bucket of its own."""
    verify_every: NonNegative = 20
    """At the first push and at every so many, checksums of sampled tensors are compared; 0: at the first alone."""
    directory: Path | None = None
    """With `disk`: where, under one name on all machines. None: in the run directory."""


@dataclass(frozen=True, config=_STRICT)
class SandboxConfig:
    """The tool service."""

    python_timeout_s: PositiveFloat = 10.0
    """Wall time of one python call in seconds."""
    python_memory_mb: Positive = 512
    """Address space of one python call in MiB."""
    search_results: Positive = 3
    """Pages a search answers with."""
    preload: tuple[str, ...] = ()
    """Modules imported once, so that every python call finds them warm (numpy, sympy, ...)."""


@dataclass(frozen=True, config=_STRICT)
class RewardConfig:
    """How a finished trajectory is scored."""

    kind: Literal["arpo", "arpo_released"] = "arpo"
    """`arpo`: format gate, math-verify or QA F1, tool bonus. `arpo_released`: the released scorer, errors included."""
    format_penalty: float = -1.0
    """Reward of a trajectory that breaks the tag protocol."""
    tool_bonus: NonNegativeFloat = 0.1
    """Added to a right answer that used both search and python."""
    success_threshold: Fraction = 0.5
    """A trajectory counts as a success when its accuracy exceeds this."""


@dataclass(frozen=True, config=_STRICT)
class OptimizerConfig:
    """AdamW through Megatron's optimizer."""

    lr: PositiveFloat = 1e-6
    """Peak learning rate."""
    min_lr_ratio: Fraction = 0.1
    """Final learning rate over `lr` (linear and cosine)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course after the warm-up."""
    warmup_fraction: Fraction = 0.0
    """Share of all updates in which the rate rises from 0."""
    weight_decay: NonNegativeFloat = 0.01
    """Decoupled; not applied to norms and biases."""
    beta1: Decay = 0.9
    """First-moment decay."""
    beta2: Decay = 0.95
    """Second-moment decay."""
    eps: PositiveFloat = 1e-8
    """Added to the denominator."""
    clip_grad: PositiveFloat = 1.0
    """Largest global gradient norm."""
    offload: bool = False
    """Keep moments and master weights in host memory and update them there (a GPU with the distributed optimizer)."""


@dataclass(frozen=True, config=_STRICT)
class SftConfig:
    """The cold start: supervised training on demonstrations."""

    steps: NonNegative = 0
    """Updates; 0 skips the cold start."""
    data: Path | None = None
    """Conversations to learn from (.jsonl, .json or .parquet, rows with "messages"), for a model at model.path; None:
    demonstrations of the generated tasks."""
    max_tokens: Positive | None = None
    """A conversation of more tokens is a bad row (`data`); None: model.max_length."""
    held_out: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Share of the conversations that are kept for the evaluation loss (`data`)."""
    evaluate_every: Positive = 50
    """Updates between two measurements of that loss; one comes after the last update."""
    batch: Positive = 64
    """Demonstrations or conversations an update."""
    careless: Fraction = 0.4
    """Share of generated demonstrations with one careless act (wrong operator, misspelt name, result ignored)."""
    save_every: Positive = 100
    """Updates between checkpoints."""
    optimizer: OptimizerConfig = OptimizerConfig(lr=7e-6, schedule="cosine", warmup_fraction=0.1)
    """Its own learning rate and schedule."""


@dataclass(frozen=True, config=_STRICT)
class TrainConfig:
    """The ARPO loop."""

    steps: Positive = 100
    """Rollout-and-update rounds."""
    tasks_per_step: Positive = 16
    """Tasks whose trees are grown in one step."""
    token_budget: Positive = 8192
    """Tokens of one pack, the unit of a forward and backward pass."""
    save_every: Positive = 1
    """Steps between checkpoints."""
    keep_checkpoints: Positive = 2
    """Newest whole checkpoints kept; older ones are deleted."""
    keep_every: NonNegative = 0
    """Checkpoints of every n-th step are kept for good; 0: none."""
    logprob_gap_limit: PositiveFloat | None = None
    """Largest |trainer - engine| log-prob of a probe, in nats, that a weight push may leave; larger stops the run.
    None: 1e-3 in float32, 0.2 in bfloat16, whose activations carry 8 bits, 0.5 with FP8 in trainer or engine."""


@dataclass(frozen=True, config=_STRICT)
class EvalConfig:
    """Held-out evaluation through the engine and the sandbox."""

    tasks: Positive = 200
    """Held-out tasks, one trajectory each."""
    temperature: NonNegativeFloat = 1.0
    """Sampling temperature; 0 is greedy."""
    before: bool = True
    """Evaluate before the first step."""
    after: bool = True
    """Evaluate after the last step."""


@dataclass(frozen=True, config=_STRICT)
class MonitorConfig:
    """Where metrics go besides the run directory's JSONL file and the terminal."""

    wandb: Literal["disabled", "offline", "online"] = "disabled"
    """Weights & Biases mode."""
    wandb_project: str = "arpo-megatron"
    """Project there."""
    peak_tflops: PositiveFloat | None = None
    """What a rank's device can do at most, in TFLOP/s of the training format (H100 bfloat16: 989); for MFU."""
    profile_steps: tuple[Positive, Positive] | None = None
    """First and last step (update, in a cold start) whose passes over packs are traced with torch's profiler."""
    profile_ranks: Literal["leader", "all"] = "leader"
    """Which trainer ranks write a trace; one of a large model takes hundreds of MB."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(f"monitor.profile_steps={list(self.profile_steps)}: the last step is before the first")
        return self


@dataclass(frozen=True, config=_STRICT)
class JobConfig:
    """A whole job: what a recipe returns."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    """Recipe name; part of the run directory's name."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1
    """Everything random follows from it; the engine takes 32 bits."""
    platform: Platform = "auto"
    """`auto`: the GPUs of this machine, where it has any. `cpu`: leave them alone."""
    run_dir: Path | None = None
    """Where the job writes; None: the next free runs/<name>-<algorithm>-seed<seed>."""
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig = DataConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    sync: SyncConfig = SyncConfig()
    sandbox: SandboxConfig = SandboxConfig()
    reward: RewardConfig = RewardConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    sft: SftConfig = SftConfig()
    train: TrainConfig = TrainConfig()
    evaluation: EvalConfig = EvalConfig()
    monitor: MonitorConfig = MonitorConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        config_rules.check_job(self)
        return self

    @property
    def pack_multiple(self) -> int:
        """A rank's tokens are padded to a multiple of this.

        Sequence parallelism divides them among tensor-parallel ranks, and FP8 products want multiples on every rank.
        """
        return config_rules.FP8_TOKENS[self.model.fp8] * (self.parallel.tensor if self.parallel.sequence else 1)
