"""The SGLang servers."""

from typing import Literal

from pydantic.dataclasses import dataclass

from arpo_megatron.config.fields import STRICT, Fraction, NonNegative, Positive, PositiveFloat


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
