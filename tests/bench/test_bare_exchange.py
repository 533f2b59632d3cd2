"""The bare exchange with which pushes are compared."""

from typing import Any

import pytest
from torch import Tensor

from arpo_megatron.bench import bare, bare_exchange


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_an_exchange_that_brings_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch, empty: int) -> None:
    """Also if those before and after it have brought everything. No second process runs."""
    plan = bare_exchange._Plan([[(0, 0, 8)]], [1], 1)
    meetings, exchanges = iter([True] * 9 + [False]), iter(range(3))

    def receive(_plan: Any, _receiver: int, _group: Any, target: Tensor) -> None:
        if next(exchanges) != empty:
            target.fill_(1)

    monkeypatch.setattr(bare, "join", lambda *_: None)
    monkeypatch.setattr(bare, "meet", lambda *_, more: next(meetings))
    monkeypatch.setattr(bare_exchange, "_from_group", receive)
    with pytest.raises(SystemExit):
        bare_exchange._receive(plan, 0, 0, None, "")
    assert next(meetings, None) is None
