"""The helpers for authors of components run what a job runs."""

import json
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.tags.protocol import DEFAULT_PROTOCOL
from arpo_megatron.testing import call_tool, read_call, read_questions, score_texts
from tools_sandbox.answers import ToolResult
from tools_sandbox.tool import Tool


class Number(BaseModel):
    number: int


class Double(Tool):
    name = "double"
    description = "Double a number."
    arguments = Number

    async def run(self, arguments: Number, timeout_s: float) -> ToolResult:
        return ToolResult("ok", str(2 * arguments.number))


def test_helpers_run_rewards_tools_readers_and_protocols(tmp_path: Path) -> None:
    right = "<think>t</think><answer>\\boxed{2}</answer>"
    scores = score_texts("arpo", "1+1?", "2", [right, right.replace("2", "3"), "no tags"])
    assert [score.reward for score in scores] == [1.0, 0.0, -1.0]
    with pytest.raises(UserError, match="unknown reward"):
        score_texts("arrpo", "1+1?", "2", [right])
    assert call_tool(Double(), number=4).text == "8"
    with pytest.raises(ValidationError):
        call_tool(Double(), number="four")
    (tmp_path / "q.jsonl").write_text(json.dumps({"task": "1+1?", "answer": 2}))
    assert read_questions(tmp_path / "q.jsonl", columns={"question": "task"}).tasks[0].ground_truth == "2"
    call = read_call(DEFAULT_PROTOCOL, "<think>t</think><search>Solaris", "</search>")
    assert getattr(call, "arguments", None) == {"query": "Solaris"}
