"""Engines with the sizes of known models and random weights that no file holds.

SGLang draws the weights itself (its load format `dummy`). They are tiny, so every token of the vocabulary is about
equally likely, and trees grow as from `tool_calling_model`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from os import environ
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Literal

import requests
import torch

from arpo_megatron.actor import parallel
from arpo_megatron.bench.gpu.measure import timed
from arpo_megatron.bench.tool_calling_model import OTHERS, sums, tool_calling_tokenizer
from arpo_megatron.config import EngineConfig
from arpo_megatron.engine.launch import FP8_OPTIONS, EngineHandle, launch_engine
from arpo_megatron.engine.server.entropy import WITHOUT_ENTROPY
from arpo_megatron.hardware.placement import ON_CPU, Placement
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.plan.parameters import whole_model

SEGMENT = 128
"""Mean tokens before a tool call."""
DUMMY: Mapping[str, object] = MappingProxyType({"load-format": "dummy"})
"""Options of an engine that draws its weights."""
REQUEST_TIMEOUT_S = 600.0
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_COPIED_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class EngineKind:
    """Model, plug-in and quantization of an engine with random weights."""

    spec: ModelSpec
    entropy: bool = True
    """Whether it has the entropy plug-in, as a job's engines do."""
    quantization: Literal["none", "fp8"] = "none"
    """Quantization of the weights. FP8 weights are random too, so they are for speed alone."""


@dataclass(slots=True)
class RandomEngines:
    """The running engines; a context manager that stops them."""

    logs: Path
    dtype: Literal["bfloat16", "float32"]
    """Data type of their parameters."""
    sizes: EngineConfig
    _running: dict[EngineKind, EngineHandle] = field(default_factory=dict)
    _stack: ExitStack = field(default_factory=ExitStack)
    _folders: dict[ModelSpec, Path] = field(default_factory=dict)

    def __enter__(self) -> "RandomEngines":
        self.logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_exception: object) -> None:
        self.only()
        self._stack.close()

    def only(self, *kinds: EngineKind) -> list[EngineHandle]:
        """Stop all other engines, start those of `kinds` that are not running, and return them."""
        for kind in [kind for kind in self._running if kind not in kinds]:
            self._running.pop(kind).stop()
        return [self._running.get(kind) or self._start(kind) for kind in kinds]

    def folder(self, spec: ModelSpec) -> Path:
        """Return a Hugging Face directory of the model, without weights."""
        if spec not in self._folders:
            made = self._stack.enter_context(TemporaryDirectory(prefix="arpo-bench-gpu-"))
            write_directory(Path(made), spec, self.dtype, sums(max(1, spec.vocabulary // SEGMENT)))
            self._folders[spec] = Path(made)
        return self._folders[spec]

    def _start(self, kind: EngineKind) -> EngineHandle:
        options = dict(DUMMY)
        if kind.quantization != "none":
            options |= FP8_OPTIONS  # not through `sizes`: such an engine would wait for a push
        with _without_entropy() if not kind.entropy else ExitStack():
            engine = launch_engine(
                self.folder(kind.spec),
                self.sizes,
                dtype=self.dtype,
                seed=1,
                log_path=self.logs / "engines.log",
                placement=first_gpu(colocated=False),
                options=options,
            )
        self._running[kind] = engine
        return engine


def generate(url: str, prompts: list[list[int]], tokens: int) -> list[dict[str, Any]]:
    """Sample `tokens` tokens after each prompt with one request, and return the engine's answers.

    Raises:
        RuntimeError: an answer has another number of tokens.
    """
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 1.0, "max_new_tokens": tokens, "ignore_eos": True},
        "return_logprob": True,
    }
    answer = requests.post(f"{url}/generate", json=body, timeout=REQUEST_TIMEOUT_S)
    answer.raise_for_status()
    answers: list[dict[str, Any]] = answer.json()
    if any(len(each["output_ids"]) != tokens for each in answers):
        raise RuntimeError(f"the engine did not sample {tokens} tokens of each request")
    return answers


def first_gpu(*, colocated: bool) -> Placement:
    """Return the placement on the first GPU, or on the CPU if there is none."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Placement(gpus, engine_gpu=0, colocated=colocated) if gpus else ON_CPU


@contextmanager
def _without_entropy() -> Iterator[None]:
    environ[WITHOUT_ENTROPY] = "1"
    try:
        yield
    finally:
        del environ[WITHOUT_ENTROPY]


def write_directory(folder: Path, spec: ModelSpec, dtype: str, calls: Sequence[str]) -> None:
    """Write config.json and a tokenizer with whole calls as tokens, but no weights.

    Raises:
        ValueError: the model has experts or scaled rotary frequencies.
    """
    if spec.experts is not None or spec.rope_scaling is not None:
        raise ValueError(f"no config.json for {spec}")
    config: Mapping[str, object] = {
        "architectures": [_CLASSES[spec.family]],
        "model_type": spec.family,
        "vocab_size": spec.vocabulary,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_theta": spec.rope_theta, "rope_type": "default"},
        "rms_norm_eps": spec.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": spec.tied,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": 1,
        "dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tool_calling_tokenizer(spec.vocabulary - OTHERS - len(calls), calls).save_pretrained(folder)


@cache
def copies_per_s() -> float:
    """Return the bytes per second of a copy within the device's memory; each byte is read and written."""
    size = _COPIED_BYTES if torch.cuda.is_available() else 2**24
    source = torch.ones(size, dtype=torch.uint8, device=parallel.device())
    target = torch.empty_like(source)

    def copy() -> None:
        for _ in range(10):
            target.copy_(source)

    copy()
    return 10 * size / median(timed(copy) for _ in range(5))


def step_bytes(spec: ModelSpec, *, requests: int, context: int, value: int, product: int) -> float:
    """Return the bytes that a decoding step reads: every weight except unused embedding rows, and keys and values.

    Args:
        spec: the model.
        requests: number of requests.
        context: mean tokens before each.
        value: bytes of a parameter and of a value in the KV pool.
        product: bytes of a parameter of the layers' matrices.
    """
    whole = whole_model(spec)
    embedding = 0 if spec.tied else spec.vocabulary * spec.hidden
    weights = value * (whole.total - whole.products - embedding) + product * whole.products
    return weights + 2 * value * spec.layers * spec.kv_heads * spec.head_dim * context * requests
