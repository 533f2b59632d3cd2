"""What runs beside the trainer: rollouts, engines, weight sync, tools."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
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
    """What becomes of trees that take too long for `max_staleness` (> 0). `correct`: the step waits for them. `refuse`:
    it goes on; they are left out when they finish, counted and replaced. What older weights have sampled of a tree that
    is trained is corrected by `algorithm.trajectory_weight_limit` either way."""
    oversampling: NonNegativeFloat = 0.0
    """Share of trees begun beyond a step's need; the last to finish are given up. Favours short trajectories. Not with
    `max_staleness` > 0."""
    max_refills: NonNegative = 8
    """Rounds of new tasks in a step for those that failed or were left out, before it goes on with fewer. (A run
    that is resumed within a step has as many again.)"""
    keep_every_s: NonNegativeFloat = 60.0
    """Seconds between two writings of what a step's trees have sampled, while it waits for them: what a run that is
    killed then may have to sample again."""


@dataclass(frozen=True, config=STRICT)
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


@dataclass(frozen=True, config=STRICT)
class SyncConfig:
    """Weights from the trainer into the engines."""

    transport: Literal["auto", "broadcast", "ipc", "disk"] = "auto"
    """`broadcast`: gloo, on GPUs NCCL. `ipc`: memory that trainer and engine share, CUDA's where they share a GPU.
    `disk`: files, for engines that no network joins with the trainer. `auto`: `ipc` on a shared GPU, else
    `broadcast`."""
    bucket_mb: Positive = 256
    """Tensors are gathered and sent in buckets; what a push takes on the trainer's first rank is twice so many MiB. A
    parameter that is larger comes in blocks of rows; with `ipc` the memory that is shared holds the largest tensor."""
    verify_every: NonNegative = 20
    """At an engine's first push and at every so many, checksums of sampled tensors are compared, and the probe that
    follows every push is a long one; 0: at the first alone."""
    directory: Path | None = None
    """With `disk`: where, under one name on all machines. None: in the run directory."""

    @property
    def bucket_bytes(self) -> int:
        """Bytes of tensors in a bucket: `bucket_mb` less room for what a push takes besides (docs/weight-sync.md)."""
        whole = self.bucket_mb * 2**20
        return whole - min(12 * 2**20, 3 * whole // 8)


@dataclass(frozen=True, config=STRICT)
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
    isolation: Literal["full", "contained", "process", "limits"] = "contained"
    """Weakest separation of python calls from this machine to put up with; see docs/security.md."""
    sessions: bool = False
    """Python calls of a trajectory go on with the names and files of the call before; a fork copies them."""
