"""The stores of process groups."""

from datetime import timedelta
from pathlib import Path

import pytest

from arpo_megatron.utils import stores
from arpo_megatron.utils.processes import STORE_FILE


def test_ranks_of_one_machine_wait_as_long_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STORE_FILE, str(tmp_path / "store"))
    stores._stores.clear()
    try:
        assert stores.rank_store(0, 2, timedelta(seconds=1860)).timeout == timedelta(seconds=1860)
    finally:
        stores._stores.clear()
