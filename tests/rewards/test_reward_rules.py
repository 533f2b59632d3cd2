r"""The rules of ARPO's reward, one row per case: the number of `arpo` next to that of the authors' released scorer.

The rules: a broken format earns -1; else token F1 of the boxed answer, plus 0.1 if it is positive and both search and
python were used. The format needs at least one paired <think>, exactly one <answer>, a <result> after every call, and a
\boxed{} in the answer. Rows with two different numbers are differences that are kept; docs/guides/rewards.md lists
them.
"""

import pytest

from arpo_megatron.rewards.arpo import ArpoReward
from arpo_megatron.rewards.base import Response, ResponseGroup, score_text
from arpo_megatron.rewards.released import ReleasedReward
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.protocols.hermes import HermesProtocol

THINK = "<think>hm</think>"
SEARCH = "<search>q</search> <result>\nr\n</result>"
PYTHON = "<python>1+1</python> <result>\n2\n</result>"
BOTH = THINK + SEARCH + THINK + PYTHON
RIGHT = "<answer>\\[ \\boxed{5} \\]</answer>"
WRONG = "<answer>\\[ \\boxed{4} \\]</answer>"
BERLIN = "<answer>\\boxed{Berlin}</answer>"
WORDS = "Berlin, Germany"


def boxed(text: str) -> str:
    return f"{THINK}<answer>{text}</answer>"


ROWS = [  # case, response, ground truth, reward of `arpo`, reward of `arpo_released`
    ("right", THINK + RIGHT, "5", 1.0, 1.0),
    ("wrong", THINK + WRONG, "5", 0.0, 0.0),
    ("F1 of words", THINK + BERLIN, WORDS, 2 / 3, 2 / 3),
    ("no common word", boxed("\\boxed{London}"), WORDS, 0.0, 0.0),
    ("search alone", THINK + SEARCH + BERLIN, WORDS, 2 / 3, 2 / 3),
    ("python alone", THINK + PYTHON + BERLIN, WORDS, 2 / 3, 2 / 3),
    ("both tools", BOTH + BERLIN, WORDS, 2 / 3 + 0.1, 2 / 3 + 0.1),
    ("both tools twice", BOTH + BOTH + RIGHT, "5", 1.1, 1.1),
    ("both tools, wrong", BOTH + WRONG, "5", 0.0, 0.0),
    ("both tools, broken format", BOTH, "5", -1.0, -1.0),
    ("empty", "", "5", -1.0, -1.0),
    ("no thought", RIGHT, "5", -1.0, -1.0),
    ("thought is not closed", "<think>hm" + RIGHT, "5", -1.0, -1.0),
    ("thought is not opened", "hm</think>" + RIGHT, "5", -1.0, -1.0),
    ("two thoughts", THINK + THINK + RIGHT, "5", 1.0, 1.0),
    ("thought in a thought", "<think><think>hm</think></think>" + RIGHT, "5", -1.0, 1.0),
    ("thought the wrong way round", "</think>hm<think>" + RIGHT, "5", -1.0, 1.0),
    ("no answer", THINK + "5", "5", -1.0, -1.0),
    ("two answers", THINK + RIGHT + RIGHT, "5", -1.0, -1.0),
    ("answer in an answer", boxed("<answer>\\boxed{5}"), "5", -1.0, -1.0),
    ("answer is not closed", THINK + "<answer>\\boxed{5}", "5", -1.0, -1.0),
    ("answer is closed twice", boxed("\\boxed{5}</answer>"), "5", -1.0, -1.0),
    ("answer the wrong way round", THINK + "</answer>\\boxed{5}<answer>", "5", -1.0, -1.0),
    ("answer in a thought", f"<think>{RIGHT}</think>", "5", 1.0, 1.0),
    ("text after the answer", THINK + RIGHT + " bye", "5", 1.0, 1.0),
    ("call after the answer", THINK + RIGHT + SEARCH, "5", 1.0, 1.0),
    ("call without a result", THINK + "<search>q</search>" + RIGHT, "5", -1.0, -1.0),
    ("second call without a result", THINK + SEARCH + "<search>q</search>" + RIGHT, "5", -1.0, -1.0),
    ("result in a call", THINK + "<search>q<result>r</result></search>" + RIGHT, "5", -1.0, -1.0),
    ("result is not closed", THINK + "<python>1</python><result>2" + RIGHT, "5", -1.0, -1.0),
    ("call is not closed", THINK + "<python>1+1" + RIGHT, "5", -1.0, -1.0),
    ("text between call and result", THINK + "<search>q</search> so <result>r</result>" + RIGHT, "5", -1.0, 1.0),
    (
        "one result for two calls",
        THINK + "<search>q</search><python>1</python><result>r</result>" + RIGHT,
        "5",
        -1,
        1.1,
    ),
    ("result without a call", THINK + "<result>r</result>" + RIGHT, "5", -1.0, 1.0),
    ("call is not opened", THINK + "</search>" + RIGHT, "5", -1.0, 1.0),
    ("tag named in a thought", "<think><python>?</think>" + RIGHT, "5", 1.0, -1.0),
    ("tags in a result", THINK + "<search>q</search><result></think><answer></result>" + RIGHT, "5", 1.0, -1.0),
    ("no box", boxed("5"), "5", -1.0, -1.0),
    ("box before the answer", THINK + "\\boxed{5}<answer>5</answer>", "5", -1.0, -1.0),
    ("box is not closed", boxed("\\boxed{\\sqrt{5}"), "\\sqrt{5}", -1.0, -1.0),
    ("empty box", boxed("\\boxed{}"), "5", 0.0, 0.0),
    ("the last box counts", boxed("\\boxed{4}, no: \\boxed{5}"), "5", 1.0, 1.0),
    ("box with a space", boxed("\\boxed {5}"), "5", 1.0, -1.0),
    ("box with a space after a box", boxed("\\boxed{4}, no: \\boxed {5} it is"), "5", 1.0, 1 / 2),
    ("box with a space in mathematics", boxed("$\\boxed{4}$, no: $\\boxed {5}$ it is"), "5", 1.0, 1.0),
    ("box with a line break", boxed("\\boxed{4}, no: \\boxed\n{5}"), "5", 1.0, -1.0),
    ("sign", boxed("\\boxed{-6}"), "6", 0.0, 1.0),
    ("notation", boxed("\\boxed{\\dfrac{1}{2}}"), "\\frac{1}{2}", 1.0, 0.0),
    ("command around words", boxed("\\boxed{\\text{Germany, Berlin}}"), WORDS, 1.0, 1 / 2),
]


