"""The authors' evaluation as options: limits, prompts, judge's wording, a judge for all benchmarks, files."""

from pathlib import Path
from typing import Any

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.benchmarks import BENCHMARKS
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.questions import find
from arpo_megatron.evaluation.run import describe, evaluate
from arpo_megatron.evaluation.target import Setting, eval_config, parse_target
from arpo_megatron.rewards.judge.judge import read_verdict
from arpo_megatron.rewards.judge.prompts import CORRECT, INCORRECT, released_question
from arpo_megatron.rollout.limits import RolloutLimits
from arpo_megatron.tasks.system_prompts import ARPO_PROMPTS
from tests.evaluation.asking import PLAIN, request
from tests.evaluation.chat_server import ChatServer, served
from tests.evaluation.conftest import write_lines


def test_authors_limits() -> None:
    config = eval_config(parse_target("http://x", "m"), [], Tools.TRAINED, [], Setting.AUTHORS)
    limits = RolloutLimits.evaluation(config)
    assert config.rollout.max_calls_by_tool == {"python": 5, "search": 10}
    assert (limits.max_turn_tokens, limits.tool_timeout_s, limits.at_limit) == (4096, 120, "answer_now")
    assert (limits.stop_at_answer, limits.refuse_repeated) == (True, ("search",))
    assert (config.sandbox.python_timeout_s, config.sandbox.search_results) == (120, 10)
    assert (config.model.max_length, config.reward.judge.wording) == (32000, "arpo")


def test_authors_setting_uses_their_prompt_and_judges_every_benchmark(files: Path, tmp_path: Path) -> None:
    judged: list[list[dict[str, str]]] = []

    def script(messages: list[dict[str, str]]) -> str:
        if "Golden Answer" in messages[-1]["content"]:
            judged.append(messages)
            return "Correct" if len(judged) == 1 else "Incorrect: it is wrong."
        return "<think>t</think><answer>\\boxed{8}</answer>"

    with served(ChatServer(script)) as server:
        more: dict[str, Any] = {"setting": Setting.AUTHORS, "judge_all": True, "tools": Tools.NONE, "tasks": 2}
        judge = [f"reward.judge.url={server.url}/v1", "reward.judge.model=m"]
        result = evaluate(request(server, files, tmp_path / "out", overrides=(*PLAIN, *judge), **more))
        prompts = [each["messages"][0]["content"] for each in server.requests if "messages" in each]
    assert (result["metric"], result["accuracy"]) == ("judge", 0.5)
    assert ARPO_PROMPTS["arpo_no_tools"] in prompts
    assert [message["role"] for message in judged[0]] == ["user"]


def test_released_wording_is_read_as_the_authors_do() -> None:
    question = released_question("q?", "Paris", "paris")
    replies = {
        "Correct": CORRECT,
        "Incorrect.": INCORRECT,
        "It is not correct": INCORRECT,
        "maybe": INCORRECT,
        " ": None,
    }
    assert {reply: read_verdict(reply, question) for reply in replies} == replies


def test_judge_for_all_needs_a_judge(files: Path, tmp_path: Path) -> None:
    with served(ChatServer(lambda _messages: "x")) as server, pytest.raises(UserError, match="--judge-all needs"):
        evaluate(request(server, files, tmp_path / "out", judge_all=True))


def test_benchmark_of_facts_is_refused_without_search(files: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "hotpotqa.jsonl", [{"question": "Capital of France?", "answer": ["Paris"]}])
    asked = {"suite": "hotpotqa", "data": tmp_path}
    with served(ChatServer(lambda _messages: "<answer>\\boxed{Paris}</answer>")) as server:
        with pytest.raises(UserError, match=r"hotpotqa: the search tool has nothing to search: .*sandbox.file=FILE"):
            evaluate(request(server, files, tmp_path / "out", tools=Tools.PROMPT, **asked))
        with pytest.raises(UserError, match=r"hotpotqa: the search tool has nothing to search"):
            describe(request(server, files, tmp_path / "out", tools=Tools.PROMPT, **asked))  # --dry-run
        without = ("rollout.tools=[python]", *PLAIN)
        with pytest.raises(
            UserError, match=r"hotpotqa needs the search tool: set rollout.tools=\[search, python\], or"
        ):
            describe(request(server, files, tmp_path / "out", tools=Tools.PROMPT, overrides=without, **asked))
        running = ("sandbox.urls=[http://n9:8710]", *PLAIN)  # asked for their tools when they are used
        describe(request(server, files, tmp_path / "out", tools=Tools.PROMPT, overrides=running, **asked))
        assert not server.asked()
        assert evaluate(request(server, files, tmp_path / "none", tools=Tools.NONE, **asked))["accuracy"] == 1.0


def test_directory_of_the_authors_repository_is_a_source(tmp_path: Path) -> None:
    (tmp_path / "2wiki").mkdir()
    write_lines(tmp_path / "2wiki" / "test.jsonl", [{"question": "q", "answer": ["a"]}])
    assert find(BENCHMARKS["2wiki"], tmp_path) == tmp_path / "2wiki" / "test.jsonl"


def test_run_without_an_export_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("")
    with pytest.raises(UserError, match=f"the run has no export yet; name what `arpo export {tmp_path}` writes"):
        parse_target(str(tmp_path), None)
