"""The documentation and the code use the same names."""

import dataclasses
import importlib.util
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from arpo_megatron.actor.update_stats import UpdateStats
from arpo_megatron.config import JobConfig
from arpo_megatron.monitor.progress import STEP_PHASES
from arpo_megatron.packing.packs import PackReport
from arpo_megatron.registry import BUILTIN, ExtensionPoint, load
from tests.repo.metric_names import documented_metrics

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
ALGORITHMS = (ROOT / "docs" / "reference" / "algorithms.md").read_text()
POINTS = {
    "selector": ExtensionPoint.TASK_SELECTOR,
    "branching": ExtensionPoint.BRANCH_POLICY,
    "advantage": ExtensionPoint.ADVANTAGE,
    "loss": ExtensionPoint.LOSS,
    "replay": ExtensionPoint.REPLAY,
    "term": ExtensionPoint.REWARD_TERM,
}


def test_generated_pages_are_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("make_docs", ROOT / "scripts" / "make_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "reference" / "configuration.md").read_text() == module.render(), "run `make docs`"
    cluster = (ROOT / "docs" / "guides" / "cluster.md").read_text()
    assert cluster == module.render_profile(cluster), "run `make docs`"
    planning = (ROOT / "docs" / "guides" / "planning.md").read_text()
    assert module.render_plans(planning) == planning, "run `make docs`"
    assert module.render_algorithms(ALGORITHMS) == ALGORITHMS, "run `make docs`"


def test_metrics_of_a_step_are_documented() -> None:
    """Names that only a run produces are compared by the end-to-end tests."""
    names = {field.name for field in dataclasses.fields(UpdateStats)} - {"skipped"}
    names |= {f"pack/{field.name}" for field in dataclasses.fields(PackReport)}
    names |= {f"reward/{name}" for name in BUILTIN[ExtensionPoint.REWARD_TERM]} | {
        f"seconds/{name}" for name in STEP_PHASES
    }
    assert names <= documented_metrics()


def test_table_of_papers_names_presets_and_components_that_exist() -> None:
    table = ALGORITHMS.partition("## The papers around ARPO")[2]
    presets = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"^\|[^|]*\|([^|]*)\|", table, re.MULTILINE)[1:])))
    assert presets - {"algorithm"} == set(BUILTIN[ExtensionPoint.PRESET]) - {"random"}
    for key, name in re.findall(r"`(selector|branching|advantage|loss|replay|term)=(\w+)`", table):
        assert name in BUILTIN[POINTS[key]], f"{key}={name}"


def test_structure_page_has_the_layers_of_the_contract() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["name"] == "layers")  # the highest is first
    numbers = {name: number for number, layer in enumerate(reversed(layers), 1) for name in re.split(r" [|:] ", layer)}
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "docs/internals/structure.md").read_text(), re.MULTILINE)
    named = {name: int(number) for number, cell in rows for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)}
    assert named == numbers


def test_at_most_eight_modules_stand_outside_packages() -> None:
    assert len(list((ROOT / "arpo_megatron").glob("*.py"))) <= 8


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_exist(page: Path) -> None:
    text = page.read_text()
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
    for link in links:
        assert (page.parent / link).exists(), f"{page.name} links to {link}"
    for name in re.findall(r"`((?:arpo_megatron|recipes|tools_sandbox|tests|docs|scripts)/[\w/.]+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def config_keys(owner: Any, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(owner):
        yield f"{prefix}{field.name}"
        if dataclasses.is_dataclass(field.type):
            yield from config_keys(field.type, f"{prefix}{field.name}.")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_config_keys_exist(page: Path) -> None:
    known = set(config_keys(JobConfig))
    sections = "|".join({key.partition(".")[0] for key in known if "." in key})
    named = re.findall(rf"[`\s']((?:{sections})\.[a-z0-9_.]+)(?=[=`])", page.read_text())
    free = re.compile(
        r"(algorithm|reward)\.params\.|data\.columns\.|reward\.terms\.|engine\.options\.|.*\.(py|log|parquet|jsonl?|yaml|md)$"
    )
    assert not [key for key in named if key not in known and not free.match(key)]


NO_METHOD = {"epochs", "random", "format", "length", "tool_calls", "environment"}
"""Components that no paper describes: the plain order, a control arm, measures, and what an environment gives."""
NO_METHODS = {
    *(ExtensionPoint.PRESET, ExtensionPoint.CALL_PROTOCOL, ExtensionPoint.DATA_READER, ExtensionPoint.ENVIRONMENT),
}
COMPONENTS = [
    (point, name) for point in BUILTIN if point not in NO_METHODS for name in BUILTIN[point] if name not in NO_METHOD
]


@pytest.mark.parametrize(("point", "name"), COMPONENTS, ids=[f"{point.name}-{name}" for point, name in COMPONENTS])
def test_component_cites_its_paper(point: ExtensionPoint, name: str) -> None:
    assert re.search(r"arXiv \d{4}\.\d{5}|doi\.org/\S+", load(point, name).__doc__), "cite arXiv NNNN.NNNNN or a DOI"


def test_table_of_losses_has_every_loss_once() -> None:
    notation, _, _ = ALGORITHMS.partition("<!-- presets: begin -->")
    assert sorted(re.findall(r"^\| `(\w+)` \|", notation, re.MULTILINE)) == sorted(BUILTIN[ExtensionPoint.LOSS])
