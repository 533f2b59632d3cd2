"""Write docs/reference/configuration.md from the config dataclasses, and the generated tables of cluster.md,
planning.md and algorithms.md (`make docs`).

A test fails when they are out of date.
"""

import ast
import dataclasses
import inspect
import itertools
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from arpo_megatron.cluster.profile import ClusterProfile
from arpo_megatron.config import AlgorithmConfig, JobConfig
from arpo_megatron.hardware.specs import GIB
from arpo_megatron.jobs import resolve
from arpo_megatron.plan import GPUS, plan
from arpo_megatron.registry import BUILTIN, ExtensionPoint, load

TARGET = Path(__file__).resolve().parent.parent / "docs" / "reference" / "configuration.md"
CLUSTER = TARGET.parents[1] / "guides" / "cluster.md"
PLANNING = CLUSTER.with_name("planning.md")
ALGORITHMS = TARGET.with_name("algorithms.md")
HEAD = """# Configuration reference

After this page you can look up each key with its type, default and meaning.

    arpo train quickstart algorithm.entropy_weight=0.4 train.steps=20 --dry-run     # print the resolved config
    arpo train quickstart --config mine.yaml                                        # the same keys in a file
    arpo show quickstart                                                            # the source of each value

A recipe states its difference from these defaults. An unknown key is refused with a suggestion. `make docs` generates
this page from `arpo_megatron/config/`.
"""


def render() -> str:
    """Return docs/reference/configuration.md: the introduction and a table of keys per section of the config."""
    return "\n".join([HEAD, *_section(JobConfig, "")]) + "\n"


def render_profile(page: str) -> str:
    """Return the page about clusters with its table of profile keys."""
    rows = []
    for name, info in ClusterProfile.__pydantic_fields__.items():
        meaning = " ".join((info.description or "").split()).replace("|", "\\|")
        value = info.get_default(call_default_factory=True)
        default = "required" if info.is_required() else f"`{_plain(value)}`"
        rows.append(f"| `{name}` | {default} | {meaning} |")
    return _between("profile", ["| key | default | meaning |", "| --- | --- | --- |", *rows], page)


def render_algorithms(page: str) -> str:
    """Return the page about methods with its tables of presets and components."""
    return _between("components", _components(), _between("presets", _presets(), page))


MEASURED: dict[str, dict[str, float]] = {}
"""Seconds by phase of `RECIPE+layout`, or of a recipe's own layout, measured on the GPUs of that layout:
`measured_seconds_by_phase` of `arpo plan RECIPE --measured RUN --json`."""


def render_plans(page: str) -> str:
    """Return the page about planning with its tables of the recipes' layouts and of their phases."""
    rows = [
        "| recipe | layout | GPUs | seconds per step | measured | GPU-hours | GiB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for recipe, layout in ((name, each) for name in resolve.recipe_names() for each in resolve.layout_names(name)):
        name = f"{recipe}+{layout}"
        found = plan(resolve.resolve(name), GPUS[resolve.gpu_of(name)])
        planned, measured = _seconds(found.seconds), _seconds(sum(MEASURED.get(name, {}).values()) or None)
        rows.append(
            f"| `{recipe}` | `{layout}` | {found.gpus} {found.hardware.name} | {planned} | {measured} | "
            f"{found.gpu_hours:.0f} | {found.peak_bytes / GIB:.0f} |"
        )
    return _between("plans", rows, _between("phases", _phases(), page))


def _phases() -> list[str]:
    """Two rows per recipe with a layout: its seconds by phase and part, planned and measured."""
    phases = ("rollout", "lend", "logprobs", "update", "push", "save")
    parts = ("attention", "matrix_products", "memory_bound_kernels", "head", "gradient_reduction", "optimizer")
    titles = ["recipe", "", "step", *phases, *(name.replace("_", " ") for name in (*parts, "other"))]
    rows = [f"| {' | '.join(titles)} |", "|" + " --- |" * len(titles)]
    for recipe in (name for name in resolve.recipe_names() if resolve.layout_names(name)):
        found = plan(resolve.resolve(recipe), GPUS[resolve.gpu_of(recipe)])
        update = found.seconds_by_part["update"]
        own = {name: update[name] for name in parts}
        other = {"other": sum(update.values()) - sum(own.values())}
        cells = [found.seconds, *(found.seconds_by_phase.get(phase) for phase in phases)]
        cells += [*own.values(), *other.values()]
        rows.append(f"| `{recipe}` | planned | {' | '.join(map(_seconds, cells))} |")
        measured = MEASURED.get(recipe, {})
        cells = [sum(measured.values()) or None, *(measured.get(phase) for phase in phases)]
        rows.append(f"| | measured | {' | '.join(map(_seconds, cells))} |{' |' * (len(parts) + 1)}")
    return rows


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.{0 if value >= 9.95 else 1}f}"


