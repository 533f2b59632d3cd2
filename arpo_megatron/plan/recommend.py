"""Admission, priority and staleness of a job by simulation, and whether the choice survives other constants.

All constants come from the planner, so none of them was measured on the job's GPUs.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from arpo_megatron.config import JobConfig
from arpo_megatron.hardware.specs import Hardware
from arpo_megatron.models.known import load_spec
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.plan.fit import JobEstimate
from arpo_megatron.plan.memory import colocated, kv_bytes
from arpo_megatron.plan.parameters import active_parameters
from arpo_megatron.plan.shares import MEMORY_SHARE, PRODUCT_SHARE
from arpo_megatron.plan.simulate import RolloutModel, SimulatedRollout, simulate
from arpo_megatron.plan.simulated_engine import EngineModel
from arpo_megatron.plan.timing import decoding_step
from arpo_megatron.plan.workload import TYPICAL_FILL, call_seconds, longest_response, mix, varied

STEPS = 3
MOST_TREES = 8
"""Trees per engine and step that are simulated; of more, a part with that part of the KV pool and of the batch."""
SPREAD = 0.3
"""Share by which each time or size is changed, up and down."""
WORTH = 0.1
"""Trees that are one policy version old are recommended if they save more than this share of the time."""
SAME = 0.02
"""Share of the time by which a choice may be slower than the best and still count as the best."""

Constant = Literal["prefill", "decoding", "tools", "pool"]
_CONSTANTS: dict[Constant, str] = {
    "prefill": "the time of prefill",
    "decoding": "the time of decoding",
    "tools": "the time of tools",
    "pool": "the size of the pool",
}
Choice = tuple[Literal["kv", "all"], Literal["none", "age"], Literal[0, 1]]
"""`rollout.admission`, `rollout.priority` and `rollout.max_staleness`."""
CHOICES: tuple[Choice, ...] = (
    *(("kv", "none", 0), ("all", "none", 0), ("all", "age", 0)),
    *(("kv", "none", 1), ("all", "none", 1), ("all", "age", 1)),
)
"""Not all: with `kv` few requests wait in an engine, and `age` changes little."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Simulated rollouts of one engine, for each choice."""

    model: RolloutModel
    part: float
    """Share of the engine's trees, pool and batch that is simulated."""
    results: dict[Choice, SimulatedRollout]
    choice: Choice
    """The recommended one."""
    changed: tuple[tuple[str, Choice], ...]
    """Changes of a constant after which another choice is better, and that one. Empty: the ranking survives."""

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-safe values for `arpo plan --json`."""
        rows = [
            {
                **_names(choice),
                "seconds_per_step": round(found.step_s, 1),
                "tokens_per_s": round(found.sampled / found.seconds / self.part),
                "reprefill": round(found.reprefill, 2),
            }
            for choice, found in self.results.items()
        ]
        return {
            "simulated": rows,
            "recommended": {f"rollout.{name}": value for name, value in _names(self.choice).items()},
            "changes": [f"{what}: {_text(to, ', ')}" for what, to in self.changed],
        }

    def render(self) -> str:
        """Return the text for `arpo plan --simulate`."""
        engine = self.model.engine
        lines = [
            f"simulated rollouts of one engine (not measured): {self.model.per_step / self.part:.0f} trees per step, "
            f"{engine.tokens / self.part:,.0f} tokens of KV, prefill {1 / engine.prefill_s / self.part:,.0f} tokens/s",
            "  admission  priority  staleness  s/step  tokens/s  re-prefill",
        ]
        lines += [
            f"  {how:9}  {order:8}  {stale:9}  {found.step_s:6.0f}  {found.sampled / found.seconds / self.part:8.0f}  "
            f"{found.reprefill:10.2f}"
            for (how, order, stale), found in self.results.items()
        ]
        lines.append(f"recommended: {_text(self.choice, ' ', 'rollout.')}")
        if not self.changed:
            constants = "the time of prefill, decoding or tools, or the size of the pool,"
            lines.append(f"also if {constants} is {SPREAD:.0%} larger or smaller")
        lines += [f"if {what}: {_text(to, ', ')} is better" for what, to in self.changed]
        return "\n".join(lines) + "\n"


def recommend(plan: JobEstimate) -> Recommendation:
    """Simulate a job's rollouts with each choice, then with each constant larger and smaller."""
    (base, part), tools_s = rollout_model(plan), call_seconds(plan.config)
    results = _compare(base, tools_s)
    choice, changed = _pick(results), list[tuple[str, Choice]]()
    for what, model, seconds in _variations(base, tools_s):
        others = _compare(model, seconds)
        better = _pick(others)
        if others[choice].step_s > (1 + SAME) * others[better].step_s:
            changed.append((what, better))
    return Recommendation(base, part, results, choice, tuple(changed))


