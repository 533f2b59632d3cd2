"""What `arpo eval` is given to evaluate, and the config that follows from it."""

import json
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from urllib.parse import urlsplit

from arpo_megatron.config import JobConfig, ModelConfig, RolloutConfig, SandboxConfig
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.benchmarks import SUITES, Benchmark
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.run_directory import RunDirectory

PAPER_SAMPLING = (
    "evaluation.temperature=0.6",
    "evaluation.top_p=0.95",
    "evaluation.top_k=20",
    "evaluation.repetition_penalty=1.1",
)
"""How the paper samples (arXiv 2507.19849, section 4.4, and its released scripts)."""
_DEEP = RolloutConfig(max_tool_calls=6, max_response_tokens=10000, max_tool_tokens=2560)
_REASONING = RolloutConfig(max_tool_calls=3, max_response_tokens=4096)
_PROMPT_TOKENS = 2000


class TargetKind(StrEnum):
    """Where answers come from."""

    RUN = "run"  # a run directory: its export, or another Hugging Face directory, as the run's config serves it
    MODEL = "model"  # a Hugging Face directory
    SERVER = "server"  # a URL
    ORACLE = "oracle"  # the right answers
    WRONG = "wrong"  # wrong ones


@dataclass(frozen=True, slots=True)
class EvalTarget:
    """Who is evaluated.

    Attributes:
        kind: where answers come from.
        name: in tables.
        run: the run, if it is one.
        model: Hugging Face directory that an engine serves, if one does.
        url: of the server, if it is one.
    """

    kind: TargetKind
    name: str
    run: RunDirectory | None = None
    model: Path | None = None
    url: str = ""


def parse_target(text: str, model: str | None) -> EvalTarget:
    """What SUBJECT and --model mean.

    Raises:
        UserError: neither a directory of a run or a model, nor a URL, nor `oracle` or `wrong`.
    """
    if text in (TargetKind.ORACLE, TargetKind.WRONG):
        return EvalTarget(TargetKind(text), text)
    if urlsplit(text).scheme in ("http", "https"):
        return EvalTarget(TargetKind.SERVER, model or text, url=text)
    path = Path(text)
    run = RunDirectory(path)
    if run.config.is_file():
        served = Path(model) if model is not None else run.export
        if not (served / "config.json").is_file():
            raise UserError(f"{served} is no Hugging Face model; name one with --model")
        return EvalTarget(TargetKind.RUN, path.name if model is None else str(model), run=run, model=served)
    if (path / "config.json").is_file():
        if model is not None:
            raise UserError(f"--model {model}: {path} is a model itself")
        return EvalTarget(TargetKind.MODEL, path.resolve().name, model=path)
    raise UserError(
        f"{text} is neither a run directory (config.yaml) nor a Hugging Face directory (config.json), nor a URL, nor "
        f"{TargetKind.ORACLE} or {TargetKind.WRONG}"
    )


def eval_config(target: EvalTarget, benchmarks: list[Benchmark], tools: Tools, overrides: list[str]) -> JobConfig:
    """Return the config for answering: the run's or a fresh one, then the paper's sampling, then `overrides`.

    Args:
        target: who is evaluated.
        benchmarks: on what; empty: the run's own held-out tasks, sampled as the run says.
        tools: how the model comes to its tools.
        overrides: `section.key=value`, above all else.

    Raises:
        UserError: a word cannot be used.
    """
    if benchmarks:
        overrides = [*PAPER_SAMPLING, *overrides]
    if tools is Tools.NONE:
        overrides = [*overrides, "rollout.max_tool_calls=0"]
    base = _fresh(target, benchmarks) if target.run is None else resolve.load(target.run.config)
    return resolve.with_overrides(base, overrides)


def _fresh(target: EvalTarget, benchmarks: list[Benchmark]) -> JobConfig:
    """Without a run: the lengths of the recipes, deep search's where all benchmarks are of that suite."""
    deep = {benchmark.name for benchmark in benchmarks} <= set(SUITES["deepsearch"])
    rollout = _DEEP if deep else _REASONING
    length = _PROMPT_TOKENS + rollout.max_response_tokens
    model = ModelConfig(max_length=length)
    if target.model is not None:
        shape = json.loads((target.model / "config.json").read_text(encoding="utf-8"))
        stored = str(shape.get("dtype") or shape.get("torch_dtype") or "bfloat16")
        model = ModelConfig(
            path=target.model,
            dtype="float32" if stored.endswith("float32") else "bfloat16",
            max_length=max(64, min(length, int(shape.get("max_position_embeddings") or length))),
        )
    return JobConfig(
        name="eval",
        model=model,
        rollout=rollout,
        sandbox=SandboxConfig(search_results=10 if deep else 3, preload=("numpy", "sympy")),
    )
