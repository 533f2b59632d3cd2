"""Loss or gradient that is not finite: the update is skipped, dumped, counted, and can be replayed."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from arpo_megatron.actor.actor import Actor
from arpo_megatron.config import OptimizerConfig
from arpo_megatron.errors import UserError
from arpo_megatron.monitor.events import EventLog
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.trainer.recompute_update import recompute
from arpo_megatron.trainer.setup import dump_skipped_update
from arpo_megatron.trainer.skipped_updates import (
    SkippedUpdate,
    load_skipped_update,
    save_skipped_update,
)
from tests.actor import cases

pytestmark = pytest.mark.usefixtures("one_rank")


def new_actor() -> Actor:
    torch.manual_seed(1)
    return Actor(cases.job(), cases.QWEN3, None, optimizer=OptimizerConfig(lr=1e-2), total_updates=10)


def packs_of(seed: int, budget: int = 120):
    return pack_trees(*cases.batch(seed), token_budget=budget)


def with_a(value: float, packs, index: int):
    """The packs, one credit of one of them changed."""
    positive = packs[index].positive.copy()
    positive[0] = value
    return [*packs[:index], dataclasses.replace(packs[index], positive=positive), *packs[index + 1 :]]


def bad_update(actor: Actor, packs, old=None, step: int = 0) -> SkippedUpdate:
    stats = actor.update(packs, old, "nll")
    assert stats.skipped
    return SkippedUpdate("train", step, "nll", actor.nonfinite_packs, packs, old)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_skipped_update_names_the_pack_with_a_nonfinite_loss(value):
    actor, packs = new_actor(), packs_of(0)
    assert len(packs) > 1
    before = [parameter.detach().clone() for parameter in actor.model.parameters()]
    bad = bad_update(actor, with_a(value, packs, 1))
    assert bad.reason == f"the loss of pack 1 of {len(packs)} was not finite"
    assert all(torch.equal(old, new) for old, new in zip(before, actor.model.parameters(), strict=True))


def test_update_with_a_nonfinite_gradient_is_skipped():
    actor, packs = new_actor(), packs_of(0)
    hook = actor.model.embedding.word_embeddings.weight.register_hook(lambda gradient: gradient * np.nan)
    bad = bad_update(actor, packs)
    assert bad.reason == f"the gradient was not finite, the loss of all {len(packs)} packs was"
    assert any("the gradient is not finite in 1 weights, embedding" in line for line in recompute(actor, bad))
    hook.remove()
    assert not actor.update(packs, None, "nll").skipped


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("budget", [120, 30])  # 30: trees are cut, and packs inherit from each other
def test_dump_holds_the_whole_batch(tmp_path, old, budget):
    packs = with_a(np.nan, packs_of(0, budget), 0)
    logprobs = [pack.sampling_logprobs for pack in packs] if old else None
    reference = [pack.weight for pack in packs] if old else None
    first = SkippedUpdate("sft", 7, "policy", [0, 2], packs, logprobs, reference)
    paths = [save_skipped_update(tmp_path / "skipped_updates", first) for _ in range(2)]
    assert [path.name for path in paths] == ["sft_000007.npz", "sft_000007-2.npz"]
    again = load_skipped_update(paths[1])
    assert (again.phase, again.step, again.loss, list(again.suspects)) == ("sft", 7, "policy", [0, 2])
    for one, two in zip(first.packs, again.packs, strict=True):
        for field in dataclasses.fields(one):
            left, right = getattr(one, field.name), getattr(two, field.name)
            np.testing.assert_array_equal(left, right)
            assert not isinstance(left, np.ndarray) or left.dtype == right.dtype
    if old:
        assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(logprobs, again.old_logprobs, strict=True))
        assert all(
            np.array_equal(p.weight, b, equal_nan=True) for p, b in zip(packs, again.reference_logprobs, strict=True)
        )
    else:
        assert again.old_logprobs is None and again.reference_logprobs is None


def test_replay_reports_what_is_finite_and_changes_nothing(tmp_path):
    actor, packs = new_actor(), packs_of(0, 30)
    bad = bad_update(actor, with_a(np.nan, packs, 1))
    again = load_skipped_update(save_skipped_update(tmp_path, bad))
    before = [parameter.detach().clone() for parameter in actor.model.parameters()]
    lines = list(recompute(actor, again))
    assert len(lines) == len(packs) + 2
    assert lines[0].startswith("pack 0: finite (loss ")
    count = len(packs[1].positive)
    assert lines[1] == f"pack 1: positive: 1 of {count} not finite, loss not finite (loss nan)"
    assert lines[-2] == "gradient norm: nan"
    assert "the gradient is not finite in" in lines[-1]
    assert all(torch.equal(old, new) for old, new in zip(before, actor.model.parameters(), strict=True))
    assert not any("not finite" in line for line in recompute(actor, dataclasses.replace(again, packs=packs)))


def test_three_skipped_updates_in_a_row_end_the_run(tmp_path):
    events, folder = EventLog(tmp_path / "events.jsonl"), tmp_path / "skipped_updates"
    bad = SkippedUpdate("train", 3, "policy", [1], packs_of(0), None)
    in_a_row = 0
    for update in (bad, bad, None, bad, bad):
        in_a_row = 0 if update is None else dump_skipped_update(update, in_a_row, folder, events)
    with pytest.raises(
        UserError, match=r"3 updates in a row were skipped; .* arpo recompute-update .*train_000003-5.npz"
    ):
        dump_skipped_update(bad, in_a_row, folder, events)
    texts = [json.loads(line)["text"] for line in events.path.read_text().splitlines()]
    assert len(texts) == len(list(folder.iterdir())) == 5
    packs = len(bad.packs)
    assert texts[0].startswith(
        f"an update was skipped: the loss of pack 1 of {packs} was not finite; arpo recompute-update "
    )


def test_file_without_a_dump_is_refused(tmp_path):
    for name, content in {"empty.npz": b"", "text.npz": b"hello", "cut.npz": b"PK\x03\x04" + b"0" * 99}.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="is no dump of a skipped update"):
            load_skipped_update(tmp_path / name)
    with pytest.raises(UserError, match="is no dump of a skipped update"):
        load_skipped_update(tmp_path / "missing.npz")
