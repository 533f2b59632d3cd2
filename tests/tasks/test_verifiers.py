"""The trainer's side of a verifiers environment without the package: texts of messages, and errors."""

import subprocess
import sys
from pathlib import Path

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.environments.build import environment_maker
from arpo_megatron.tasks.environments.verifiers.chat import UnreadableCallError, conversation, message_of, text_of
from arpo_megatron.tasks.environments.verifiers.environment import VerifiersEnvironment
from arpo_megatron.tasks.environments.verifiers.process import VerifiersError, VerifiersProcess
from arpo_megatron.tasks.protocols.hermes import HermesProtocol
from arpo_megatron.tasks.protocols.tools import DEFAULT_TOOLS

USER = {"role": "user", "content": "People in Arl?"}


def test_tools_stand_in_the_system_message_as_in_the_hermes_protocol() -> None:
    functions = [tool.function() for tool in DEFAULT_TOOLS]
    system = {"role": "system", "content": "Be short."}
    prompt = HermesProtocol().prompt([{"role": "system", "content": "Be short."}, {**USER}], None)
    messages = conversation([system, USER], functions)
    assert messages[0]["content"].startswith("Be short.\n\n# Tools") and messages[0]["content"] in prompt
    assert conversation([USER], functions)[0]["role"] == "system"
    assert conversation([system, USER], []) == [system, USER]


def test_calls_of_a_turn_become_tool_calls() -> None:
    turn = 'Both.<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    assert message_of(turn) == {
        "role": "assistant",
        "content": "Both.",
        "tool_calls": [
            {"id": "call_0", "type": "function", "function": {"name": "a", "arguments": '{"x": 1}'}},
            {"id": "call_1", "type": "function", "function": {"name": "b", "arguments": "{}"}},
        ],
    }
    assert message_of(" It is 52. ") == {"role": "assistant", "content": " It is 52. "}


@pytest.mark.parametrize("call", ["{name: a}", "[]", '{"arguments": {}}', '{"name": "a"'])
def test_an_unreadable_call_is_an_observation(call: str) -> None:
    with pytest.raises(UnreadableCallError, match="not a JSON object"):
        message_of(f"<tool_call>{call}</tool_call>")


def test_results_and_user_messages_become_one_text() -> None:
    parts = [{"type": "text", "text": "Walk "}, {"type": "text", "text": "on."}]
    result = {"role": "tool", "tool_call_id": "call_0", "content": "52"}
    assert text_of([result, {"role": "user", "content": parts}]) == "<tool_response>\n52\n</tool_response>\nWalk on."
    with pytest.raises(ValueError, match="sends image_url; only text"):
        text_of([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}])


def test_missing_files_are_named_before_the_job_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"environment verifiers: config=.*/env\.toml: no such file"):
        environment_maker("verifiers", {"config": str(tmp_path / "env.toml"), "python": sys.executable})


def test_an_interpreter_without_verifiers_is_named(tmp_path: Path) -> None:
    (tmp_path / "env.toml").write_text('[taskset]\nid = "x"\n')
    command = [sys.executable, "-m", "arpo_megatron", "data", "from-verifiers", tmp_path / "env.toml"]
    command += ["--python", sys.executable, "-o", tmp_path / "tasks.jsonl"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert f"{sys.executable} cannot import verifiers 0.4 or later" in result.stderr
    assert "ended with status 1; the log has the reason" in result.stderr and not (tmp_path / "tasks.jsonl").exists()


def test_a_row_without_a_number_of_a_task_is_refused(tmp_path: Path) -> None:
    (tmp_path / "env.toml").write_text('[taskset]\nid = "x"\n')
    environment = VerifiersEnvironment(str(tmp_path / "env.toml"), sys.executable)
    environment.reset(Task("task-0", ({"role": "user", "content": "1+1?"},), "two", "math", ""))
    with pytest.raises(VerifiersError, match="is 'two', not the number of a task"):
        environment.step("2")


@pytest.mark.parametrize(
    ("script", "reason"),
    [("exec sleep 60 >&-", "sends no more replies and was killed"), ("exit 3", "ended with status 3")],
)
def test_call_fails_if_process_sends_no_more_replies(tmp_path: Path, script: str, reason: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    with pytest.raises(VerifiersError, match=reason):
        VerifiersProcess(python, tmp_path / "config").call("tasks")
