"""The target of `arpo eval`, and the config for evaluating it."""

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
from arpo_megatron.jobs.run_directory import RunDirectory, run_path

PAPER_SAMPLING = (
    "evaluation.temperature=0.6",
    "evaluation.top_p=0.95",
    "evaluation.top_k=20",
    "evaluation.repetition_penalty=1.1",
)
"""Sampling of the paper (arXiv 2507.19849, section 4.4, and its released scripts)."""
_DEEP = RolloutConfig(max_tool_calls=6, max_response_tokens=10000, max_tool_tokens=3072)
_REASONING = RolloutConfig(max_tool_calls=3, max_response_tokens=4096, max_tool_tokens=3072)
_PROMPT_TOKENS = 2000
_AUTHORS_RESPONSE_TOKENS = 30000


class Setting(StrEnum):
    """Limits and prompts of an evaluation."""

    RECIPES = "recipes"  # those of the training recipes
    AUTHORS = "authors"  # those of the authors' evaluation scripts


AUTHORS_LIMITS = (
    "rollout.max_tool_calls=15",
    "rollout.max_calls_by_tool={python: 5, search: 10}",
    "rollout.refuse_repeated=[search]",
    "rollout.at_limit=answer_now",
    "rollout.stop_at_answer=true",
    "rollout.max_turn_tokens=4096",
    "rollout.max_tool_tokens=3072",
    "rollout.max_response_tokens=30000",
    "rollout.tool_timeout_s=120",
    "sandbox.python_timeout_s=120",
    "sandbox.search_results=10",
    "reward.judge.wording=arpo",
)
"""Limits of evaluation/infer_local_sds.sh of the released code. Its only limit of a whole response is the model's
context of 32,768 tokens, of which 2,000 are the prompt's here."""


class TargetKind(StrEnum):
    """Kinds of targets, by the source of their answers."""

    RUN = "run"  # a run directory: its export, or another Hugging Face directory, served with the run's config
    MODEL = "model"  # a Hugging Face directory
    SERVER = "server"  # a URL
    ORACLE = "oracle"  # correct answers
    WRONG = "wrong"  # wrong answers


@dataclass(frozen=True, slots=True)
class EvalTarget:
    """The model, server or oracle that is evaluated."""

    kind: TargetKind
    name: str
    """Name in tables."""
    run: RunDirectory | None = None
    """The run, for `TargetKind.RUN`."""
    model: Path | None = None
    """Hugging Face directory that an engine serves, for runs and models."""
    url: str = ""
    """Address, for `TargetKind.SERVER`."""

    @property
    def is_oracle(self) -> bool:
        """Whether no model answers."""
        return self.kind in (TargetKind.ORACLE, TargetKind.WRONG)


def parse_target(text: str, model: str | None) -> EvalTarget:
    """Parse the arguments TARGET and --model.

    Raises:
        UserError: TARGET is neither a directory of a run or a model, nor a URL, nor `oracle` or `wrong`.
    """
    if text in (TargetKind.ORACLE, TargetKind.WRONG):
        return EvalTarget(TargetKind(text), text)
    if is_url(text):
        return EvalTarget(TargetKind.SERVER, model or text, url=text)
    return model_target(text, model, f", nor a URL, nor {TargetKind.ORACLE} or {TargetKind.WRONG}")


def is_url(text: str) -> bool:
    """Whether a target is the address of a server."""
    return urlsplit(text).scheme in ("http", "https")


def model_target(text: str, model: str | None, otherwise: str = "") -> EvalTarget:
    """Return the target at a directory of a run or a model. Raises UserError, which ends with the other choices."""
    path = run_path(text)
    run = RunDirectory(path)
    if run.config.is_file():
        served = Path(model) if model is not None else run.export
        if not (served / "config.json").is_file():
            more = f": the run has no export yet; name what `arpo export {text}` writes" if model is None else ""
            raise UserError(f"{served} is not a Hugging Face model{more}")
        return EvalTarget(TargetKind.RUN, path.name if model is None else str(model), run=run, model=served)
    if (path / "config.json").is_file():
        if model is not None:
            raise UserError(f"--model {model}: {path} is a model itself")
        return EvalTarget(TargetKind.MODEL, path.resolve().name, model=path)
    raise UserError(
        f"{text} is neither a run directory (config.yaml) nor a Hugging Face directory (config.json){otherwise}"
    )


def eval_config(
    target: EvalTarget,
    benchmarks: list[Benchmark],
    tools: Tools,
    overrides: list[str],
    setting: Setting = Setting.RECIPES,
) -> JobConfig:
    """Return the config for answering: the run's or a fresh one, then the paper's sampling, then `overrides`.

    Args:
        target: the model.
        benchmarks: the benchmarks; empty for the run's own held-out tasks, which keep the run's sampling.
        tools: how the model calls tools.
        overrides: `section.key=value` of the user.
        setting: limits for a model or a server; a run has its own.

    Raises:
        UserError: an override is not valid, or the setting does not fit the target.
    """
    if setting is Setting.AUTHORS:
        if target.run is not None:
            raise UserError("--setting authors evaluates a model directory or a URL: give RUN_DIR/export")
        overrides = [*AUTHORS_LIMITS, *overrides]
    if benchmarks:
        overrides = [*PAPER_SAMPLING, *overrides]
    if tools is Tools.NONE:
        overrides = [*overrides, "rollout.max_tool_calls=0", "evaluation.max_tool_calls=null"]
    base = _fresh_config(target, benchmarks, setting) if target.run is None else resolve.load(target.run.config)
    return resolve.with_overrides(base, overrides)


def _fresh_config(target: EvalTarget, benchmarks: list[Benchmark], setting: Setting) -> JobConfig:
    """Return a config with the lengths of the recipes: those of deep search if all benchmarks belong to that suite."""
    deep = {benchmark.name for benchmark in benchmarks} <= set(SUITES["deepsearch"])
    rollout = _DEEP if deep else _REASONING
    response = rollout.max_response_tokens if setting is Setting.RECIPES else _AUTHORS_RESPONSE_TOKENS
    length = _PROMPT_TOKENS + response
    model = ModelConfig(max_length=length)
    if target.model is not None:
        hf_config = json.loads((target.model / "config.json").read_text(encoding="utf-8"))
        stored = str(hf_config.get("dtype") or hf_config.get("torch_dtype") or "bfloat16")
        model = ModelConfig(
            path=target.model,
            dtype="float32" if stored.endswith("float32") else "bfloat16",
            max_length=max(64, min(length, int(hf_config.get("max_position_embeddings") or length))),
        )
    return JobConfig(
        name="eval",
        model=model,
        rollout=rollout,
        sandbox=SandboxConfig(search_results=10, preload=("numpy", "sympy")),
    )
