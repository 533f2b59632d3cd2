"""Each kind of extension has one home, which CONTRIBUTING.md names and in which every built-in component lives."""

import inspect
import re
from pathlib import Path

import pytest
import typer

from arpo_megatron.cli.main import app
from arpo_megatron.cluster.profile import profile_names
from arpo_megatron.evaluation.benchmarks import Benchmark
from arpo_megatron.registry import BUILTIN, ExtensionPoint
from arpo_megatron.tasks.files.reader import read_tasks
from arpo_megatron.tasks.synthetic.families import FAMILIES
from arpo_megatron.weights.transports import Disk, Ipc, Network

ROOT = Path(__file__).resolve().parents[2]
HOMES = {
    "branch policy": ("arpo_megatron/algorithms/branching/", "tests/algorithms/test_branching.py"),
    "loss": ("arpo_megatron/algorithms/losses/", "tests/algorithms/test_methods_losses.py"),
    "advantage": ("arpo_megatron/algorithms/advantages/", "tests/algorithms/test_methods_advantages.py"),
    "reward or reward term": ("arpo_megatron/rewards/", "tests/rewards/test_reward.py"),
    "task reader": ("arpo_megatron/tasks/", "tests/tasks/test_files.py"),
    "tool": ("tools_sandbox/", "tests/tools_sandbox/test_added_tools.py"),
    "benchmark": ("arpo_megatron/evaluation/benchmarks.py", "tests/evaluation/test_questions.py"),
    "cluster profile": ("slurm/clusters/", "tests/cluster/test_submit.py"),
    "weight transport": ("arpo_megatron/weights/transports/", "tests/weights/test_push.py"),
    "CLI command": ("arpo_megatron/cli/", "tests/cli/test_cli.py"),
}
REGISTERED = {
    ExtensionPoint.BRANCH_POLICY: "branch policy",
    ExtensionPoint.LOSS: "loss",
    ExtensionPoint.ADVANTAGE: "advantage",
    ExtensionPoint.REWARD: "reward or reward term",
    ExtensionPoint.REWARD_TERM: "reward or reward term",
}


def test_contributing_names_every_home() -> None:
    rows = re.findall(
        r"^\| ([^|`]+) \| `([^`]+)` \| `([^`]+)` \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    assert {kind: (home, test) for kind, home, test in rows} == HOMES
    assert all((ROOT / path).exists() for homes in HOMES.values() for path in homes)


@pytest.mark.parametrize("point", REGISTERED)
def test_built_in_components_live_in_their_home(point: ExtensionPoint) -> None:
    package = HOMES[REGISTERED[point]][0].replace("/", ".")
    assert BUILTIN[point] and not [where for where in BUILTIN[point].values() if not where.startswith(package)]


def test_commands_live_in_the_cli_package() -> None:
    def modules(group: typer.Typer) -> set[str]:
        own = {command.callback.__module__ for command in group.registered_commands if command.callback}
        return own.union(*(modules(each.typer_instance) for each in group.registered_groups if each.typer_instance))

    assert all(name.startswith("arpo_megatron.cli.") for name in modules(app))


def test_benchmarks_profiles_transports_and_readers_live_in_their_home() -> None:
    assert inspect.getfile(Benchmark) == str(ROOT / HOMES["benchmark"][0])
    assert {path.stem for path in (ROOT / HOMES["cluster profile"][0]).glob("*.yaml")} == set(profile_names())
    for transport in (Ipc, Network, Disk):
        assert Path(inspect.getfile(transport)).parent == ROOT / HOMES["weight transport"][0]
    for reader in (read_tasks, *(family.generate for family in FAMILIES.values())):
        assert reader.__module__.startswith(HOMES["task reader"][0].replace("/", "."))
