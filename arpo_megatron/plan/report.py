"""Text of a plan and of a layout search."""

from collections.abc import Iterator, Mapping
from dataclasses import fields

from arpo_megatron.config import EngineConfig, JobConfig, ParallelConfig
from arpo_megatron.hardware.specs import GIB
from arpo_megatron.jobs.tool_file import searches_per_s
from arpo_megatron.plan.fit import JobEstimate
from arpo_megatron.plan.recompute import describe
from arpo_megatron.plan.search import TOLERANCE, LayoutSearchResult
from arpo_megatron.plan.workload import TYPICAL_FILL, call_seconds

LAYOUT_KEYS: Mapping[str, tuple[str, ...]] = {
    "parallel": tuple(field.name for field in fields(ParallelConfig)),
    "train": ("token_budget", "group_tokens"),
    "engine": ("placement", "tensor", "replicas", "memory_fraction"),
    "rollout": ("max_staleness", "across_push", "stale"),
    "optimizer": ("offload",),
    "sync": ("transport",),
}
"""Config keys that a search changes."""


def render(plan: JobEstimate, measured: Mapping[str, float] | None = None) -> str:
    """Return a plan as text: sizes, memory by part, seconds by phase and part, and whether the job fits.

    Args:
        plan: the plan.
        measured: seconds of a run's steps by phase, for a second column.
    """
    return "\n".join(_lines(plan, measured)) + "\n"


def render_search(found: LayoutSearchResult) -> str:
    """Return the best layouts, and the number of others by reason of failure."""
    lines = [f"layouts on the same GPUs: {found.tried} tried, {found.fit} fit"]
    if found.best:
        lines.append(f"first the simplest within {TOLERANCE - 1:.0%} of the fastest, then by time")
        lines.append(f"  {'s/step':>7} {'GPU-h':>6} {'GiB':>5} {'batch':>5}  layout")
    for plan in found.best:
        batch = f"{plan.decode_batch:.0f}" if plan.decode_batch else "-"
        lines.append(
            f"  {plan.seconds:7.1f} {plan.gpu_hours:6.0f} {plan.peak_bytes / GIB:5.0f} {batch:>5}  "
            f"{overrides_between(plan, found.base)}"
        )
    for reason, count in found.failed:
        lines.append(f"  {count:5} fail: {reason}")
    return "\n".join(lines) + "\n"


def layout(parallel: ParallelConfig) -> str:
    """Return the dimensions other than 1: first those whose product is the number of ranks, then the others.

    Example: `tensor 4 x data 8, expert 4`. Empty for one rank.
    """
    dimensions = ("tensor", "context", "pipeline", "data")
    product = " x ".join(f"{name} {size}" for name in dimensions if (size := getattr(parallel, name)) > 1)
    others = {"expert": parallel.expert, "virtual pipeline": parallel.virtual_pipeline}
    more = [f"{name} {size}" for name, size in others.items() if size > 1]
    return ", ".join([*([product] if product else []), *more])


def overrides_between(plan: JobEstimate, base: JobConfig) -> str:
    """Return the overrides that change the config `base` to the plan's, for any command."""
    found = []
    for section, names in LAYOUT_KEYS.items():
        new, old = getattr(plan.config, section), getattr(base, section)
        changed = [name for name in names if getattr(new, name) != getattr(old, name)]
        found += [f"{section}.{name}={_text(getattr(new, name))}" for name in changed]
    return " ".join(found) or "unchanged"


def _text(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, tuple):
        return f"[{','.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _engines(engine: EngineConfig, colocated: bool) -> str:
    where = "on the trainer's GPUs" if colocated else "on separate GPUs"
    count = f"{engine.replicas} engines" if engine.replicas > 1 else "1 engine"
    return f"{count} of {engine.tensor} GPU(s), {where}"


