"""`arpo sft` on a file of conversations: learning, bad rows, damaged checkpoints, skipped updates, changed data."""

import dataclasses
import gzip
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arpo_megatron.actor import parallel
from arpo_megatron.algorithms.credit import supervised_credit
from arpo_megatron.config import ModelConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.inputs import load_tokenizer
from arpo_megatron.models.random_init import save_random_weights
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.models.tiny import make_model_directory, train_bpe
from arpo_megatron.packing.packs import pack_trees
from arpo_megatron.trainer.sft_run import Examples
from arpo_megatron.trainer.skipped_updates import SkippedUpdate, save_skipped_update
from arpo_megatron.tree import Role, RolloutTree
from tests.e2e.jobs import ARPO, quickstart, rows_of, run_to_end, undocumented

pytestmark = pytest.mark.timeout(600)
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
COLOURS = ["red", "blue", "green", "grey"]
MONITOR = ("monitor.peak_tflops=0.1", "monitor.profile_steps=[2,3]")


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write forty short conversations and two unusable rows."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"what colour is thing {number}?"},
                {"role": "assistant", "content": f"thing {number} is {COLOURS[number % 4]}"},
            ]
        }
        for number in range(40)
    ]
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    bad = [{"messages": []}, {"messages": rows[0]["messages"][:1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *bad]))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, talks: Path) -> Path:
    """Make a tiny model whose tokenizer has a chat template."""
    tokenizer = train_bpe([talks.read_text()], 400)
    tokenizer.chat_template = TEMPLATE
    directory = tmp_path_factory.mktemp("model") / "model"
    make_model_directory(directory, ModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=2, ffn_size=64), tokenizer)
    save_random_weights(directory, seed=1)
    return directory


def overrides(talks: Path, model: Path, *more: str) -> list[str]:
    batch = ["sft.held_out_share=0.1", "sft.batch=16", "sft.optimizer.lr=0.01", "sft.evaluate_every=15"]
    return [f"model.path={model}", f"sft.data={talks}", *batch, *more]


