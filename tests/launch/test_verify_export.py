"""A wrong export is refused: its log-probs differ by more than rounding."""

from pathlib import Path

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.launch.verify_export import check_gap


@pytest.mark.parametrize("gap", [5.0, float("nan")])
def test_gap_above_rounding_is_refused_without_a_limit_in_the_config(gap: float) -> None:
    with pytest.raises(UserError, match="the export is wrong"):
        check_gap(gap, Path("export"), resolve.resolve("quickstart"))


def test_limit_of_the_config_decides() -> None:
    check_gap(1e-3, Path("export"), resolve.resolve("quickstart"))
    config = resolve.resolve("quickstart", overrides=["train.logprob_gap_limit=1e-4"])
    with pytest.raises(UserError, match=r"more than 0\.0001"):
        check_gap(1e-3, Path("export"), config)
