"""The guards of the loop refuse broken numbers."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from arpo_megatron.actor.statistics import PolicyStats, UpdateStats
from arpo_megatron.config import JobConfig
from arpo_megatron.step_metrics import sampling_gap
from arpo_megatron.training_run import TrainingRun

# The check looks at nothing of the run but its config.
RUN: Any = SimpleNamespace(config=JobConfig(name="test"))
STATS = UpdateStats.of(
    PolicyStats.of(ratio=torch.ones(3), log_ratio=torch.zeros(3), entropies=torch.ones(3)).sums,
    torch.ones(()),
    grad_norm=1.0,
    lr=1e-3,
    skipped=False,
)


def pack(*logprobs: float) -> Any:
    return SimpleNamespace(sampling_logprobs=np.array(logprobs, np.float32))


def check(**changes: float) -> None:
    TrainingRun.check_on_policy(RUN, [dataclasses.replace(STATS, **changes)])  # type: ignore[arg-type]


def test_the_gap_is_the_largest_over_all_packs_and_leaves_unknown_tokens_out() -> None:
    packs = [[pack(-1.0, np.nan)], [pack(-2.0), pack(-3.0)]]
    ours = [[np.array([-1.5, -9.0], np.float32)], [np.array([-2.0], np.float32), np.array([-2.75], np.float32)]]
    assert sampling_gap(packs, ours) == 0.5
    assert sampling_gap([], []) == 0.0
    assert sampling_gap([[pack()]], [[np.zeros(0, np.float32)]]) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_trainer_logprob_that_is_not_finite_is_an_infinite_gap(bad: float) -> None:
    assert sampling_gap([[pack(-1.0, -1.0)]], [[np.array([-1.0, bad], np.float32)]]) == np.inf


def test_ratios_of_exactly_one_pass() -> None:
    check()
    TrainingRun.check_on_policy(RUN, [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes", [{"ratio_max": 1.0000001}, {"kl_old": 1e-12}, {"ratio_max": np.nan}, {"kl_old": np.nan}]
)
def test_any_other_ratio_before_an_update_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(RuntimeError, match="do not compute the same thing"):
        check(**changes)
