"""Rewards of whole trajectories, the released scorer's errors included."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from arpo_megatron.config import JudgeConfig, RewardConfig
from arpo_megatron.errors import UserError
from arpo_megatron.models.tiny import generated_tokenizer
from arpo_megatron.registry import BUILTIN, ExtensionPoint
from arpo_megatron.rewards import make_reward
from arpo_megatron.rewards.arpo import ArpoReward
from arpo_megatron.rewards.base import Response, ResponseGroup, Score, group_of, score_text
from arpo_megatron.rewards.composed import ComposedReward
from arpo_megatron.rewards.released import ReleasedReward
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.synthetic.demonstrations import demonstrate
from arpo_megatron.tasks.synthetic.lookup import generate
from arpo_megatron.tasks.tags.response import last_boxed, parse_response
from arpo_megatron.tree import Role, RolloutTree

THINK = "<think>hm</think>"
SEARCH = "<search>q</search> <result>\nPage 1: x\n</result>"
PYTHON = "<python>1+1</python> <result>\n2\n</result>"
TWO_TOOLS = THINK + SEARCH + THINK + PYTHON


def answer(text: str) -> str:
    return f"<answer>\\[ \\boxed{{{text}}} \\]</answer><eos>"


def task(truth: str, source: str = "math") -> Task:
    return Task("t", ({"role": "user", "content": "?"},), truth, source, "?")


WELL_FORMED = [
    THINK + answer("5"),
    THINK + SEARCH + answer("5"),
    TWO_TOOLS + answer("5"),
    "<think>a <search>q</search>\n\n<result>r</result> b</think>" + answer("5"),
    THINK + "<search>q</search><result>a page with <answer> and </think> tags</result>" + answer("5"),
    THINK + "<python>print('<think>')</python> <result>\n<think>\n</result>" + answer("5"),
    "<think><search> or <python>?</think>" + SEARCH + answer("5"),
    "<think>not <python> but <search>q</search> <result>r</result> it is</think>" + answer("5"),
    THINK + "<answer>first \\boxed{4}, no: \\boxed{5}</answer>",
]
BROKEN = [
    ("", "no <think>"),
    (answer("5"), "no <think>"),
    ("<think>hm" + answer("5"), "<think> is not paired"),
    ("hm</think>" + answer("5"), "<think> is not paired"),
    ("<think><think>hm</think></think>" + answer("5"), "<think> is not paired"),
    (THINK, "0 answers instead of one"),
    (THINK + answer("5") + answer("5"), "2 answers instead of one"),
    (THINK + "<answer>\\boxed{5}", "<answer> is not closed"),
    (THINK + "<answer><answer>\\boxed{5}</answer>", "<answer> inside an answer"),
    (THINK + "<answer>5</answer>", "no \\boxed{} in the answer"),
    (THINK + "<answer>\\boxed{5</answer>", "no \\boxed{} in the answer"),
    (THINK + "\\boxed{5}<answer>5</answer>", "no \\boxed{} in the answer"),
    (THINK + "<search>q</search>", "<search> without a <result>"),
    (THINK + "<search>q</search> so" + SEARCH + answer("5"), "<search> without a <result>"),
    (THINK + "<python>1+1" + answer("5"), "<python> is not closed"),
    (THINK + "<python>1</python><result>2" + answer("5"), "<result> is not closed"),
    (THINK + "<result>made up</result>" + answer("5"), "<result> without a call"),
    (THINK + "</search>" + answer("5"), "</search> without <search>"),
]


@pytest.mark.parametrize("text", WELL_FORMED)
def test_response_in_format_gets_its_accuracy(text: str) -> None:
    score = score_text(ArpoReward(tool_bonus=0.0), text, task("5"))
    assert (score.format_ok, score.reward, score.accuracy, score.answer) == (True, 1.0, 1.0, "5")
    assert score_text(ArpoReward(tool_bonus=0.0), text, task("6")).reward == 0.0


@pytest.mark.parametrize(("text", "reason"), BROKEN)
def test_broken_format_is_named_and_gets_the_penalty(text: str, reason: str) -> None:
    score = score_text(ArpoReward(format_penalty=-0.7), text, task("5"))
    assert (score.format_ok, score.reward, score.accuracy, score.reason) == (False, -0.7, 0.0, reason)


@pytest.mark.parametrize(("text", "bonus"), [(THINK + SEARCH, 0.0), (THINK + PYTHON, 0.0), (TWO_TOOLS, 0.1)])
def test_tool_bonus_needs_both_tools_and_a_right_answer(text: str, bonus: float) -> None:
    reward = ArpoReward()
    assert score_text(reward, text + answer("5"), task("5")).reward == pytest.approx(1.0 + bonus)
    assert score_text(reward, text + answer("4"), task("5")).reward == 0.0
    partly = score_text(reward, text + answer("Berlin"), task("Berlin, Germany", "qa"))
    assert partly.reward == pytest.approx(2 / 3 + bonus)
    assert partly.terms["exact_match"] == 0.0


@pytest.mark.parametrize("box", ["\\boxed{\\text{Paris}}", "\\boxed {\\mathrm{\\text{Paris}}}"])
def test_answer_in_words_is_read_without_latex_commands(box: str) -> None:
    text = THINK + f"<answer>{box}</answer>"
    assert score_text(ArpoReward(), text, task("Paris", "qa")).reward == 1.0
    assert score_text(ReleasedReward(), text, task("Paris", "qa")).reward < 1.0  # as the released code


@pytest.mark.parametrize(("source", "aliases"), [("qa", ("City of Light", "7")), ("math", ("x^2", "7", "9^{9^{9}}"))])
def test_every_alias_is_right_for_every_reward(source: str, aliases: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def score(question, answer, trajectory): return float(answer == '7')\n")
    group = ResponseGroup(Task("t", (), "Paris", source, "?", aliases), [Response(THINK + answer("7"))])
    for kind in ("arpo", "arpo_released", f"{tmp_path}/mine.py:score"):
        (score,) = make_reward(RewardConfig(kind=kind)).score_group(group)
        assert (score.reward, score.accuracy) == (1.0, 1.0), kind
    (score,) = ArpoReward(qa="exact_match").score_group(group)
    assert score.accuracy == 1.0


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{a{b}c}", "a{b}c"),
        ("\\boxed{1} \\boxed{2}", "2"),
        ("\\boxed{1", None),
        ("1", None),
        ("\\boxed{}", ""),
        ("\\boxed {12}", "12"),
    ],
)
def test_last_box_is_read_with_balanced_braces(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_megabyte_of_tags_is_scanned_quickly() -> None:
    assert not parse_response(THINK + PYTHON * 20_000 + answer("5")).reason


def test_demonstrations_without_mistakes_score_full_marks() -> None:
    tasks, tokenizer = generate(3, train=40, held_out=0), generated_tokenizer()
    reward = make_reward(RewardConfig())
    for one, tree in zip(
        tasks.train, demonstrate(tasks.train, tasks.facts, tokenizer, mistake_share=0, seed=0), strict=True
    ):
        (score,) = reward.score_group(group_of(tree, one, tokenizer.decode))
        assert score.reward == (1.1 if one.id.endswith("two") else 1.0)


def test_demonstrations_with_mistakes_follow_the_format() -> None:
    tasks, tokenizer = generate(3, train=200, held_out=0), generated_tokenizer()
    trees = demonstrate(tasks.train, tasks.facts, tokenizer, mistake_share=1.0, seed=0)
    scores = [
        ArpoReward().score_group(group_of(tree, one, tokenizer.decode))[0]
        for one, tree in zip(tasks.train, trees, strict=True)
    ]
    assert all(score.format_ok for score in scores)
    assert sum(score.accuracy for score in scores) < 5


def test_tree_is_scored_leaf_by_leaf_after_the_prompt() -> None:
    tokenizer = generated_tokenizer()

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    tree = RolloutTree("t", np.array(encode("<answer> in a prompt is no answer"), np.int32))
    call = tree.add(0, Role.MODEL, encode("<think>calculate</think><python>1+1</python>"))
    result = tree.add(call, Role.TOOL, encode(" <result>\n2\n</result>"))
    tree.add(result, Role.MODEL, encode(answer("2")))
    tree.add(result, Role.MODEL, encode(answer("3")))
    tree.add(0, Role.MODEL, encode("lost"))
    scores = ArpoReward().score_group(group_of(tree, task("2"), tokenizer.decode))
    assert [score.reward for score in scores] == [1.0, 0.0, -1.0]


def test_make_reward_builds_the_configured_reward() -> None:
    assert make_reward(RewardConfig(format_penalty=-2.0, tool_bonus=0.5)).base == ArpoReward(-2.0, 0.5)
    assert make_reward(RewardConfig(kind="arpo_released")).base == ReleasedReward(-1.0, 0.1)


@dataclass(frozen=True, slots=True)
class Mine:
    """A reward of an installed package, with params of its own and of the config, and a judge."""

    needs_judge: ClassVar[bool] = True
    max_response_tokens: int
    format_penalty: float = 0.0
    my_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.my_scale <= 0:
            raise ValueError(f"my_scale must be positive, not {self.my_scale}")

    def score_group(self, group: ResponseGroup) -> list[Score]:
        """The scale where there is a judge."""
        return [Score(self.my_scale if group.judge else 0.0, 0.0, format_ok=True) for _ in group.responses]


def test_installed_reward_gets_its_params_and_the_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUILTIN, ExtensionPoint.REWARD, {**BUILTIN[ExtensionPoint.REWARD], "mine": f"{__name__}:Mine"})
    judge = JudgeConfig(url="http://127.0.0.1:9/v1", model="m")

    def made(**numbers: float) -> ComposedReward:
        return make_reward(RewardConfig(kind="mine", params=numbers, judge=judge), max_response_tokens=7)

    reward = made(my_scale=2)
    assert reward.base == Mine(7, -1.0, 2.0)
    assert score_text(reward, "", task("5")).reward == 2.0
    assert reward.judge is not None
    reward.judge.close()
    with pytest.raises(UserError, match=r"my_sclae.*did you mean my_scale"):
        made(my_sclae=2)
    with pytest.raises(UserError, match="my_scale must be positive"):
        made(my_scale=0)
    with pytest.raises(UserError, match=r"use reward.format_penalty"):
        made(format_penalty=-2)
