"""A job trains with a plug-in tool and a tool of an MCP server, which the user's file adds."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.tags.calls import result_text
from tests.e2e.jobs import SHORT, quickstart, rows_of, run_to_end, trained, undocumented
from tests.tools_sandbox.test_added_tools import SERVER
from tools_sandbox.config import load_config

pytestmark = pytest.mark.timeout(1600)  # the first test waits for the shared cold start

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "count_words_tool"
RENAMED = {"python": "count_words", "search": "reverse"}


def with_renamed_tags(model: Path, copy: Path) -> None:
    """Copy a model that calls python and search, with other names for their tags in its tokenizer."""
    shutil.copytree(model, copy)
    for path in copy.glob("*.json"):
        text = path.read_text()
        for old, new in RENAMED.items():
            text = text.replace(f"<{old}>", f"<{new}>").replace(f"</{old}>", f"</{new}>")
        path.write_text(text)


def test_policy_trains_with_plugin_and_mcp_tool(sft_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", tmp_path / "installed", tmp_path / "source"], check=True)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    with_renamed_tags(sft_run / "sft", tmp_path / "model")
    values = {"plugins": [{"name": "count_words"}], "mcp": {"texts": {**SERVER, "tools": ["reverse"]}}}
    (tmp_path / "tools.yaml").write_text(yaml.safe_dump(values))
    run = tmp_path / "run"
    overrides = [f"model.path={tmp_path / 'model'}", "sft.steps=0", "train.steps=1", *SHORT, "evaluation.after=true"]
    overrides += [
        "evaluation.tasks=4",
        f"sandbox.file={tmp_path / 'tools.yaml'}",
        "rollout.tools=[count_words,reverse]",
    ]
    run_to_end(quickstart("train", run, *overrides), run)

    trees, decode = trained(run), TokenizerCodec(tmp_path / "model").decode
    answers = [segment for item in trees for segment in item.tree.segments if segment.tool is not None]
    assert {segment.tool.name for segment in answers if segment.tool} == set(RENAMED.values())
    for segment in answers:
        assert segment.tool is not None and segment.tool.status == "ok"
        text = segment.tool.arguments["text"]
        expected = str(len(text.split())) if segment.tool.name == "count_words" else text[::-1]
        if len(expected) < 40:  # not cut
            assert decode(segment.token_ids.tolist()) == result_text(expected)
    assert any(reward >= 0 for item in trees for reward in item.rewards), "the reward knows the tags"
    (row,) = rows_of(run / "metrics.jsonl")
    assert row["tool_calls_executed"] > 0 and row["tool_calls_invalid_json"] == 0 and not undocumented(row)
    assert row["updates_skipped"] == 0
    (held_out,) = (run / "held_out").glob("step_*.json")
    assert set(yaml.safe_load(held_out.read_text())["tool_calls"]) == {"ok"}
    assert (run / "sandbox_user.yaml").read_text() == (tmp_path / "tools.yaml").read_text()
    assert [source.path for source in load_config(run / "sandbox.yaml").search.sources] == [run / "corpus.jsonl"]
