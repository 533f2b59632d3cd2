"""Parts are found by name, the project's own and those of installed packages; what is wrong is one line."""

import math
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arpo_megatron.algorithms.branching import initial_trajectories
from arpo_megatron.config import RewardConfig
from arpo_megatron.errors import UserError
from arpo_megatron.jobs.resolve import resolve
from arpo_megatron.plan.workload import mix
from arpo_megatron.registry import BUILTIN, ExtensionPoint, check_params, load, make, names
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.base import Response, ResponseGroup, Score
from arpo_megatron.rewards.function import as_reward
from arpo_megatron.tasks.base import Task

MODULE = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Half:
    tool_bonus: float = 0.5
    format_penalty: float = -1.0

@dataclass(frozen=True)
class Apart:
    group_size: int

    @property
    def initial(self):
        return self.group_size

    @property
    def total(self):
        return self.group_size
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package as pip leaves it: a module, and metadata that names it."""
    (tmp_path / "a_reward_of_others.py").write_text(MODULE)
    info = tmp_path / "a_reward_of_others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-reward-of-others\nVersion: 1.0\n")
    (tmp_path / "a_broken_module.py").write_text("raise RuntimeError('no GPU here')")
    entries = [
        "half = a_reward_of_others:Half",
        "arpo = a_reward_of_others:Half",
        "gone = a_reward_of_others:Gone",
        "broken = a_broken_module:Half",
    ]
    policies = [f"[{ExtensionPoint.BRANCH_POLICY}]", "apart = a_reward_of_others:Apart"]
    (info / "entry_points.txt").write_text("\n".join([f"[{ExtensionPoint.REWARD}]", *entries, *policies]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "a_reward_of_others", raising=False)


def test_every_builtin_component_loads() -> None:
    for point, parts in BUILTIN.items():
        for name in parts:
            assert load(point, name) is not None


@pytest.mark.usefixtures("installed")
def test_entry_point_adds_component() -> None:
    assert "half" in names(ExtensionPoint.REWARD)
    assert make(ExtensionPoint.REWARD, "half", {"tool_bonus": 2, "another": 1}).tool_bonus == 2.0


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("hlaf", ["unknown reward 'hlaf'", "did you mean half?", "known: ", "arpo_released"]),
        ("arpo", ["offered twice", "a_reward_of_others:Half", "ArpoReward"]),
        ("gone", ["cannot be imported from a_reward_of_others:Gone"]),
        ("broken", ["cannot be imported from a_broken_module:Half: RuntimeError: no GPU here"]),
    ],
)
def test_unloadable_component_is_one_line(name: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        load(ExtensionPoint.REWARD, name)
    text = str(caught.value)
    assert all(part in text for part in parts) and "\n" not in text, text


@pytest.mark.usefixtures("installed")
def test_plugin_policy_without_forks_uses_group_size() -> None:
    overrides = [
        "algorithm.branching=apart",
        "algorithm.group_size=4",
        "algorithm.initial_rollouts=8",
        "reward.kind=half",
    ]
    config = resolve("quickstart", overrides=overrides)
    assert initial_trajectories(config.algorithm) == 4
    assert mix(config, 1.0).initial == 4
    with pytest.raises(
        UserError, match=r"algorithm\.initial_rollouts=8 exceeds algorithm\.group_size=4, and .*=random starts"
    ):
        resolve("quickstart", overrides=["algorithm.branching=random", *overrides[1:]])


def test_params_belong_to_component_and_are_typed() -> None:
    check_params([(ExtensionPoint.REWARD, "arpo")], {"tool_bonus": 1})
    with pytest.raises(UserError, match=r"tool_bonsu.*did you mean tool_bonus"):
        check_params([(ExtensionPoint.REWARD, "arpo")], {"tool_bonsu": 1})
    with pytest.raises(UserError, match=r"reward arpo: tool_bonus: .*number"):
        make(ExtensionPoint.REWARD, "arpo", {"tool_bonus": "much"})


def test_component_with_a_param_that_has_no_value_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from dataclasses import dataclass\n\n@dataclass\nclass Strict:\n    level: int\n    base: int = 1\n"
    )
    with pytest.raises(UserError, match="needs the params level, which have no default"):
        make(ExtensionPoint.REWARD, f"{path}:Strict", {"base": 2})
    assert make(ExtensionPoint.REWARD, f"{path}:Strict", {"level": 2}).base == 1


USER_FILE = """
from dataclasses import dataclass

def score(question, answer, trajectory):
    return 1.5 if answer == "2" else 1 / 0 if answer == "3" else float("nan")

def two(question, answer):
    return 1.0

