"""Generated tasks: solvable only with the tools, and disjoint from the held-out ones."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.synthetic.lookup import (
    NAME_LETTERS,
    OPERATORS,
    GeneratedQuestion,
    QuestionKind,
    generate,
    solve,
)


def question(task: Task) -> GeneratedQuestion:
    return GeneratedQuestion.parse(task.messages[-1]["content"].removesuffix(" ?"))


@given(seed=st.integers(0, 2**31))
def test_held_out_names_and_operand_pairs_do_not_occur_in_training(seed: int) -> None:
    made = generate(seed, train=60, held_out=30)
    trained, held = [question(task) for task in made.train], [question(task) for task in made.held_out]
    assert not {one.name for one in trained if one.name} & {one.name for one in held if one.name}
    pairs = [{(one.left, one.right) for one in group if one.kind is QuestionKind.CALC} for group in (trained, held)]
    assert not pairs[0] & pairs[1]


@given(seed=st.integers(0, 2**31))
def test_truths_follow_from_question_and_facts(seed: int) -> None:
    made = generate(seed, train=20, held_out=5)
    for task in (*made.train, *made.held_out):
        assert task.ground_truth == str(solve(question(task), made.facts))
        assert task.prompt_text == f"question: {task.messages[-1]['content']}"
        assert task.source == ("qa" if question(task).kind is QuestionKind.LOOKUP else "math")
    assert all(100 <= int(fact) <= 999 for fact in made.facts.values())


def test_tasks_depend_on_seed_and_larger_count_only_appends() -> None:
    small, large = generate(5, train=50, held_out=20), generate(5, train=80, held_out=20)
    assert small.train == large.train[:50]
    assert small.held_out == large.held_out
    assert generate(5, train=50, held_out=20) == small
    assert generate(6, train=50, held_out=20).train != small.train


def test_ids_are_unique_and_the_mix_has_its_shares() -> None:
    made = generate(1, train=4000, held_out=200)
    ids = [task.id for task in (*made.train, *made.held_out)]
    assert len(set(ids)) == len(ids)
    counts = Counter(task.id.rsplit("-", 1)[1] for task in made.train)
    shares = {kind: counts[kind] / 4000 for kind in ("calc", "lookup", "two")}
    assert shares == pytest.approx({"calc": 0.4, "lookup": 0.3, "two": 0.3}, abs=0.03)


def test_corpus_holds_every_fact_once(tmp_path: Path) -> None:
    made = generate(1, train=30, held_out=10)
    made.write_corpus(tmp_path / "new" / "corpus.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "new" / "corpus.jsonl").read_text().splitlines()]
    assert rows == [{"text": f"{name} {fact}"} for name, fact in made.facts.items()]


names = st.text(NAME_LETTERS, min_size=4, max_size=4)
operands = st.integers(11, 99)
questions = st.one_of(
    st.builds(
        GeneratedQuestion,
        st.just(QuestionKind.CALC),
        left=operands,
        operator=st.sampled_from(OPERATORS),
        right=operands,
    ),
    st.builds(GeneratedQuestion, st.just(QuestionKind.LOOKUP), name=names),
    st.builds(
        GeneratedQuestion, st.just(QuestionKind.TWO), name=names, operator=st.sampled_from(OPERATORS), right=operands
    ),
)


@given(questions)
def test_question_survives_its_text(one: GeneratedQuestion) -> None:
    assert GeneratedQuestion.parse(one.text) == one


@pytest.mark.parametrize("text", ["", "12", "abc", "12/34", "12*345", "abcd*", "abcde", "12*34 ?"])
def test_other_text_is_not_a_question(text: str) -> None:
    with pytest.raises(ValueError, match="not a generated question"):
        GeneratedQuestion.parse(text)


def test_more_tasks_than_names_or_pairs_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"data\.tasks"):
        generate(1, train=10**6, held_out=1)
    with pytest.raises(UserError, match=r"data\.held_out"):
        generate(1, train=1, held_out=5000)