def _between(name: str, rows: list[str], page: str) -> str:
    """Replace the text between the two marks of `name`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    assert found and closed, f"the page has no {begin} ... {end}"
    return "\n".join([f"{before}{begin}", "", *rows, "", f"{end}{after}"])


def _presets() -> list[str]:
    components = ("selector", "branching", "advantage", "loss", "replay")
    rows = ["| `algorithm.name` | method | components | other values |", "| --- | --- | --- | --- |"]
    for name in BUILTIN[ExtensionPoint.PRESET]:
        found = load(ExtensionPoint.PRESET, name)
        values = {key.removeprefix("algorithm."): value for key, value in found.values.items()}
        usual = {"selector": "epochs", "replay": None}
        named = [
            f"{component} `{values[component]}`"
            for component in components
            if values[component] != usual.get(component, "")
        ]
        plain = {"shared_advantage": "soft", "loss_aggregation": "token-mean", "drop_groups_without_signal": False}
        others = [f"`{k}={_plain(v)}`" for k, v in values.items() if k not in components and plain.get(k, "") != v]
        rows.append(f"| `{name}` | {found.about} | {', '.join(named)} | {', '.join(others)} |")
    return rows


def _components() -> list[str]:
    """One row per component: the first paragraph of its docstring, its params, and the file that has the equations."""
    rows = ["| component | summary | params (default) |", "| --- | --- | --- |"]
    keys = {field.name for field in dataclasses.fields(AlgorithmConfig)}
    for point, key in (
        (ExtensionPoint.BRANCH_POLICY, "branching"),
        (ExtensionPoint.ADVANTAGE, "advantage"),
        (ExtensionPoint.LOSS, "loss"),
        (ExtensionPoint.TASK_SELECTOR, "selector"),
        (ExtensionPoint.REPLAY, "replay"),
    ):
        for name in BUILTIN[point]:
            component = load(point, name)
            meanings = {k: v for each in reversed(component.__mro__[:-1]) for k, v in _attributes(each).items()}
            params = [
                f"`{field.name}` ({_plain(field.default)}): {meanings.get(field.name, '')}"
                for field in dataclasses.fields(component)
                if field.init and field.name not in keys | {"config", "vocabulary_size", "seed", "tasks"}
            ]
            summary = inspect.cleandoc(component.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
            link = f"[`{key}={name}`](../../{component.__module__.replace('.', '/')}.py)"
            cells = [text.replace("|", "\\|") for text in (link, summary, "; ".join(params))]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def _attributes(owner: type) -> dict[str, str]:
    """Attribute docstrings of a class in its source: name -> text."""
    found: dict[str, str] = {}
    try:
        (tree,) = ast.parse(inspect.cleandoc(inspect.getsource(owner))).body
    except (OSError, TypeError, SyntaxError):
        return found
    assert isinstance(tree, ast.ClassDef)
    for field, text in itertools.pairwise(tree.body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                found[name] = meaning
    return {name: " ".join(text.split()).removesuffix(".") for name, text in found.items()}


def _section(owner: Any, prefix: str) -> list[str]:
    title = prefix.removesuffix(".") or "The job"
    summary = " ".join((owner.__doc__ or "").split())
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    below: list[str] = []
    for field in dataclasses.fields(owner):
        if dataclasses.is_dataclass(field.type):
            below += _section(field.type, f"{prefix}{field.name}.")
            continue
        info = owner.__pydantic_fields__[field.name]
        meaning = " ".join((info.description or "").split()).replace("|", "\\|")
        value = info.get_default(call_default_factory=True)
        default = "required" if info.is_required() else f"`{_plain(value)}`"
        rows.append(f"| `{prefix}{field.name}` | {_type(field.type)} | {default} | {meaning} |")
    return [f"## {title}\n", f"{summary}\n", *rows, "", *below]


def _plain(value: Any) -> str:
    return str(value) if not isinstance(value, tuple) else "[" + ", ".join(map(str, value)) + "]"


def _type(kind: Any) -> str:
    if get_origin(kind) is Annotated:
        base, *extra = get_args(kind)
        bounds = re.findall(r"(Gt|Ge|Lt|Le)\(\w+=([\d.]+)\)", str([getattr(item, "metadata", "") for item in extra]))
        signs = {"Gt": ">", "Ge": ">=", "Lt": "<", "Le": "<="}
        return " ".join([_type(base), ", ".join(f"{signs[name]} {bound}" for name, bound in bounds)]).strip()
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind))
    if isinstance(kind, types.UnionType) or get_origin(kind) is types.UnionType:
        return " or ".join(_type(member) for member in get_args(kind))
    if kind is type(None):
        return "none"
    if get_origin(kind) in (tuple, dict):
        item = get_args(kind)[0 if get_origin(kind) is tuple else 1]
        return f"{'list of' if get_origin(kind) is tuple else 'mapping of names to'} {_type(item)}"
    return str(getattr(kind, "__name__", kind)).lower()


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    CLUSTER.write_text(render_profile(CLUSTER.read_text(encoding="utf-8")), encoding="utf-8")
    PLANNING.write_text(render_plans(PLANNING.read_text(encoding="utf-8")), encoding="utf-8")
    ALGORITHMS.write_text(render_algorithms(ALGORITHMS.read_text(encoding="utf-8")), encoding="utf-8")
