"""Replies of a server that are no answers: what an evaluation records, repeats, and refuses."""

import json
from pathlib import Path

import polars as pl
import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.prompts import Tools
from arpo_megatron.evaluation.run import evaluate
from tests.evaluation.asking import PLAIN, request, right
from tests.evaluation.chat_server import ChatServer, served

NO_COMPLETIONS = [b"<html>please log in</html>", b"[1, 2]", b'{"choices": [{"message": null}]}']


@pytest.mark.parametrize("body", NO_COMPLETIONS)
def test_reply_without_completion_fails_its_attempt_or_the_first_request(
    files: Path, tmp_path: Path, body: bytes
) -> None:
    def odd(messages: list[dict[str, str]]) -> bytes | None:
        return body if "1 plus 1?" in messages[-1]["content"] else None

    with served(ChatServer(right, body=odd)) as server:
        found = evaluate(request(server, files, tmp_path / "out"))
        assert found["outcomes"] == {"engine": 1, "right": 5}
        server.body = lambda _messages: body
        with pytest.raises(UserError, match="does not speak OpenAI's chat format") as caught:
            evaluate(request(server, files, tmp_path / "other"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [10**30, 1.5, None])
def test_invalid_token_count_is_recorded_as_zero(files: Path, tmp_path: Path, count: object) -> None:
    message = {"content": "<answer>\\boxed{2}</answer>"}
    usage = {"prompt_tokens": 5, "completion_tokens": count}
    body = json.dumps({"choices": [{"finish_reason": "stop", "message": message}], "usage": usage}).encode()
    with served(ChatServer(right, body=lambda _messages: body)) as server:
        found = evaluate(request(server, files, tmp_path / "out"))
    assert found["outcomes"] == {"right": 1, "wrong": 5}
    assert pl.read_parquet(tmp_path / "out" / "records.parquet")["model_tokens"].to_list() == [0] * 6


def test_lone_surrogates_are_replaced_everywhere(files: Path, tmp_path: Path) -> None:
    half = "\ud800"

    def script(messages: list[dict[str, str]]) -> str:
        if "1 plus" in messages[-1]["content"]:
            return f"<answer>\\boxed{{{half}2}}</answer>"
        if len(messages) == 2:
            return "<python>print(chr(0xd800))</python>"
        return "<answer>\\boxed{4}</answer>"

    def refused(messages: list[dict[str, str]]) -> int:
        return 400 if "3 plus" in messages[-1]["content"] else 0

    with served(ChatServer(script, fail=refused, error_body=f"no {half}")) as server:
        evaluate(request(server, files, tmp_path / "out", tools=Tools.PROMPT, tasks=3))
    rows = pl.read_parquet(tmp_path / "out" / "records.parquet")
    assert rows["answer"].to_list() == ["\ufffd2", "4", None]
    assert rows["outcome"].to_list() == ["wrong", "right", "refused"]
    assert "\ufffd" in rows["detail"][2]


def test_server_error_is_not_reported_as_refusal(files: Path, tmp_path: Path) -> None:
    with (
        served(ChatServer(right, fail=lambda _messages: 500)) as server,
        pytest.raises(UserError, match=r"is up but does not answer: .*status 500") as caught,
    ):
        evaluate(request(server, files, tmp_path / "out"))
    assert "accept" not in str(caught.value)


@pytest.mark.parametrize("status", [401, 404])
def test_rejected_key_ends_the_evaluation_and_the_rest_resumes(files: Path, tmp_path: Path, status: int) -> None:
    def ended(messages: list[dict[str, str]]) -> int:
        return status if "4 plus 4?" in messages[-1]["content"] else 0

    overrides = (*PLAIN, "engine.max_running_requests=1")
    with served(ChatServer(right, fail=ended)) as server:
        with pytest.raises(UserError, match=rf"answers {status} for 'scripted'.*\$OPENAI_API_KEY") as caught:
            evaluate(request(server, files, tmp_path / "out", overrides=overrides))
        assert "\n" not in str(caught.value)
        server.fail, before = lambda _messages: 0, len(server.asked())
        assert evaluate(request(server, files, tmp_path / "out", overrides=overrides))["outcomes"] == {"right": 6}
        assert server.asked()[before:] == [f"What is {n} plus {n}?" for n in (4, 5, 6)]


@pytest.mark.parametrize(("status", "outcome"), [(408, "engine"), (413, "refused")])
def test_status_decides_between_failure_and_refusal(files: Path, tmp_path: Path, status: int, outcome: str) -> None:
    def trouble(messages: list[dict[str, str]]) -> int:
        return status if "1 plus 1?" in messages[-1]["content"] else 0

    with served(ChatServer(right, fail=trouble)) as server:
        assert evaluate(request(server, files, tmp_path / "out"))["outcomes"] == {outcome: 1, "right": 5}
