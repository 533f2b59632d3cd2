"""`arpo sft` on a file of conversations: learnt, resumed, and what cannot be used is named."""

import json
from pathlib import Path

import pytest
from jobs import quickstart, rows_of, run_to_end

from arpo_megatron.config import ModelConfig
from arpo_megatron.tasks.tokenizers import make_model_directory, train_bpe
from arpo_megatron.weights.random_init import save_random_weights

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:\n{% endif %}"
)
COLOURS = ["red", "blue", "green", "grey"]


@pytest.fixture
def talks(tmp_path: Path) -> Path:
    """Forty short conversations, and two rows of no use."""
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
    """A tiny model whose tokenizer has a chat template."""
    tokenizer = train_bpe([talks.read_text()], 400)
    tokenizer.chat_template = TEMPLATE
    directory = tmp_path / "model"
    make_model_directory(directory, ModelConfig(hidden_size=32, layers=2, heads=2, kv_heads=2, ffn_size=64), tokenizer)
    save_random_weights(directory, seed=1)
    return directory


def test_conversations_are_learnt_and_bad_rows_named(tmp_path: Path, talks: Path, model: Path) -> None:
    run = tmp_path / "run"
    words = [
        f"model.path={model}",
        f"sft.data={talks}",
        "sft.held_out=0.1",
        "sft.steps=40",
        "sft.batch=16",
        "sft.optimizer.lr=0.01",
    ]
    told = run_to_end(quickstart("sft", run, *words), run)
    assert "2 bad rows skipped" in told and "row 40" in told
    assert "loss on 4 held-out conversations" in told
    losses = [event["loss"] for event in rows_of(run / "events.jsonl") if event["kind"] == "cold_start"]
    assert losses[-1] < 0.5 * losses[0]
    assert (run / "cold_start" / "model.safetensors").exists()
    assert (
        TEMPLATE in (run / "cold_start" / "tokenizer_config.json").read_text()
        or (run / "cold_start" / "chat_template.jinja").read_text() == TEMPLATE
    )
