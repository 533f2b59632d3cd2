"""Whole jobs in which the model ends its turns itself: in an environment, and with each protocol of chat models.

A tiny model of a chat template like Qwen's learns the form of the dialogues from conversations, then trains on
questions of the same kind.
"""

import json
import random
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from arpo_megatron.config import ModelConfig
from arpo_megatron.models.random_init import save_random_weights
from arpo_megatron.models.tiny import make_model_directory, train_bpe
from arpo_megatron.rollout.worker import TokenizerCodec
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.environments.sql import SqlDatabase
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS
from arpo_megatron.testing import play
from arpo_megatron.tree import Role
from tests.e2e.jobs import ARPO, quickstart, rows_of, run_to_end, trained, undocumented

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow_campaign]

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
PEOPLE = {"Arl": 52, "Bex": 7, "Cam": 31, "Dov": 88}
SCRIPT = "CREATE TABLE towns (name TEXT, people INT);" + "".join(
    f"INSERT INTO towns VALUES ('{name}', {people});" for name, people in PEOPLE.items()
)
PYTHON = [tool for tool in DEFAULT_TOOLS if tool.name == "python"]
QUESTIONS = 64
LENGTH = 640

Turns = list[tuple[str, str]]
Dialogue = Callable[[random.Random], tuple[str, str, Turns]]
"""Draws a question, its answer, and the turns after the question as roles and texts."""


def ask_database(rng: random.Random) -> tuple[str, str, Turns]:
    name = rng.choice(list(PEOPLE))
    answer = str(PEOPLE[name])
    look = f"<sql>SELECT people FROM towns WHERE name='{name}'</sql>"
    turns = [("assistant", look), ("user", answer), ("assistant", f"<answer>{answer}</answer>")]
    return f"People in {name}?", answer, turns


def add(rng: random.Random) -> tuple[str, str, Turns]:
    first, second = rng.randrange(10), rng.randrange(10)
    answer = str(first + second)
    call = json.dumps({"name": "python", "arguments": {"code": f"print({first}+{second})"}})
    turns = [("assistant", f"<tool_call>\n{call}\n</tool_call>"), ("tool", answer)]
    return f"{first}+{second}?", answer, [*turns, ("assistant", f"<answer>\\boxed{{{answer}}}</answer>")]


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
        *(f"sft.data={folder / 'chats.jsonl'}", "sft.steps=120", "sft.batch=16", "sft.mistake_share=0"),
        *("rollout.max_tool_tokens=64", "train.steps=1", "train.tasks_per_step=4", "evaluation.before=false"),
    ]


def check_figures(run: Path) -> None:
    (row,) = rows_of(run / "metrics.jsonl")
    assert row["forks"] > 0 and row["logprob_gap"] < 1e-3 and row["updates_skipped"] == 0 and not undocumented(row)
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


def test_job_trains_and_evaluates_in_an_environment(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, *_ = SqlDatabase(SCRIPT).reset(Task("task", ({"role": "user", "content": "?"},), "", "qa", "?"))
    overrides = prepare(tmp_path, ask_database, first["content"])
    overrides += ["rollout.environment=sql", f"rollout.environment_params.script={SCRIPT}", "reward.kind=environment"]
    printed = run_to_end(quickstart("train", run, *overrides), run)
    assert "search" not in printed, "an environment takes the place of tools"
    check_figures(run)
    assert max(reward for item in trained(run) for reward in item.rewards) == 1.0
    for turns, shown in zip(texts_of(run, Role.MODEL), texts_of(run, Role.TOOL), strict=True):
        steps = play(lambda: SqlDatabase(SCRIPT), "?", "", [turn.removesuffix("<|im_end|>") for turn in turns])
        expected = [f"\n<|im_start|>user\n{step.observation}<|im_end|>\n<|im_start|>assistant\n" for step in steps]
        assert shown == expected[: len(shown)]


@pytest.mark.parametrize("protocol", ["hermes", "template"])
def test_job_trains_and_evaluates_with_the_protocol_of_a_chat_model(tmp_path: Path, protocol: str) -> None:
    run = tmp_path / "run"
    if protocol == "hermes":
        (tmp_path / "one.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
        check = [
            *ARPO,
            "data",
            "check",
            str(tmp_path / "one.jsonl"),
            "rollout.protocol=hermes",
            "rollout.tools=[python]",
        ]
        shown = subprocess.run(check, capture_output=True, text=True, check=True).stdout
        system = shown.partition("<|im_start|>system\n")[2].partition("<|im_end|>")[0]
        overrides = prepare(tmp_path, add, system)
    else:
        overrides = prepare(tmp_path, add, "", [tool.function() for tool in PYTHON])
        overrides += ["rollout.tool_call_parser=qwen25"]
    overrides += [f"rollout.protocol={protocol}", "rollout.tools=[python]"]
    assert "search" not in run_to_end(quickstart("train", run, *overrides), run), "the policy has no such tool"
    check_figures(run)
    answers = [text for texts in texts_of(run, Role.TOOL) for text in texts]
    assert answers and all("<tool_response>\n" in text for text in answers)
    assert any(reward >= 1.0 for item in trained(run) for reward in item.rewards)
