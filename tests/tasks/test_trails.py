"""Trails: answers follow from pages and counts, held-out names are new, and mistakes follow tool results only."""

import re
from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arpo_megatron.errors import UserError
from arpo_megatron.models.tiny import generated_tokenizer
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.synthetic.demonstrations import demonstrate
from arpo_megatron.tasks.synthetic.lookup import NAME_LETTERS, question_text
from arpo_megatron.tasks.synthetic.trails import (
    EARLY_TRAILS,
    LEVELS,
    LONG_TRAILS,
    TRAILS,
    Trail,
    read_page,
)
from arpo_megatron.tree import RolloutTree

TOKENIZER = generated_tokenizer()
MADE = TRAILS.generate(3, train=900, held_out=100)


def texts(tree: RolloutTree) -> list[str]:
    return [TOKENIZER.decode(segment.token_ids.tolist()) for segment in tree.segments]


def shown(mistake_share: float) -> list[RolloutTree]:
    return demonstrate(MADE.train, MADE.facts, TOKENIZER, mistake_share=mistake_share, seed=1, agent=TRAILS.agent)


def by_hand(task: Task, facts: Mapping[str, str]) -> int:
    """Return the answer from the text of the question and the pages alone."""
    name, hops, addend = re.fullmatch(r"question: (\w{4}) (\d) \+(\d\d) \?", task.prompt_text).groups()  # type: ignore[union-attr]  # it matches
    for _ in range(int(hops)):
        page = facts[name]
        name, number = page[:4], page[4:]
    return int(number) + int(addend)


@given(seed=st.integers(0, 2**31))
def test_truths_follow_from_pages(seed: int) -> None:
    made = TRAILS.generate(seed, train=20, held_out=5)
    assert all(task.ground_truth == str(by_hand(task, made.facts)) for task in (*made.train, *made.held_out))


def test_trails_share_no_page_and_continue_beyond_every_level() -> None:
    seen: Counter[str] = Counter()
    for task in (*MADE.train, *MADE.held_out):
        name = Trail.parse(question_text(task)).name
        for _ in range(LEVELS[-1] + 1):
            seen[name] += 1
            name = read_page(MADE.facts[name])[0]
        assert name == Trail.parse(question_text(task)).name
    assert set(seen.values()) == {1}
    assert seen.keys() == MADE.facts.keys()


def level_of(task_id: str) -> int:
    """Return 2 for "held-out-7-hops2"."""
    return int(task_id[-1])


def test_levels_are_equally_frequent_and_named_in_the_id() -> None:
    counts = Counter(level_of(task.id) for task in MADE.train)
    assert all(counts[level] / len(MADE.train) == pytest.approx(1 / 3, abs=0.05) for level in LEVELS)
    assert all(level_of(task.id) == Trail.parse(question_text(task)).hops for task in MADE.train)


def test_trails_depend_on_seed_and_larger_count_only_appends() -> None:
    small, large = TRAILS.generate(5, train=50, held_out=20), TRAILS.generate(5, train=80, held_out=20)
    assert (small.train, small.held_out) == (large.train[:50], large.held_out)
    assert TRAILS.generate(6, train=50, held_out=20).train != small.train


def test_more_trails_than_names_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"data\.tasks"):
        TRAILS.generate(1, train=10**5, held_out=1)


@given(st.builds(Trail, st.text(NAME_LETTERS, min_size=4, max_size=4), st.sampled_from(LEVELS), st.integers(11, 99)))
def test_question_survives_its_text(trail: Trail) -> None:
    assert Trail.parse(trail.text) == trail


@pytest.mark.parametrize("text", ["", "qzlf", "qzlf 0 +56", "qzlf 2+56", "qzl 2 +56", "qzlf 2 +5"])
def test_other_text_is_not_a_question(text: str) -> None:
    with pytest.raises(ValueError, match="not a question about a trail"):
        Trail.parse(text)


def test_demonstration_without_mistakes_follows_the_trail() -> None:
    task = next(task for task in MADE.train if level_of(task.id) == 2)
    trail = Trail.parse(question_text(task))
    middle, _ = read_page(MADE.facts[trail.name])
    _, value = read_page(MADE.facts[middle])
    (tree,) = demonstrate([task], MADE.facts, TOKENIZER, mistake_share=0.0, seed=0, agent=TRAILS.agent)
    assert texts(tree) == [
        f"question: {trail.name} 2 +{trail.addend} ?",
        f"<think>look up</think><search>{trail.name}</search>",
        f" <result>\nPage 1: {trail.name} {MADE.facts[trail.name]}\n</result>",
        f"<think>look up</think><search>{middle}</search>",
        f" <result>\nPage 1: {middle} {MADE.facts[middle]}\n</result>",
        f"<think>calculate</think><python>{value}+{trail.addend}</python>",
        f" <result>\n{value + trail.addend}\n</result>",
        f"<answer>\\boxed{{{task.ground_truth}}}</answer><eos>",
    ]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_trail_demonstrations_have_the_requested_share_of_mistakes(share: float) -> None:
    assert TRAILS.share(TRAILS.chances(share)) == pytest.approx(share, abs=1e-6)
    pairs = zip(MADE.train, shown(share), strict=True)
    right = [f"\\boxed{{{task.ground_truth}}}" in texts(tree)[-1] for task, tree in pairs]
    assert sum(right) / len(right) == pytest.approx(1.0 - share, abs=0.05)


def test_trail_mistakes_follow_results_only() -> None:
    early = late = addend = ignored = 0
    for task, tree in zip(MADE.train, shown(0.6), strict=True):
        trail, parts = Trail.parse(question_text(task)), texts(tree)
        # The turn before any result is always right.
        assert parts[1] == f"<think>look up</think><search>{trail.name}</search>"
        searches = len(re.findall("<search>", "".join(parts)))
        early += searches < trail.hops
        late += searches > trail.hops
        calculation, result = parts[-3], parts[-2]
        addend += f"+{trail.addend}<" not in calculation
        ignored += f"{{{result.split()[1]}}}" not in parts[-1]
        assert tree.flat_tokens <= 12 + 168
    assert min(early, late, addend, ignored) > 30


def test_long_trails_are_careless_after_the_last_page_only() -> None:
    made = LONG_TRAILS.generate(3, train=300, held_out=0)
    trees = demonstrate(made.train, made.facts, TOKENIZER, mistake_share=0.6, seed=1, agent=LONG_TRAILS.agent)
    right = 0
    for task, tree in zip(made.train, trees, strict=True):
        name = Trail.parse(question_text(task)).name
        for place in range(1, 11, 2):  # the five reads
            assert f"<search>{name}</search>" in texts(tree)[place]
            name = read_page(made.facts[name])[0]
        right += f"{{{task.ground_truth}}}" in texts(tree)[-1]
    assert right / len(trees) == pytest.approx(0.4, abs=0.07)


def test_early_trails_are_careless_before_the_first_result_only() -> None:
    made = EARLY_TRAILS.generate(3, train=300, held_out=0)
    trees = demonstrate(made.train, made.facts, TOKENIZER, mistake_share=0.6, seed=1, agent=EARLY_TRAILS.agent)
    right = 0
    for task, tree in zip(made.train, trees, strict=True):
        careful = f"<search>{Trail.parse(question_text(task)).name}</search>" in texts(tree)[1]
        assert careful == (f"{{{task.ground_truth}}}" in texts(tree)[-1])
        right += careful
    assert right / len(trees) == pytest.approx(0.4, abs=0.07)
