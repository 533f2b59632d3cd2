"""Write docs/configuration.md from the config dataclasses and the metrics of docs/run-directory.md (`make docs`).

A test fails when they are out of date.
"""

import dataclasses
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from arpo_megatron.config import JobConfig
from arpo_megatron.monitor.catalogue import metrics

TARGET = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
RUN_DIRECTORY = TARGET.with_name("run-directory.md")
HEAD = """# Configuration reference

Made from `arpo_megatron/config/` by `make docs`; do not edit. The value shown is the default; a recipe states what
it changes. Give a value as `section.key=value` or in a file with `--config`; `arpo train RECIPE --dry-run` prints the
result.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD, *_section(JobConfig, "")]
    return "\n".join(parts) + "\n"


def render_metrics(page: str) -> str:
    """The page about the run directory with its list of metrics made anew."""
    rows = [f"| `{name}` | {meaning.replace(chr(124), chr(92) + chr(124))} |" for name, meaning in metrics().items()]
    table = "\n".join(["", "| metric | meaning |", "| --- | --- |", *rows, ""])
    return re.sub(r"(?<=: begin -->\n).*?(?=<!-- end -->)", lambda _: table + "\n", page, flags=re.DOTALL)


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
        default = "required" if info.is_required() else f"`{_plain(info.default)}`"
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
        return " or ".join(_type(part) for part in get_args(kind))
    if kind is type(None):
        return "none"
    if get_origin(kind) is tuple:
        return "list of " + _type(get_args(kind)[0])
    return str(getattr(kind, "__name__", kind)).lower()


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    RUN_DIRECTORY.write_text(render_metrics(RUN_DIRECTORY.read_text(encoding="utf-8")), encoding="utf-8")
