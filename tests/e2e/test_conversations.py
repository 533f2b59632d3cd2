"""`arpo sft` on a file of conversations: learning, bad rows, resuming, changed data."""

import gzip
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from arpo_megatron.actor import parallel
from arpo_megatron.config import ModelConfig
from arpo_megatron.jobs import resolve
from arpo_megatron.jobs.inputs import load_tokenizer
from arpo_megatron.models.random_init import save_random_weights
from arpo_megatron.models.spec import ModelSpec
from arpo_megatron.models.tiny import make_model_directory, train_bpe
from arpo_megatron.sft import Examples
from tests.e2e.jobs import quickstart, rows_of, run_to_end, undocumented

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
COLOURS = ["red", "blue", "green", "grey"]


@pytest.fixture
def talks(tmp_path: Path) -> Path:
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
    path = tmp_path / "talks.jsonl"
    bad = [{"messages": []}, {"messages": rows[0]["messages"][:1]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *bad]))
    return path


@pytest.fixture
def model(tmp_path: Path, talks: Path) -> Path:
    """Make a tiny model whose tokenizer has a chat template."""
    tokenizer = train_bpe([talks.read_text()], 400)
    tokenizer.chat_template = TEMPLATE
    directory = tmp_path / "model"
    make_model_directory(directory, ModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=2, ffn_size=64), tokenizer)
    save_random_weights(directory, seed=1)
    return directory


def overrides(talks: Path, model: Path, *more: str) -> list[str]:
    batch = ["sft.held_out=0.1", "sft.batch=16", "sft.optimizer.lr=0.01", "sft.evaluate_every=15"]
    return [f"model.path={model}", f"sft.data={talks}", *batch, *more]


def test_sft_learns_conversations_and_resumes_to_the_same_bits(tmp_path: Path, talks: Path, model: Path) -> None:
    run = tmp_path / "run"
    monitor = ("monitor.peak_tflops=0.1", "monitor.profile_steps=[2,3]")
    command = quickstart("sft", run, *overrides(talks, model, "sft.steps=40", "sft.save_every=16", *monitor))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "2 bad rows skipped" in done.stderr and "row 40" in done.stderr
    assert "loss on 4 held-out conversations" in done.stderr
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
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["loss"] == rows[-1]["loss"] and figures["held_out_loss"] == rows[-1]["held_out_loss"]
    assert (figures["updates"], figures["conversations"], figures["held_out"]) == (40, 36, 4)
    assert figures["skipped_rows"] == 2
    assert figures["learnt_tokens"] == sum(row["tokens"] for row in rows) < figures["tokens"]
    trace = run / "profile" / "sft" / "rank0.json.gz"
    names = {event.get("name", "") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert any("TreeAttention" in name for name in names)
    assert any("Optimizer.step" in name for name in names)
    check_resumed_bits(command, run, talks)


def test_only_rank_zero_reads_the_conversations(talks: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve.resolve("quickstart", overrides=overrides(talks, model, "sft.steps=3"))
    tokenizer, spec = load_tokenizer(model), ModelSpec.from_hf(model)
    sent: list[object] = []
    monkeypatch.setattr(parallel, "broadcast_object", lambda own: sent.append(own) or own)
    leading = Examples.of(config, tokenizer, spec)
    talks.unlink()  # a second read fails
    monkeypatch.setattr(parallel, "is_rank_zero", lambda: False)
    monkeypatch.setattr(parallel, "broadcast_object", lambda own: sent[0] if own is None else own)
    other = Examples.of(config, tokenizer, spec)
    for number in range(3):
        assert [t.task_id for t in other.of_update(number)] == [t.task_id for t in leading.of_update(number)]
    assert (other.conversations, len(other.held_out), other.skipped_rows) == (36, 4, 2)


def check_resumed_bits(command: list[str], run: Path, talks: Path) -> None:
    """Resume a finished cold start from its last checkpoint: same weights, figures, metrics. Then change the data."""
    weights = (run / "sft" / "model.safetensors").read_bytes()
    figures, rows = (run / "sft_result.json").read_text(), rows_of(run / "sft_metrics.jsonl")
    shutil.rmtree(run / "sft")  # as if the job had been stopped after its last checkpoint
    assert "resumed after 32 of 40 updates" in run_to_end([*command, "--resume"], run)
    assert (run / "sft" / "model.safetensors").read_bytes() == weights
    assert (run / "sft_result.json").read_text() == figures
    timeless = [{k: v for k, v in row.items() if not k.startswith(("seconds", "trainer", "memory"))} for row in rows]
    again = rows_of(run / "sft_metrics.jsonl")
    assert [{key: row[key] for key in kept} for row, kept in zip(again, timeless, strict=True)] == timeless
    talks.write_text("".join(talks.read_text().splitlines(keepends=True)[:30]))
    refused = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert f"sft.data={talks} has changed since {run} was started" in " ".join(refused.stderr.split())