def _lines(plan: JobEstimate, measured: Mapping[str, float] | None) -> Iterator[str]:
    config, needs = plan.config, plan.memory
    model = config.model.hub_id or config.model.path or "a random model"
    size = f"{plan.parameters / 1e9:.2f}" if plan.parameters > 1e8 else f"{plan.parameters / 1e9:.4f}"
    met = f", {plan.active_parameters / 1e9:.2f} billion a token" if plan.active_parameters < plan.parameters else ""
    yield f"{config.name}: {model}, {size} billion parameters{met}"
    nodes, where = f"{plan.nodes} node(s) of {plan.hardware.gpus} x {plan.hardware.name}", plan.layout
    apart = f" ({where.trainer_nodes} train, {where.engine_nodes} roll out)" if where and where.engine_nodes else ""
    engines = "" if config.sft_only else f"; {_engines(config.engine, not needs.engine)}"
    yield f"{nodes}{apart}; {layout(config.parallel) or '1 rank'}, recompute {describe(config.parallel)}{engines}"
    yield ""
    for title, parts in (
        ("GPU of a trainer rank in an update", needs.training),
        ("the same during rollouts", needs.rollout),
        ("GPU of an engine", needs.engine),
        ("host memory of a trainer rank", needs.host),
    ):
        if parts:
            yield from _table(f"{title}, GiB", {name: value / GIB for name, value in parts.items()})
    step = "an update" if config.sft_only else "a step"
    yield from _phases(f"{step}, seconds", plan, measured)
    pool = f"an engine decodes {plan.decode_batch:.0f} paths at a time, its pool holds {needs.kv_tokens:,} tokens"
    last = f"{config.sft.batch} conversations" if config.sft_only else pool
    yield f"{plan.tokens:,.0f} tokens {step}, each once; {last}"
    yield f"of the tokens that the trainer computes, {plan.repeated:.1%} are repeated ancestors"
    steps = f"{plan.steps} {step.split()[1]}s"
    yield f"{steps}, {plan.gpu_hours:,.0f} GPU-hours with a start-up of {plan.start_seconds:.0f} s, without evaluations"
    if config.parallel.data > 1:
        yield f"the slowest data-parallel rank has {plan.imbalance:.0%} more work than the mean"
    if not config.sft_only:
        yield _assumptions(config)
    for warning in plan.warnings:
        yield f"warning: {warning}"
    yield "fits" if plan.fits else f"does not fit: {plan.reason}"


def _assumptions(config: JobConfig) -> str:
    rollout, rate = config.rollout, searches_per_s(config.sandbox)
    calls = f"{rollout.max_tool_calls} tool call(s) a path of {call_seconds(config):g} s each"
    at_most = "" if rate is None else f", web searches at {rate:g} a second or fewer (search.web.requests_per_s)"
    return f"assumes responses of {TYPICAL_FILL:.0%} of rollout.max_response_tokens, and {calls}{at_most}"


def _phases(title: str, plan: JobEstimate, measured: Mapping[str, float] | None) -> Iterator[str]:
    """Yield the seconds of each phase, and below it those of its parts if it has several; at last unplanned phases."""
    taken = measured or {}

    def column(seconds: float | None) -> str:
        if measured is None:
            return ""
        return f"{'-':>11}" if seconds is None else f"{seconds:11.1f}"

    if measured is not None:
        yield f"{'':<42}{'planned':>9}{'measured':>11}"
    yield f"{title:<42}{plan.seconds:9.1f}{column(sum(taken.values()))}"
    for phase, parts in plan.seconds_by_part.items():
        yield f"  {phase:<40}{sum(parts.values()):9.1f}{column(taken.get(phase))}"
        if len(parts) > 1:
            yield from (f"    {name.replace('_', ' '):<38}{seconds:9.1f}" for name, seconds in parts.items())
    for phase in sorted(taken.keys() - plan.seconds_by_part.keys()):
        yield f"  {phase:<40}{'-':>9}{column(taken[phase])}"
    yield ""


def _table(title: str, rows: Mapping[str, float]) -> Iterator[str]:
    yield f"{title:<42}{sum(rows.values()):9.1f}"
    for name, value in rows.items():
        yield f"  {name.replace('_', ' '):<40}{value:9.1f}"
    yield ""
