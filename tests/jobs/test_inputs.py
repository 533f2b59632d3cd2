"""Conflicts between config and data are reported before anything starts."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.inputs import prepare
from arpo_megatron.jobs.run_directory import RunDirectory


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "train.tasks_per_step=6 exceeds the 5 training tasks"),
        (
            ["train.tasks_per_step=4", "rollout.max_staleness=1"],
            "train.tasks_per_step=4 with rollout.max_staleness=1 starts 8 trees at once, which exceeds the 5 training",
        ),
        (
            ["train.tasks_per_step=4", "rollout.oversampling=0.5"],
            "train.tasks_per_step=4 with rollout.oversampling=0.5 starts 6 trees at once, which exceeds the 5 training",
        ),
        (["train.tasks_per_step=4", "algorithm.name=ghpo"], "needs hints: set data.columns.hint"),
        (["train.tasks_per_step=4", "algorithm.name=inspo_partial"], "needs a file of prompts"),
    ],
)
def test_tasks_without_what_a_step_needs_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    rows: list[dict[str, Any]] = [
        {
            "prompt": [{"role": "user", "content": f"How much is {number} and {number}?"}],
            "ability": "math",
            "reward_model": {"ground_truth": str(2 * number), "style": "rule"},
        }
        for number in range(6)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    data = ["data.kind=files", f"data.path={tmp_path / 'rows.parquet'}", "data.held_out=1", "evaluation.tasks=1"]
    data += ["data.max_prompt_tokens=100"]
    config = resolve.resolve("quickstart", overrides=["sft.steps=0", "train.tasks_per_step=6", *data, *overrides])
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    with pytest.raises(UserError) as caught:
        prepare(config, run)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
