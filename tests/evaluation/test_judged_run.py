"""`arpo eval` with a model that judges the answers: a judge that is down, slow, or rejects the key."""

import itertools
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.report import read_summary
from arpo_megatron.evaluation.run import EvalRequest, evaluate
from tests.evaluation.asking import PLAIN, request
from tests.evaluation.chat_server import ChatServer, served

JUDGE = ["reward.judge.url=http://127.0.0.1:9/v1", "reward.judge.model=absent", "reward.judge.retries=0"]


def test_interrupt_ends_an_evaluation_whose_judge_is_down(files: Path, tmp_path: Path) -> None:
    with served(ChatServer(lambda _messages: "<answer>\\boxed{Lima}</answer>")) as server:
        where = ["--suite", "gaia,xbench", "--tools", "none", "--data", str(files), "--out", str(tmp_path / "out")]
        command = [sys.executable, "-m", "arpo_megatron", "eval", server.url, *PLAIN, *JUDGE, *where]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            assert any("is down" in line and "the evaluation waits for it" in line for line in process.stderr)
            process.send_signal(signal.SIGINT)
            try:
                _, error = process.communicate(timeout=200)
            finally:
                process.kill()  # if it is still running
    assert process.returncode == 130
    assert "Traceback" not in error
    assert "WRONG" not in (tmp_path / "out" / "attempts.jsonl").read_text().upper(), (
        "an answer without a verdict is not wrong"
    )


def verdict(messages: list[dict[str, str]]) -> str:
    """Accept every answer."""
    code = re.findall(r"`VERDICT (\w+): ", messages[-1]["content"])[-1]
    return f"VERDICT {code}: CORRECT"


def test_answers_saved_while_the_judge_is_down_are_only_judged_later(files: Path, tmp_path: Path) -> None:
    out, attempts = tmp_path / "out", 10  # at two questions: more than are scored at once
    with served(ChatServer(lambda _messages: "<answer>\\boxed{Lima}</answer>")) as server:
        where = ["--suite", "gaia,xbench", "--tools", "none", "--data", str(files), "--out", str(out)]
        arguments = [*PLAIN, *JUDGE, "reward.judge.concurrency=4", "--attempts", str(attempts), *where]
        command = [sys.executable, "-m", "arpo_megatron", "eval", server.url, *arguments]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
            journal, give_up = out / "attempts.jsonl", time.monotonic() + 400
            while not journal.exists() or journal.read_bytes().count(b"\n") < 2 * attempts:
                assert time.monotonic() < give_up and process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
        before, logged = len(server.requests), list[str]()
        with served(ChatServer(verdict)) as judge:
            address = f"reward.judge.url={judge.url}/v1"
            settings = {"suite": "gaia,xbench", "attempts": attempts, "overrides": (*PLAIN, *JUDGE, address)}
            found = evaluate(request(server, files, out, **settings), logged.append)
        assert len(server.requests) == before
    assert [row["accuracy"] for row in found["benchmarks"].values()] == [1.0, 1.0]
    assert logged[0].startswith("0 attempts to make, 20 to judge; ")
    assert set(pl.read_parquet(out / "records.parquet")["response"]) == {"<answer>\\boxed{Lima}</answer>"}


def test_unjudged_attempt_is_judged_again_without_a_new_answer(files: Path, tmp_path: Path) -> None:
    with served(ChatServer(lambda _messages: "<answer>\\boxed{Lima}</answer>")) as server:
        settings = {"suite": "gaia", "overrides": (*PLAIN, *JUDGE, "reward.judge.when_down=fallback")}
        assert evaluate(request(server, files, tmp_path / "out", **settings))["outcomes"] == {"unjudged": 1}
        before = len(server.requests)
        with served(ChatServer(verdict)) as judge:
            settings["overrides"] = (*PLAIN, *JUDGE, f"reward.judge.url={judge.url}/v1", *settings["overrides"][-1:])
            assert evaluate(request(server, files, tmp_path / "out", **settings))["outcomes"] == {"right": 1}
        assert len(server.requests) == before


def test_judge_concurrency_follows_the_config(files: Path, tmp_path: Path) -> None:
    def script(messages: list[dict[str, str]]) -> str:
        return f"<answer>\\boxed{{{next(numbers)}}}</answer>" if "VERDICT" not in str(messages) else verdict(messages)

    numbers = itertools.count()
    with served(ChatServer(script)) as server, served(ChatServer(script, waits_for=33)) as judge:
        overrides = (*PLAIN, *JUDGE, f"reward.judge.url={judge.url}/v1", "reward.judge.concurrency=40")
        found = evaluate(request(server, files, tmp_path / "out", suite="gaia", attempts=40, overrides=overrides))
    assert found["outcomes"] == {"right": 40}  # with 33 requests at once: one more than the default number of threads


def test_equal_answers_are_one_judge_request(files: Path, tmp_path: Path) -> None:
    with served(ChatServer(verdict, delay_s=0.2)) as judge:
        overrides = (*JUDGE, f"reward.judge.url={judge.url}/v1")
        found = evaluate(
            EvalRequest("oracle", suite="gaia", data=files, out=tmp_path / "out", attempts=10, overrides=overrides)
        )
    assert (found["outcomes"], len(judge.requests)) == ({"right": 10}, 1)


def test_judge_that_rejects_the_key_ends_the_evaluation(files: Path, tmp_path: Path) -> None:
    server, judge = ChatServer(lambda _messages: "<answer>\\boxed{Lima}</answer>"), ChatServer(verdict)
    judge.fail = lambda _messages: 401
    with served(server), served(judge), pytest.raises(UserError, match="answers 401 for 'absent'"):
        overrides = (*PLAIN, *JUDGE, f"reward.judge.url={judge.url}/v1")
        evaluate(request(server, files, tmp_path / "out", suite="gaia", attempts=3, overrides=overrides))


def test_unjudged_attempts_are_in_the_notes(files: Path, tmp_path: Path) -> None:
    with served(ChatServer(lambda _messages: "<answer>\\boxed{Lima}</answer>")) as server:
        overrides = (*PLAIN, *JUDGE, "reward.judge.when_down=fallback")
        found = evaluate(request(server, files, tmp_path / "out", suite="gaia", overrides=overrides))
    assert found["outcomes"] == {"unjudged": 1}
    notes = read_summary(tmp_path / "out").notes
    assert any("1 questions had none because the judge was down" in note for note in notes)
    assert any("1 of 1 attempts failed because of a service (unjudged 1)" in note for note in notes)