async def later(question, answer, trajectory):
    return 1.0

@dataclass(frozen=True)
class Half:
    half_of: float = 1.0
    needs_judge = False
"""


def test_function_of_a_file_is_a_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    reward = make_reward(RewardConfig(kind=f"{path}:score"))
    question = Task("t", ({"role": "user", "content": "q"},), "2", "math", "q")
    (score,) = reward.score_group(ResponseGroup(question, [Response("abc")]))
    assert (score.reward, score.accuracy, score.format_ok) == (1.5, 1.0, True)
    for answer, message in (
        ("nan", "returned nan for t"),
        ("3", r"failed for t: ZeroDivisionError.* \(.*mine\.py, line 5\)"),
    ):
        with pytest.raises(UserError, match=message):
            reward.score_group(ResponseGroup(replace(question, ground_truth=answer), [Response("abc")]))
    assert make(ExtensionPoint.REWARD, f"{path}:Half", {"half_of": 2.0}).half_of == 2.0
    monkeypatch.chdir(tmp_path)
    job = resolve("quickstart", overrides=["reward.kind=./mine.py:score"])
    assert job.reward.kind == f"{path}:score"


@pytest.mark.parametrize("value", [True, np.True_, np.float32(1), np.int64(1), Fraction(1)])
def test_every_kind_of_number_is_a_reward(value: Any) -> None:
    reward = as_reward(lambda question, answer, trajectory: value, "mine")
    question = Task("t", ({"role": "user", "content": "q"},), "2", "math", "q")
    (score,) = reward.score_group(ResponseGroup(question, [Response("abc")]))
    assert (score.reward, score.accuracy, type(score.reward)) == (1.0, 1.0, float)


@pytest.mark.parametrize("score", [Score(math.nan, 0.0, True), Score(1.0, math.inf, True)])
def test_score_that_is_no_number_is_refused(score: Score) -> None:
    reward = as_reward(lambda question, answer, trajectory: score, "mine")
    question = Task("t", ({"role": "user", "content": "q"},), "2", "math", "q")
    with pytest.raises(UserError, match=r"reward.kind=mine returned Score\(.* for t: it must return a number"):
        reward.score_group(ResponseGroup(question, [Response("abc")]))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("{}:skore", "has no 'skore'; did you mean score?"),
        ("{}:two", r"has the arguments \(question, answer\), not \(question, answer, trajectory\)"),
        ("{}:later", "is an `async def`: write `def`"),
        ("{}.py:score", "no such file"),
        ("mine.py", "also name what the file defines, like mine.py:NAME"),
        ("broken.py:score", "line 2: SyntaxError: [^(]*$"),
    ],
)
def test_unusable_function_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str
) -> None:
    path = tmp_path / "mine.py"
    path.write_text(USER_FILE)
    (tmp_path / "broken.py").write_text("\ndef score(:\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        resolve("quickstart", overrides=[f"reward.kind={kind.format(path)}"])
    assert "\n" not in str(caught.value)


def test_recipe_of_a_file_resolves_with_its_variants(tmp_path: Path) -> None:
    path = tmp_path / "a+b" / "mine.py"
    path.parent.mkdir()
    path.write_text(
        "from dataclasses import replace\nfrom arpo_megatron.recipes.quickstart import recipe as base\n"
        "VARIANTS = {'long': {'train.steps': 77}}\ndef recipe():\n    return replace(base(), seed=5)\n"
    )
    assert resolve(str(path)).seed == 5
    assert resolve(f"{path}+long").train.steps == 77
    with pytest.raises(UserError, match="unknown variant 'short'"):
        resolve(f"{path}+short")
    (tmp_path / "none.py").write_text("")
    with pytest.raises(UserError, match=r"none.py has no function recipe\(\)"):
        resolve(str(tmp_path / "none.py"))


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("def recipe(): return 3", r"recipe\(\) returned a int, not a JobConfig"),
        ("def recipe(): return 1 / 0", r"recipe\(\) failed: ZeroDivisionError"),
        (
            "from arpo_megatron.config import RolloutConfig\ndef recipe(): return RolloutConfig(max_tool_calls=-1)",
            r"recipe\(\) failed: RolloutConfig\.max_tool_calls: must be at least 0$",
        ),
        ("from arpo_megatron.recipes.quickstart import recipe\nVARIANTS = {'long': 3}", "VARIANTS must map a name"),
    ],
)
def test_unusable_recipe_of_a_file_is_one_line(tmp_path: Path, code: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(code)
    with pytest.raises(UserError, match=message) as caught:
        resolve(f"{path}+long")
    assert "\n" not in str(caught.value)
