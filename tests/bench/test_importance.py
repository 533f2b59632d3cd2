"""Bias of sampling corrections, by enumeration."""

import pytest

from arpo_megatron.bench import importance


def test_only_unbounded_products_are_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importance, "HIGH", 1e9)
    monkeypatch.setattr(importance, "LOW", 0.0)
    (row,) = importance.bench_importance(tokens=6, kl_nats=[0.5])["rows"]
    assert row["product"]["bias"] < 1e-6 and row["product"]["weights_mean"] == pytest.approx(1)
    assert row["product"]["noise"] > row["tis"]["noise"] > 0
    for name in ("none", "tis", "icepop", "geometric"):
        assert row[name]["bias"] > 0.05


def test_bias_vanishes_with_the_divergence() -> None:
    (row,) = importance.bench_importance(tokens=5, kl_nats=[1e-9])["rows"]
    corrections = [found for found in row.values() if isinstance(found, dict)]
    assert len(corrections) == 5
    assert all(found["bias"] < 1e-3 and found["noise"] == pytest.approx(1, abs=1e-3) for found in corrections)
