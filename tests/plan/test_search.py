"""The search finds layouts that are faster, and counts why the others fail."""

import re
from dataclasses import replace

import pytest

from arpo_megatron.config import ParallelConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.plan import GPUS, plan
from arpo_megatron.plan.report import overrides_between
from arpo_megatron.plan.search import group_sizes, search

H100 = GPUS["h100-80"]


def test_search_tries_the_jobs_own_size_of_groups() -> None:
    stages = ParallelConfig(pipeline=2)
    assert group_sizes(stages, 8192, 40_000, 12_000) == [8192, 12_000, 16_384, 32_768, None]
    assert group_sizes(stages, 16_384, 40_000, 12_000) == [16_384, 32_768, None], "a group holds at least one pack"
    assert group_sizes(ParallelConfig(data=2), 8192, 40_000, 12_000) == [None]


def test_overrides_of_a_found_layout_reproduce_its_plan() -> None:
    job = resolve.resolve("deepsearch_14b")
    found = search(job, H100)
    assert len(found.best) == 5
    assert found.fit + sum(count for _, count in found.failed) == found.tried
    own = plan(job, H100)
    for best in found.best:
        again = plan(resolve.resolve("deepsearch_14b", overrides=overrides_between(best, job).split()), H100)
        assert again.fits and again.to_dict() == best.to_dict()
        assert best.seconds <= own.seconds


@pytest.mark.parametrize("option", ["across_push=keep_kv", "stale=drop"])
def test_colocated_layouts_have_no_options_of_trees_in_flight(option: str) -> None:
    job = resolve.resolve("deepsearch_8b+split", overrides=[f"rollout.{option}"])
    best = search(job, H100, best=1, placements=("colocated",)).best[0]
    again = resolve.resolve(
        "deepsearch_8b+split", overrides=[f"rollout.{option}", *overrides_between(best, job).split()]
    )
    assert again.engine.placement == "colocated" and again.rollout.max_staleness == 0


def test_search_offers_placements_that_are_faster() -> None:
    """Engines on nodes of their own sample while the trainer trains, which is faster here than taking turns."""
    found = search(resolve.resolve("reasoning_7b+2nodes"), H100)
    placements = [best.config.engine.placement for best in found.best]
    assert {"colocated", "split"} == set(placements) and placements[0] == "split"
    assert found.best[0].seconds < plan(found.base, H100).seconds
    assert "engine.placement=split" in (text := overrides_between(found.best[0], found.base))
    assert "rollout.max_staleness=1" in text


def test_search_takes_the_faster_transport() -> None:
    """With a network of 0.05 GB/s, split engines receive weights faster through a filesystem of 20 GB/s."""
    job = resolve.resolve("reasoning_600m+4gpus")
    slow = replace(H100, network=5e7, filesystem=2e10)
    fast, files = (search(job, each, placements=("split",)).best[0] for each in (H100, slow))
    assert (fast.config.sync.transport, files.config.sync.transport) == ("auto", "disk")


def test_search_counts_failures_by_kind() -> None:
    found = search(resolve.resolve("reasoning_7b"), H100)
    reasons = [reason for reason, _ in found.failed]
    assert "an update needs more memory than a GPU has" in reasons
    assert len({re.sub(r"[0-9N]+", "", reason) for reason in reasons}) == len(reasons)