def command(run: Path, talks: Path, model: Path, *more: str) -> list[str]:
    return quickstart("sft", run, *overrides(talks, model, "sft.steps=40", "sft.save_every=16", *MONITOR), *more)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, talks: Path, model: Path) -> tuple[Path, str, dict[str, Any]]:
    """Run 40 updates; returns the run directory, the terminal output and the figures of the last line."""
    run = tmp_path_factory.mktemp("sft") / "run"
    done = subprocess.run(command(run, talks, model), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (run / "sft_checkpoints").iterdir()) == ["step_16", "step_32"]
    return run, done.stderr, json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def run(finished: tuple[Path, str, dict[str, Any]], tmp_path: Path) -> Path:
    """Copy the finished run, for a test that changes it."""
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def test_sft_learns_conversations_and_names_bad_rows(finished: tuple[Path, str, dict[str, Any]]) -> None:
    run, screen, figures = finished
    assert "2 bad rows skipped" in screen and "row 40" in screen
    assert "loss on 4 held-out conversations" in screen
    losses = [event["loss"] for event in rows_of(run / "events.jsonl") if event["kind"] == "sft"]
    assert losses[-1] < 0.5 * losses[0]
    assert (run / "sft" / "model.safetensors").exists()
    assert (
        TEMPLATE in (run / "sft" / "tokenizer_config.json").read_text()
        or (run / "sft" / "chat_template.jinja").read_text() == TEMPLATE
    )
    rows = rows_of(run / "sft_metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [15, 30, 40]
    assert rows[-1]["held_out_loss"] < rows[14]["held_out_loss"]
    assert rows[-1]["epoch"] == pytest.approx(40 * 16 / 36)
    assert all(0 < row["trainer/mfu"] < 1 and row["memory_peak_gb"] > 0.01 for row in rows)
    assert not undocumented({name: value for row in rows for name, value in row.items()})
    assert figures["loss"] == rows[-1]["loss"] and figures["held_out_loss"] == rows[-1]["held_out_loss"]
    assert (figures["updates"], figures["conversations"], figures["held_out"]) == (40, 36, 4)
    assert figures["skipped_rows"] == 2
    assert figures["learnt_tokens"] == sum(row["tokens"] for row in rows) < figures["tokens"]
    trace = run / "profile" / "sft" / "rank0.json.gz"
    names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any("TreeAttention" in name for name in names)
    assert any("Optimizer.step" in name for name in names)


def test_resume_skips_a_damaged_checkpoint_and_ends_with_the_same_bits(run: Path, talks: Path, model: Path) -> None:
    weights = (run / "sft" / "model.safetensors").read_bytes()
    figures, rows = (run / "sft_result.json").read_text(), rows_of(run / "sft_metrics.jsonl")
    shutil.rmtree(run / "sft")  # as if the job had been stopped after its last checkpoint
    flip_a_byte(run / "sft_checkpoints" / "step_32" / "actor" / "__0_0.distcp")
    screen = run_to_end(command(run, talks, model, "--resume"), run)
    assert "step_32 is not used: file actor/__0_0.distcp has another checksum" in screen
    assert "resumed after 16 of 40 updates" in screen
    assert (run / "sft" / "model.safetensors").read_bytes() == weights
    assert (run / "sft_result.json").read_text() == figures
    of_process = ("seconds", "time", "trainer", "memory", "attention_kernels")
    timeless = [{k: v for k, v in row.items() if not k.startswith(of_process)} for row in rows]
    again = rows_of(run / "sft_metrics.jsonl")
    assert [{key: row[key] for key in kept} for row, kept in zip(again, timeless, strict=True)] == timeless


@pytest.mark.slow_campaign
def test_resume_without_any_whole_checkpoint_is_one_line(run: Path, talks: Path, model: Path) -> None:
    shutil.rmtree(run / "sft")
    for path in (run / "sft_checkpoints").glob("step_*/manifest.json"):
        path.unlink()
    refused = subprocess.run(command(run, talks, model, "--resume"), capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "is intact (step_32 is not used: file manifest.json is missing; step_16 is not used:" in refused.stderr
    assert [row["kind"] for row in rows_of(run / "events.jsonl")[-2:]] == ["user_error", "failed"]


def test_resume_with_changed_data_is_one_line(run: Path, talks: Path, model: Path) -> None:
    whole = talks.read_text()
    talks.write_text("".join(whole.splitlines(keepends=True)[:30]))
    try:
        refused = subprocess.run(command(run, talks, model, "--resume"), capture_output=True, text=True, timeout=300)
    finally:
        talks.write_text(whole)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"sft.data={talks} has changed since {run} was started" in " ".join(refused.stderr.split())


@pytest.mark.slow_campaign
def test_recompute_update_names_the_nonfinite_pack(run: Path) -> None:
    tree = RolloutTree("task", [1, 2, 3])
    tree.add(0, Role.MODEL, [4, 5, 6], logprobs=np.zeros(3))
    (pack,) = pack_trees([tree], supervised_credit([tree]), token_budget=100)
    bad = dataclasses.replace(pack, positive=pack.positive * np.float32(np.nan))
    update = SkippedUpdate("sft", 1, "nll", [1], [pack, bad], None)
    dump = save_skipped_update(run / "skipped_updates", update)
    done = subprocess.run([*ARPO, "recompute-update", str(dump)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "skipped update after 1 updates: the loss of pack 1 of 2 was not finite"
    assert lines[1].startswith("weights of ") and "step_" in lines[1]
    assert lines[2].startswith("pack 0: finite (loss ")
    assert lines[3].startswith("pack 1: positive: 3 of 3 not finite, ")


def test_only_rank_zero_reads_the_conversations(
    talks: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copy(talks, tmp_path))
    config = resolve.resolve("quickstart", overrides=overrides(copy, model, "sft.steps=3"))
    tokenizer, spec = load_tokenizer(model), ModelSpec.from_hf(model)
    sent: list[object] = []
    monkeypatch.setattr(parallel, "broadcast_object", lambda own: sent.append(own) or own)
    leading = Examples.load(config, tokenizer, spec)
    copy.unlink()  # a second read fails
    monkeypatch.setattr(parallel, "is_rank_zero", lambda: False)
    monkeypatch.setattr(parallel, "broadcast_object", lambda own: sent[0] if own is None else own)
    other = Examples.load(config, tokenizer, spec)
    for number in range(3):
        assert [t.task_id for t in other.of_update(number)] == [t.task_id for t in leading.of_update(number)]
    assert (other.conversations, len(other.held_out), other.skipped_rows) == (36, 4, 2)


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