@pytest.mark.parametrize(("case", "text", "truth", "ours", "released"), ROWS, ids=[row[0] for row in ROWS])
def test_reward_of_each_rule(case: str, text: str, truth: str, ours: float, released: float) -> None:
    task = Task("t", (), truth, "qa" if truth == WORDS else "math", "?")
    assert score_text(ArpoReward(), text + "<eos>", task).reward == pytest.approx(ours)
    assert score_text(ReleasedReward(), text + "<eos>", task).reward == pytest.approx(released)


CHATS = [  # case, last turn, called tools, reward where each call is a turn of its own
    ("right", THINK + RIGHT, (), 1.0),
    ("thought that the template has opened", "hm</think>" + RIGHT, (), 1.0),
    ("no thought", RIGHT, (), 1.0),
    ("thought is not closed", "<think>" + RIGHT, (), -1.0),
    ("both tools", RIGHT, ("search", "python"), 1.1),
    ("search alone", RIGHT, ("search",), 1.0),
    ("both tools, wrong", WRONG, ("search", "python"), 0.0),
    ("no answer", "5", (), -1.0),
    ("two answers", RIGHT + RIGHT, (), -1.0),
    ("no box", "<answer>5</answer>", (), -1.0),
    ("answer in a thought", f"<think>{RIGHT}</think>", (), -1.0),
]


@pytest.mark.parametrize(("case", "last_turn", "called", "expected"), CHATS, ids=[row[0] for row in CHATS])
def test_reward_of_each_rule_in_a_chat(case: str, last_turn: str, called: tuple[str, ...], expected: float) -> None:
    response = Response(RIGHT + last_turn, last_turn=last_turn, called=frozenset(called))
    group = ResponseGroup(Task("t", (), "5", "math", "?"), [response])
    (score,) = ArpoReward(protocol=HermesProtocol()).score_group(group)
    assert score.reward == pytest.approx(expected)