def rollout_model(plan: JobEstimate) -> tuple[RolloutModel, float]:
    """Return the model of one engine of a job, and the share of it that the model has.

    More than `MOST_TREES` trees per step take too long; then pool and batch are smaller in the same proportion.
    """
    config, spec = plan.config, load_spec(plan.config.model)
    engine = engine_model(config, spec, plan.hardware, plan.memory.kv_tokens)
    trees = math.ceil(config.train.tasks_per_step / config.engine.replicas)
    part = min(1.0, MOST_TREES / trees)
    trees = round(part * trees)
    engine = replace(
        engine,
        tokens=max(round(part * engine.tokens), config.model.max_length),
        requests=max(1, round(part * engine.requests)),
        request_s=engine.request_s / part,
        context_s=engine.context_s / part,
        prefill_s=engine.prefill_s / part,
    )
    family = varied(mix(config, TYPICAL_FILL))
    model = RolloutModel(
        engine=engine,
        trees=tuple(family.tree(seed, 64) for seed in range(STEPS * trees)),
        per_step=trees,
        tool_s=_tools(call_seconds(config)),
        limit=longest_response(config),
        initial=family.initial,
        measured=config.algorithm.entropy_tokens,
        train_s=sum(seconds for phase, seconds in plan.seconds_by_phase.items() if phase != "rollout"),
        colocated=colocated(config),
    )
    return model, part


def engine_model(config: JobConfig, spec: ModelSpec, hardware: Hardware, kv_tokens: int) -> EngineModel:
    """Return the planner's sizes and times of an engine."""
    most = config.engine.max_running_requests
    alone, full = (decoding_step(config, spec, hardware, batch, 0.0) for batch in (1.0, float(most)))
    request_s = (full - alone) / max(1, most - 1)
    flops = config.engine.tensor * hardware.bf16_flops * PRODUCT_SHARE
    return EngineModel(
        tokens=kv_tokens,
        requests=most,
        step_s=alone - request_s,
        request_s=request_s,
        context_s=kv_bytes(config, spec) / (hardware.memory_speed * MEMORY_SHARE),
        prefill_s=2.0 * active_parameters(spec) / flops,
        batch_s=alone,
    )


def _compare(model: RolloutModel, tools_s: float) -> dict[Choice, SimulatedRollout]:
    changed = replace(model, tool_s=_tools(tools_s))
    return {
        choice: simulate(replace(changed, admission=choice[0], priority=choice[1], staleness=choice[2]))
        for choice in CHOICES
    }


def _names(choice: Choice) -> dict[str, str | int]:
    return dict(zip(("admission", "priority", "max_staleness"), choice, strict=True))


def _text(choice: Choice, between: str, before: str = "") -> str:
    return between.join(f"{before}{name}={value}" for name, value in _names(choice).items())


def _pick(results: dict[Choice, SimulatedRollout]) -> Choice:
    """Return the fastest on-policy choice, or the fastest of all if it saves enough time."""
    fresh, all_of_them = [each for each in results if not each[2]], list(results)
    best, fastest = (min(each, key=lambda choice: results[choice].step_s) for each in (fresh, all_of_them))
    return fastest if results[fastest].step_s < (1 - WORTH) * results[best].step_s else best


def _variations(model: RolloutModel, tools_s: float) -> Iterator[tuple[str, RolloutModel, float]]:
    for constant, name in _CONSTANTS.items():
        for factor in (1 - SPREAD, 1 + SPREAD):
            text = f"{name} is {SPREAD:.0%} {'larger' if factor > 1 else 'smaller'}"
            if constant == "tools":
                yield text, model, factor * tools_s
            else:
                yield text, replace(model, engine=_scaled(model.engine, constant, factor)), tools_s


def _scaled(engine: EngineModel, constant: Constant, factor: float) -> EngineModel:
    if constant == "prefill":
        return replace(engine, prefill_s=factor * engine.prefill_s)
    if constant == "pool":
        return replace(engine, tokens=round(factor * engine.tokens))
    return replace(
        engine,
        step_s=factor * engine.step_s,
        request_s=factor * engine.request_s,
        context_s=factor * engine.context_s,
    )


def _tools(mean_s: float) -> Callable[[int, int], float]:
    """Return log-normal seconds with sigma 1, the same for the same call."""
    return lambda tree, segment: mean_s * math.exp(float(np.random.default_rng((tree, segment)).normal()) - 0.5)
