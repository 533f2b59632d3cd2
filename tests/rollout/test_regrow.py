"""A tree is a function of the answers: it does not depend on timing, and grows again from its record."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from arpo_megatron.rollout.accounting import TreeStats, rollout_stats, tokens_per_second
from arpo_megatron.rollout.record import TreeRecord
from arpo_megatron.tree import RolloutTree
from tests.engine.scripted import ScriptedEngine
from tests.rollout.growing import (
    PLAN,
    Start,
    any_of,
    arpo,
    fork_points,
    grow,
    planned,
)


def comparable(tree: RolloutTree) -> dict[str, Any]:
    """Return `to_dict` without what depends on time: seconds, and which of two equal calls was cached."""
    data = tree.to_dict() | {"seconds": 0}
    for segment in data["segments"]:
        segment.pop("ended_s", None)
        if "tool" in segment:
            segment["tool"] = segment["tool"] | {"seconds": 0, "cached": False}
    return data


@pytest.mark.parametrize("engine_kind", ["greedy", "seeded"])
def test_tree_does_not_depend_on_timing(scripted_engine: Start, sandbox_url: str, engine_kind: str) -> None:
    """Answers of engine and tools arrive in another order each time."""
    grown = []
    for seed in range(6):
        shuffled = random.Random(seed)
        engine = scripted_engine(
            ScriptedEngine(
                planned(*PLAN),
                seeded=any_of if engine_kind == "seeded" else None,
                delay_s=lambda _text, r=shuffled: r.random() * 0.01,
            )
        )
        tree, _ = grow(engine.url, sandbox_url, arpo(14, 3, beam_size=3), slow_tools=shuffled)
        assert len(tree.leaves()) == 14
        assert max(fork_points(tree)) > 1
        grown.append(comparable(tree))
    assert all(tree == grown[0] for tree in grown[1:])


def answers(entries: Sequence[bytes]) -> int:
    """Count generations and tool results in a record."""
    record = TreeRecord.from_entries(entries)
    return sum(map(len, record.generations.values())) + len(record.tool_results)


def recorded_tokens(entries: Sequence[bytes]) -> int:
    return sum(len(part.token_ids) for parts in TreeRecord.from_entries(entries).generations.values() for part in parts)


def test_tokens_per_second_excludes_recorded_tokens(scripted_engine: Start, sandbox_url: str) -> None:
    entries: list[bytes] = []
    policy = arpo(2, 1)
    engine = scripted_engine(ScriptedEngine(planned(*PLAN)))
    tree, grower = grow(engine.url, sandbox_url, policy, record=entries.append)
    sampled, half = grower.counts.tokens_sampled, entries[: len(entries) // 2]
    assert 0 < recorded_tokens(half) < sampled
    for known in ([], half, entries):
        tree, grower = grow(engine.url, sandbox_url, policy, entries=known)
        stats = rollout_stats([tree], grower.counts, [TreeStats.of(tree, policy)], failed=0, seconds=2.0)
        assert stats.counts.tokens_sampled == sampled
        assert tokens_per_second([stats]) == (sampled - recorded_tokens(known)) / 2.0
    assert tokens_per_second([]) == 0.0


def test_tree_regrows_from_any_prefix_of_its_record(scripted_engine: Start, sandbox_url: str) -> None:
    """Cut at 9 entries, also after the last: the tree is the same, and no answer is requested twice."""
    entries: list[bytes] = []
    policy = arpo(14, 3, beam_size=3)
    engine = scripted_engine(ScriptedEngine(planned(*PLAN), seeded=any_of))
    whole, grower = grow(engine.url, sandbox_url, policy, record=entries.append)
    asked = len(engine.requests)
    assert asked == grower.counts.requests < len(entries)
    for known in sorted({*range(0, len(entries), max(1, len(entries) // 8)), len(entries)}):
        again = scripted_engine(ScriptedEngine(planned(*PLAN), seeded=any_of))
        more: list[bytes] = []
        tree, regrown = grow(again.url, sandbox_url, policy, entries=entries[:known], record=more.append)
        assert comparable(tree) == comparable(whole)
        assert answers(entries[:known]) + answers(more) == answers(entries)
        again_prefilled = known + len(more) - len(entries)  # for an engine that may not have it any more
        assert 0 <= again_prefilled <= 1 + sum(children > 1 for children in fork_points(tree))
        assert regrown.counts.requests - asked == again_prefilled
        assert regrown.counts.tokens_sampled == grower.counts.tokens_sampled
        assert regrown.counts.tokens_recorded == recorded_tokens(entries[:known])
        assert regrown.counts.calls_executed == grower.counts.calls_executed
        assert tree.seconds >= TreeRecord.from_entries(entries[:known]).seconds
    assert again.requests == []
    assert [segment.ended_s for segment in tree.segments] == [segment.ended_s for segment in whole.segments]
    for segment in whole.segments[1:]:
        assert segment.ended_s is not None
        assert (whole.segments[segment.parent].ended_s or 0.0) <= segment.ended_s <= whole.seconds
