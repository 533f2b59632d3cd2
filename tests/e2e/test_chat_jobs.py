"""Whole jobs in which the model ends its turns itself: in an environment, and with each protocol of chat models.

A tiny model of a chat template like Qwen's learns the form of the dialogues from conversations, then trains on
questions of the same kind.
"""

import json
import random
import subprocess
from pathlib import Path

import pytest

from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.environments.sql import SqlDatabase
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS
from arpo_megatron.testing import play
from arpo_megatron.tree import Role
from tests.e2e.chat_jobs import Turns, check_figures, prepare, texts_of
from tests.e2e.jobs import ARPO, quickstart, run_to_end, trained

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow_campaign]

PEOPLE = {"Arl": 52, "Bex": 7, "Cam": 31, "Dov": 88}
SCRIPT = "CREATE TABLE towns (name TEXT, people INT);" + "".join(
    f"INSERT INTO towns VALUES ('{name}', {people});" for name, people in PEOPLE.items()
)
PYTHON = [tool for tool in DEFAULT_TOOLS if tool.name == "python"]


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
