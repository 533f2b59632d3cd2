"""Demonstrations look exactly like sampled trajectories, and the requested share of them has a mistake."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.models.tiny import generated_tokenizer
from arpo_megatron.tasks.protocols.base import ToolCall
from arpo_megatron.tasks.synthetic.demonstrations import LookupMistakes, demonstrate, lookup_mistakes
from arpo_megatron.tasks.synthetic.lookup import GeneratedQuestion, GeneratedTasks, QuestionKind, generate
from arpo_megatron.tasks.tags.calls import RESULT_FRAME, find_stop, parse_call
from arpo_megatron.tree import Finish, Role, RolloutTree

TOKENIZER = generated_tokenizer()
MADE = generate(7, train=1500, held_out=0)


def texts(tree: RolloutTree) -> list[str]:
    return [TOKENIZER.decode(segment.token_ids.tolist()) for segment in tree.segments]


def correct_answer(made: GeneratedTasks, mistake_share: float, seed: int) -> float:
    trees = demonstrate(made.train, made.facts, TOKENIZER, mistake_share=mistake_share, seed=seed)
    right = [f"\\boxed{{{task.ground_truth}}}" in texts(tree)[-1] for task, tree in zip(made.train, trees, strict=True)]
    return sum(right) / len(right)


def test_demonstration_without_mistakes_calls_tools_and_copies_answers() -> None:
    facts = {"qzlf": "417"}
    task = next(task for task in MADE.train if task.id.endswith("two"))
    name = GeneratedQuestion.parse(task.messages[0]["content"].removesuffix(" ?")).name
    right = GeneratedQuestion.parse(task.messages[0]["content"].removesuffix(" ?")).right
    (tree,) = demonstrate([task], MADE.facts | facts, TOKENIZER, mistake_share=0.0, seed=0)
    value = int(MADE.facts[name])
    assert texts(tree) == [
        f"question: {name}+{right} ?",
        f"<think>look up</think><search>{name}</search>",
        f" <result>\nPage 1: {name} {value}\n</result>",
        f"<think>calculate</think><python>{value}+{right}</python>",
        f" <result>\n{value + right}\n</result>",
        f"<answer>\\boxed{{{value + right}}}</answer><eos>",
    ]


def test_segments_end_where_sampling_would_end_them() -> None:
    closing = {TOKENIZER.convert_tokens_to_ids(tag) for tag in ("</search>", "</python>")}
    for tree in demonstrate(MADE.train[:300], MADE.facts, TOKENIZER, mistake_share=0.5, seed=1):
        assert len(tree.leaves()) == 1
        assert [segment.parent for segment in tree.segments] == list(range(-1, len(tree.segments) - 1))
        *calls, last = [segment for segment in tree.segments if segment.role is Role.MODEL]
        assert all(int(call.token_ids[-1]) in closing and call.finish is Finish.TOOL_CALL for call in calls)
        assert (int(last.token_ids[-1]), last.finish) == (TOKENIZER.eos_token_id, Finish.END)
        tools = [segment.tool for segment in tree.segments if segment.role is Role.TOOL]
        assert len(tools) == len(calls)
        assert all(tool is not None and tool.status == "ok" and tool.name in ("search", "python") for tool in tools)


def test_demonstrations_agree_with_the_tag_protocol() -> None:
    for tree in demonstrate(MADE.train[:300], MADE.facts, TOKENIZER, mistake_share=0.5, seed=1):
        for index, segment in enumerate(tree.segments):
            if segment.tool is None:
                continue
            call, result = texts(tree)[index - 1], texts(tree)[index]
            stop = find_stop(call)
            assert stop is not None
            assert call.endswith(stop)
            assert parse_call(call, stop) == ToolCall(segment.tool.name, segment.tool.arguments)
            assert result == RESULT_FRAME.text(result.removeprefix(" <result>\n").removesuffix("\n</result>"))


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_demonstrations_have_the_requested_share_of_mistakes(share: float) -> None:
    assert lookup_mistakes(share).share == pytest.approx(share, abs=1e-6)
    # A mistake can still give the right answer (1 in 1000); without one the answer is always right.
    assert correct_answer(MADE, share, seed=2) == pytest.approx(1.0 - share, abs=0.04)


@given(st.floats(0, 1))
def test_chances_are_probabilities_in_the_stated_proportions(share: float) -> None:
    chances = lookup_mistakes(share)
    values = (chances.wrong_operator, chances.misspelt_name, chances.skipped_hop, chances.ignored_result)
    assert all(0.0 <= value <= 1.0 for value in values)
    if max(values) < 1.0:
        assert chances.wrong_operator * 0.20 == pytest.approx(chances.ignored_result * 0.30)
        assert chances.skipped_hop * 0.20 == pytest.approx(chances.misspelt_name * 0.25)


def test_probe_proportions_give_the_share_by_the_formula() -> None:
    chances = LookupMistakes(0.30, 0.20, 0.25, 0.20)
    by_kind = {
        QuestionKind.CALC: 1 - 0.7 * 0.8,
        QuestionKind.LOOKUP: 1 - 0.8 * 0.8,
        QuestionKind.TWO: 1 - 0.8 * 0.75 * 0.8,
    }
    expected = 0.4 * by_kind[QuestionKind.CALC] + 0.3 * by_kind[QuestionKind.LOOKUP] + 0.3 * by_kind[QuestionKind.TWO]
    assert chances.share == pytest.approx(expected)


def test_all_kinds_of_mistake_happen() -> None:
    trees = demonstrate(MADE.train, MADE.facts, TOKENIZER, mistake_share=0.6, seed=3)
    wrong_operator = misspelt = skipped = ignored = 0
    for task, tree in zip(MADE.train, trees, strict=True):
        asked = GeneratedQuestion.parse(task.messages[0]["content"].removesuffix(" ?"))
        whole = "".join(texts(tree)[1:])
        calls = re.findall(r"<(search|python)>(.*?)</\1>", whole)
        results = re.findall(r"(\S+)\n</result>", whole)
        wrong_operator += asked.kind is QuestionKind.CALC and calls[0][1] != asked.text
        misspelt += asked.kind is not QuestionKind.CALC and calls[0][1] != asked.name
        skipped += asked.kind is QuestionKind.TWO and len(calls) == 1
        ignored += f"\\boxed{{{results[-1]}}}" not in whole and "No results" not in whole
    assert min(wrong_operator, misspelt, skipped, ignored) > 20


def test_demonstrations_are_a_function_of_the_seed() -> None:
    first = demonstrate(MADE.train[:50], MADE.facts, TOKENIZER, mistake_share=0.5, seed=4)
    again = demonstrate(MADE.train[:50], MADE.facts, TOKENIZER, mistake_share=0.5, seed=4)
    other = demonstrate(MADE.train[:50], MADE.facts, TOKENIZER, mistake_share=0.5, seed=5)
    assert [texts(tree) for tree in first] == [texts(tree) for tree in again]
    assert [texts(tree) for tree in first] != [texts(tree) for tree in other]


def test_mistake_share_outside_zero_and_one_is_refused() -> None:
    with pytest.raises(ValueError, match="share"):
        lookup_mistakes(1.5)
