"""Real steps on the released ARPO questions, if the files are present."""

import json
import os
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.e2e.jobs import ARPO

DATA = Path(os.environ.get("ARPO_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (DATA / "train_10k.parquet").exists(), reason=f"no released data at {DATA} (set ARPO_DATA to its directory)"
    ),
]


@pytest.fixture
def some_rows(tmp_path: Path) -> Path:
    """The first 60 released rows, three of them spoilt, with the released search cache next to them."""
    rows = pq.read_table(DATA / "train_10k.parquet").slice(0, 60).to_pylist()
    rows[3]["reward_model"]["ground_truth"] = " "
    rows[5]["prompt"][-1]["content"] = ""
    rows[7]["prompt"][-1]["content"] = "why? " * 4000
    import pyarrow as pa

    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    (tmp_path / "search_cache.json").symlink_to(DATA / "search_cache.json")
    return path


@pytest.mark.slow_campaign
def test_step_on_released_questions_names_bad_rows(some_rows: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = [f"data.path={some_rows}", f"run_dir={run}", "train.tasks_per_step=2", "rollout.max_response_tokens=64"]
    command = [*ARPO, "train", "reasoning_tiny", *overrides, "train.steps=1", "evaluation.tasks=4"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"logs in {run / 'logs'}\n{done.stderr[-3000:]}"
    assert "3 bad rows skipped" in done.stderr

    bad = [json.loads(line) for line in (run / "bad_rows.jsonl").read_text().splitlines()]
    assert [row["row"] for row in bad] == [3, 5, 7]
    reasons = " ".join(row["reason"] for row in bad)
    assert "answer is missing" in reasons and "question is empty" in reasons and "max_prompt_tokens" in reasons
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1]
    assert all(row["trajectories"] == 16 and row["logprob_gap"] < 1e-3 for row in rows)
    assert "arpo_cache" in (run / "sandbox.yaml").read_text()
    prompts = pq.read_table(run / "trees" / "step_000001.parquet")["prompt"].to_pylist()
    assert all("\\boxed{" in prompt for prompt in prompts), "the prompt's backspace must be repaired"
