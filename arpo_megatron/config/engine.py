"""Section `engine`: the SGLang servers that sample."""

from dataclasses import field
from typing import Literal

from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, Fraction, NonNegative, Positive, PositiveFloat


@dataclass(frozen=True, config=STRICT)
class EngineConfig:
    """The SGLang servers that sample: their number, placement, memory, quantization, time limits and restarts."""

    replicas: Positive = 1
    """Number of engines, each with a copy of the model. A tree stays on one engine."""
    tensor: Positive = 1
    """Tensor-parallel GPUs per engine."""
    expert: Positive = 1
    """Expert-parallel groups among an engine's GPUs, for a mixture of experts: each group holds a part of the experts,
    and the GPUs of a group divide each expert."""
    router: Literal["auto", "sglang", "none"] = "auto"
    """How trees are assigned to several engines. `none`: the engine with the most room in its KV pool, with
    `rollout.admission=all` by a hash of the tree's task; `arpo serve` then uses the first engine only. `sglang`:
    SGLang's router, the least busy engine first; entropies are not streamed, and admission sees one pool. `auto`: the
    router, if it is installed, for `arpo serve` and for engines that cannot stream entropies; else `none`."""
    max_running_requests: Positive = 64
    """Largest decoding batch of an engine."""
    max_total_tokens: Positive | None = None
    """Size of the KV pool in tokens; None: SGLang derives it from `memory_fraction`."""
    memory_fraction: Fraction | None = None
    """Share of the device's memory for weights and KV pool. None: 0.3 on a GPU shared with the trainer, else 0.6."""
    attention_backend: Literal["auto", "fa3", "flashinfer", "triton"] = "auto"
    """Attention kernels on a GPU. `auto`: SGLang's choice (fa3 on Hopper), but triton in float32."""
    placement: Literal["auto", "colocated", "split"] = "auto"
    """`colocated`: engines share the trainer's GPUs and release their memory while it trains. `split`: engines have
    their own GPUs. `auto`: split if there are enough GPUs, and on a CPU."""
    quantization: Literal["none", "fp8"] = "none"
    """`fp8`: engines hold the weights of the layers' products in FP8, with a scale for each block of 128 x 128. The
    trainer quantizes them when it pushes. The sampling policy differs from the trained one by the rounding. On a CPU
    products in FP8 are emulated."""
    deterministic: bool = False
    """On a GPU: use kernels whose result for a request does not depend on the rest of the batch; slower."""
    startup_timeout_s: PositiveFloat = 300.0
    """Seconds until an engine must pass its health check after the start."""
    request_timeout_s: PositiveFloat = 600.0
    """Deadline of one generation in seconds. If the engine streams, it starts with the first token; before that, an
    accepted request may wait 10 times as long, for it may be in the engine's queue."""
    hang_timeout_s: PositiveFloat = 120.0
    """A service (engine, tools, rollout process) that does not answer its probe for this many seconds is restarted. The
    value must exceed the longest pause of a healthy service: a bucket of a weight push, the compilation of a kernel."""
    restarts: NonNegative = 10
    """Number of service restarts within an hour (engines, tools, rollout process, router); one more failure stops the
    job."""
    retry_for_s: PositiveFloat = 600.0
    """A generation or tool call is repeated for this many seconds after its first failure: time to restart an engine.
    """
    options: dict[str, bool | int | float | str] = field(default_factory=dict, hash=False)
    """Further options of SGLang by name, for example {kv_cache_dtype: fp8_e4m3, enable_hierarchical_cache: true}; true
    stands for a flag. Unknown ones, and those that the rollouts cannot use, are refused."""
