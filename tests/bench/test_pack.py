"""`arpo bench pack` on small trees: token figures match the trees, and both sides have the same gradient."""

from dataclasses import replace

import pytest

from arpo_megatron.bench import pack
from arpo_megatron.jobs import resolve
from arpo_megatron.plan.synthetic_trees import MIXES, Mix


def test_figures_of_a_small_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Mix(samples=6, initial=3, calls=2, prompt=40, segment=(5, 30), result=(5, 30))
    monkeypatch.setattr(pack, "SHAPE", replace(pack.SHAPE, hidden=64, heads=2, kv_heads=1, head_dim=32, ffn=96))
    monkeypatch.setattr(pack, "TREES", 8)
    monkeypatch.setitem(MIXES, "small", small)
    monkeypatch.setitem(MIXES, "small_too", replace(small, prompt=200))
    found = pack.bench_pack(
        resolve.resolve("quickstart"), mixes=["small", "small_too"], seconds=0.0, token_budget=512, progress=False
    )
    tree = small.tree(0, pack.SHAPE.vocabulary)
    assert found["mix"] == "small"
    assert found["token_ratio"] == tree.unique_tokens / tree.flat_tokens
    assert found["mixes"]["small_too"]["token_ratio"] < found["token_ratio"] < 1
    assert found["pair_ratio"] < 1
    speed = found["flat_s"] / found["tree_s"]
    assert found["captured"] == pytest.approx(speed * tree.unique_tokens / tree.flat_tokens)
    for figures in found["mixes"].values():
        assert figures["grad_rel_error"] < 1e-5
        assert figures["time_ratio"] > 0
        assert figures["repeated_share"] == 0
        assert 0 <= figures["imbalance"] < 0.5


def test_token_ratios_of_the_mixes() -> None:
    ratios = []
    for mix in MIXES.values():
        tree = mix.tree(0, pack.SHAPE.vocabulary)
        ratios.append(tree.unique_tokens / tree.flat_tokens)
    assert ratios == pytest.approx([0.673, 0.660, 0.400, 0.114], abs=0.0006)
