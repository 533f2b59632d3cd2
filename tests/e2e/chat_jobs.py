"""Jobs of a tiny model that ends its turns itself: its cold start on dialogues, and what their one step must show."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from arpo_megatron.config import ModelConfig
from arpo_megatron.models.random_init import save_random_weights
from arpo_megatron.models.tiny import make_model_directory, train_bpe
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tree import Role
from tests.e2e.jobs import rows_of, trained, undocumented

TEMPLATE = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% if tools %}<|im_start|>system\n{{ system }}TOOLS{% for tool in tools %} {{ tool.function.name }}{% endfor %}"
    "<|im_end|>\n{% elif system %}<|im_start|>system\n{{ system }}<|im_end|>\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}{% if m.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's turns, with a shorter text for the tools."""
QUESTIONS = 64
LENGTH = 640

Turns = list[tuple[str, str]]
Dialogue = Callable[[random.Random], tuple[str, str, Turns]]
"""Draws a question, its answer, and the turns after the question as roles and texts."""


def prepare(folder: Path, dialogue: Dialogue, system: str, tools: Sequence[dict[str, Any]] = ()) -> list[str]:
    """Write questions, conversations and a random model; return the overrides of a job with one step on them."""
    rng, texts = random.Random(0), [TEMPLATE, system]
    with (folder / "questions.jsonl").open("w") as questions, (folder / "chats.jsonl").open("w") as chats:
        for _ in range(QUESTIONS):
            question, answer, turns = dialogue(rng)
            questions.write(json.dumps({"question": question, "answer": answer}) + "\n")
            begin = [("system", system)] * bool(system) + [("user", question)]
            messages = [{"role": role, "content": text} for role, text in (*begin, *turns)]
            chats.write(json.dumps({"messages": messages, "tools": list(tools)}) + "\n")
            texts += [message["content"] for message in messages]
    tokenizer = train_bpe(texts, 512)
    tokenizer.chat_template = TEMPLATE
    sizes = ModelConfig(
        dtype="float32", hidden_size=128, layers=2, heads=4, kv_heads=2, ffn_size=256, max_length=LENGTH
    )
    make_model_directory(folder / "model", sizes, tokenizer)
    save_random_weights(folder / "model", seed=1)
    return [
        *(f"model.path={folder / 'model'}", f"model.max_length={LENGTH}", "data.kind=files", "data.held_out=8"),
        *(f"data.path={folder / 'questions.jsonl'}", "data.max_prompt_tokens=448", "evaluation.tasks=8"),
        *(f"sft.data={folder / 'chats.jsonl'}", "sft.steps=200", "sft.batch=16", "sft.mistake_share=0"),
        *("rollout.max_tool_tokens=64", "train.steps=1", "train.tasks_per_step=4", "evaluation.before=false"),
    ]


def check_figures(run: Path, parts: Sequence[str] = ()) -> None:
    """Check the metrics of the step; `parts`: names that the environment gives to parts of its reward."""
    (row,) = rows_of(run / "metrics.jsonl")
    assert row["forks"] > 0 and row["logprob_gap"] < 1e-3 and row["updates_skipped"] == 0
    assert set(undocumented(row)) == {f"reward/{part}" for part in parts}
    assert row["tool_calls_executed"] > 0 and row["tool_calls_failed"] == 0
    assert json.loads((run / "result.json").read_text())["success"]["after"] > 0.5, "the cold start has learned it"


def texts_of(run: Path, role: Role) -> list[list[str]]:
    """Return the texts of the segments with a role, for each trajectory."""
    decode = TokenizerCodec(run.parent / "model").decode
    return [
        [decode(segment.token_ids.tolist()) for segment in path if segment.role is role]
        for item in trained(run)
        for path in ([item.tree.segments[index] for index in item.tree.path(leaf)] for leaf in item.tree.leaves())
    ]
