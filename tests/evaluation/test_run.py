"""`arpo eval` from end to end, with oracles and a scripted server."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation import run
from arpo_megatron.evaluation.agents.base import PendingQuestion
from arpo_megatron.evaluation.journal import TRANSIENT, Outcome
from arpo_megatron.evaluation.notes import failure_warnings
from arpo_megatron.evaluation.prompts import Tools, messages
from arpo_megatron.evaluation.questions import Question
from arpo_megatron.evaluation.report import read_summary, write_report
from arpo_megatron.evaluation.response import NoResponse
from arpo_megatron.evaluation.run import EvalRequest, evaluate
from arpo_megatron.evaluation.scorers import AnswerVerdict, score_response
from arpo_megatron.jobs.prompts import save_definitions
from arpo_megatron.tasks.base import Task
from arpo_megatron.tasks.protocols.tools import ToolDefinition
from tests.evaluation.asking import PLAIN, request, right
from tests.evaluation.chat_server import ChatServer, served

DATA = Path(os.environ.get("ARPO_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data") / "eval"
ALL = "aime24,gsm8k,math,hotpotqa,gaia,xbench"


@pytest.mark.parametrize(("agent", "score"), [("oracle", 1.0), ("wrong", 0.0)])
def test_oracle_scores_one_and_wrong_answers_zero(files: Path, tmp_path: Path, agent: str, score: float) -> None:
    found = evaluate(EvalRequest(agent, suite=ALL, k=3, data=files, out=tmp_path / "out"))
    assert list(found["benchmarks"]) == ALL.split(",")
    for figures in found["benchmarks"].values():
        assert figures["accuracy"] == figures["pass_at_k"] == figures["success"] == score
        assert figures["accuracy_interval"] == (score, score)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no released test sets at {DATA} (set ARPO_DATA to their parent)")
@pytest.mark.parametrize(("agent", "score"), [("oracle", 1.0), ("wrong", 0.0)])
def test_oracle_scores_one_on_released_files(tmp_path: Path, agent: str, score: float) -> None:
    found = evaluate(EvalRequest(agent, suite="reasoning", data=DATA, skip_missing=True, out=tmp_path / "out"))
    assert {name: row["tasks"] for name, row in found["benchmarks"].items()} == {
        "aime24": 30,
        "math500": 500,
        "gsm8k": 1319,
        "hotpotqa": 200,
    }
    assert {row["accuracy"] for row in found["benchmarks"].values()} == {score}


def test_server_requests_have_the_paper_sampling(files: Path, tmp_path: Path) -> None:
    with served(ChatServer(right)) as server:
        found = evaluate(request(server, files, tmp_path / "out", k=2, overrides=()))
    assert (found["model"], found["tasks"], found["accuracy"]) == ("scripted", 6, 1.0)
    asked = server.requests[-1]
    assert (asked["temperature"], asked["top_p"]) == (0.6, 0.95)
    assert (asked["top_k"], asked["repetition_penalty"]) == (20, 1.1)
    assert Counter(server.asked()) == {f"What is {n} plus {n}?": 2 for n in range(1, 7)}
    seeds = [request["seed"] for request in server.requests[1:]]
    assert len(set(seeds)) == len(seeds)


def test_tag_without_tools_is_plain_text(files: Path, tmp_path: Path) -> None:
    text = "I would run <python>1+1</python>. So the answer is \\boxed{2}."
    with served(ChatServer(lambda _messages: text)) as server:
        found = evaluate(request(server, files, tmp_path / "out", tasks=1))
    assert found["outcomes"] == {"right": 1}
    assert pl.read_parquet(tmp_path / "out" / "records.parquet")["response"].to_list() == [text]


def test_prompted_model_uses_real_tools(files: Path, tmp_path: Path) -> None:
    def script(messages: list[dict[str, str]]) -> str:
        if len(messages) == 2:
            return "<think>t</think><python>print(21 * 2)</python> I made this up: 7"
        return f"<think>t</think><answer>\\boxed{{{re.findall(r'[0-9]+', messages[-1]['content'])[-1]}}}</answer>"

    with served(ChatServer(script)) as server:
        found = evaluate(request(server, files, tmp_path / "out", tools=Tools.PROMPT, tasks=2))
    rows = pl.read_parquet(Path(found["out"]) / "records.parquet")
    assert rows["answer"].to_list() == ["42", "42"]
    assert rows["tool_calls"].to_list() == [1, 1]
    assert rows["tool_errors"].to_list() == [0, 0]
    assert (rows["tool_tokens"] > 0).all()
    assert "I made this up" not in rows["response"][0]
    assert "</python> <result>\n42\n</result><think>" in rows["response"][0]
    last = server.requests[-1]["messages"]
    assert [message["role"] for message in last] == ["system", "user", "assistant", "user"]
    assert last[2]["content"].endswith("</python>") and last[3]["content"] == "<result>\n42\n</result>"


@pytest.mark.parametrize("tools", [Tools.PROMPT, Tools.TRAINED])
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.tools=[python, browse]"], "You can call these tools"),
        (["rollout.system_prompt=arpo_python"], "python interpreter tool"),
    ],
)
def test_model_behind_a_url_is_told_the_tools_of_the_job(
    files: Path, tmp_path: Path, tools: Tools, overrides: list[str], told: str
) -> None:
    asked = EvalRequest("http://host", "aime24", model="m", tools=tools, data=files, out=tmp_path, overrides=overrides)
    evaluation = run._resolve(asked, lambda _line: None)
    save_definitions(evaluation.out, [ToolDefinition("browse", "url", "Read a page.")])
    task = Task("1", messages("What is 1 plus 1?", tools, None), "2", "math", "")
    (prompted,) = run._with_tools([PendingQuestion(Question("aime24", "1", "", ("2",)), task, (0,))], evaluation)
    system, user = (message["content"] for message in prompted.task.messages)
    assert told in system and "<search>" not in system
    assert ("<browse>url</browse>: Read a page." in system) == ("tools" in overrides[0])
    assert user == "What is 1 plus 1?"


def test_system_prompt_that_is_no_text_is_one_line(files: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(b"\xff\xfe")
    asked = EvalRequest("http://host", "aime24", model="m", data=files, out=tmp_path / "out", system_prompt=prompt)
    with pytest.raises(UserError, match=r"^--system-prompt .*prompt\.txt: not UTF-8 text$"):
        evaluate(asked)


def test_failures_count_by_outcome_and_server_failures_are_repeated(files: Path, tmp_path: Path) -> None:
    def trouble(messages: list[dict[str, str]]) -> int:
        asked = messages[-1]["content"]
        return 503 if "1 plus 1?" in asked else 400 if "2 plus 2?" in asked else 0

    def script(messages: list[dict[str, str]]) -> str:
        asked = messages[-1]["content"]
        return "hm " * 50 if "3 plus" in asked else "no idea" if "4 plus" in asked else right(messages)

    settings = {"overrides": (*PLAIN, "rollout.max_response_tokens=20")}
    with served(ChatServer(script, fail=trouble)) as server:
        first = evaluate(request(server, files, tmp_path / "out", **settings))
        assert first["outcomes"] == {"engine": 1, "refused": 1, "length": 1, "no_answer": 1, "right": 2}
        assert (first["not_answered"], first["accuracy"]) == (2, pytest.approx(2 / 6))
        server.fail = lambda _messages: 0
        before = len(server.asked())
        again = evaluate(request(server, files, tmp_path / "out", **settings))
    assert again["outcomes"] == {"refused": 1, "length": 1, "no_answer": 1, "right": 3}
    assert server.asked()[before:] == ["What is 1 plus 1?"]


@pytest.mark.parametrize(
    ("parameter", "tools"),
    [("seed", Tools.NONE), ("top_k", Tools.NONE), ("continue_final_message", Tools.TRAINED)],
)
def test_unsupported_parameter_is_one_error_at_the_start(
    files: Path, tmp_path: Path, parameter: str, tools: Tools
) -> None:
    with (
        served(ChatServer(right, unknown=parameter)) as server,
        pytest.raises(UserError, match=rf"does not accept the requests for scripted: .*{parameter}") as caught,
    ):
        evaluate(request(server, files, tmp_path / "out", tools=tools, overrides=("engine.retry_for_s=0.1",)))
    hint = "use evaluation.top_k=0 evaluation.repetition_penalty=1.0 and --tools prompt or none"
    assert (hint in str(caught.value)) == (parameter != "seed")
    assert "\n" not in str(caught.value)
    assert not server.asked()


def test_prompted_model_needs_no_continued_message(files: Path, tmp_path: Path) -> None:
    with served(ChatServer(right, unknown="continue_final_message")) as server:
        found = evaluate(request(server, files, tmp_path / "out", tools=Tools.PROMPT))
    assert found["accuracy"] == 1.0


def test_refused_attempts_are_a_warning(files: Path, tmp_path: Path) -> None:
    def too_long(messages: list[dict[str, str]]) -> int:
        return 0 if "1+1=" in messages[-1]["content"] else 400

    logged = list[str]()
    with served(ChatServer(right, fail=too_long)) as server:
        evaluate(request(server, files, tmp_path / "out"), logged.append)
    assert logged[-1].startswith("warning: 6 of 6 attempts were refused by the server and count as wrong")
    assert "status 400 was wanted" in logged[-1]
    assert logged[-1].removeprefix("warning: ") in read_summary(tmp_path / "out").notes


def test_slow_server_is_logged_and_retried(files: Path, tmp_path: Path) -> None:
    failures, logged = iter([503, 503]), list[str]()
    with served(ChatServer(right, fail=lambda _messages: next(failures, 0))) as server:
        overrides = (*PLAIN, "engine.retry_for_s=30")
        found = evaluate(request(server, files, tmp_path / "out", overrides=overrides), logged.append)
    assert found["accuracy"] == 1.0
    (line,) = (line for line in logged if "no answer from" in line)
    assert "503" in line and "engine.retry_for_s=30" in line


def test_missing_attempts_are_a_warning_and_marked_in_tables(files: Path, tmp_path: Path) -> None:
    def trouble(messages: list[dict[str, str]]) -> int:
        return 0 if "6 plus" in messages[-1]["content"] or "1+1" in messages[-1]["content"] else 503

    logged = list[str]()
    with served(ChatServer(right, fail=trouble)) as server:
        evaluate(request(server, files, tmp_path / "out"), logged.append)
        assert "5 of 6 attempts" in logged[-1] and "engine 5" in logged[-1] and "the same command" in logged[-1]
        text = (tmp_path / "out" / "report.md").read_text()
        assert "16.7 [" in text and "]*" in text and "* more than 1% of" in text
        server.fail = lambda _messages: 0
        logged.clear()
        evaluate(request(server, files, tmp_path / "out"), logged.append)
    assert not any("warning" in line for line in logged)
    assert "]*" not in (tmp_path / "out" / "report.md").read_text()


def test_missing_training_data_is_an_error_before_the_first_request(files: Path, tmp_path: Path) -> None:
    with served(ChatServer(right)) as server, pytest.raises(UserError, match=r"^--train-data /nonexist: no such file$"):
        evaluate(request(server, files, tmp_path / "out", train_data=Path("/nonexist")))
    assert not server.requests


def test_questions_in_training_data_are_counted(files: Path, tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text("".join((files / "aime24.jsonl").read_text().splitlines(keepends=True)[:2]) + "[]\n")
    found = evaluate(EvalRequest("oracle", suite="aime24", data=files, out=tmp_path / "out", train_data=train))
    assert found["in_training_data"] == 2
    assert "1 of 3 rows" in (tmp_path / "out" / "report.md").read_text()


def test_concurrent_requests_have_a_limit(files: Path, tmp_path: Path) -> None:
    with served(ChatServer(right, delay_s=0.1, holds_after=1)) as server:  # after the first request, which is a probe

        def release() -> None:
            give_up = time.monotonic() + 60
            while server.most_at_once < 3 and time.monotonic() < give_up:
                time.sleep(0.02)
            time.sleep(0.1)  # a fourth would be there by now
            server.holds_after = float("inf")

        threading.Thread(target=release).start()
        evaluate(request(server, files, tmp_path / "out", overrides=(*PLAIN, "engine.max_running_requests=3")))
    assert server.most_at_once == 3


def test_another_evaluation_needs_another_directory(files: Path, tmp_path: Path) -> None:
    evaluate(EvalRequest("oracle", suite="aime24", data=files, out=tmp_path / "out"))
    with pytest.raises(UserError, match=r"another tasks \(None, not 2\); name another directory"):
        evaluate(EvalRequest("oracle", suite="aime24", data=files, out=tmp_path / "out", tasks=2))
    with pytest.raises(
        UserError, match=r"another config \(evaluation.temperature 0.6, not 0.5, seed \d+, not 7\); name"
    ):
        overrides = ("evaluation.temperature=0.5", "seed=7")
        evaluate(EvalRequest("oracle", suite="aime24", data=files, out=tmp_path / "out", overrides=overrides))
    with pytest.raises(UserError, match="other files"):
        evaluate(EvalRequest("oracle", suite="aime24", data=files, out=tmp_path))


def test_default_directory_is_numbered(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    places = [
        evaluate(EvalRequest("oracle", suite="aime24", data=files, tasks=tasks))["out"] for tasks in (None, 2, None)
    ]
    assert places[0] == places[2] == "runs/evaluation/oracle/aime24-trained"
    assert places[1] == places[0] + "-2"


def test_killed_evaluation_resumes(files: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with served(ChatServer(right, holds_after=9)) as server:  # killed before the last answer
        overrides = [*PLAIN, "engine.max_running_requests=2"]
        where = ["--suite", "aime24", "--tools", "none", "--data", str(files), "--out", str(out), "--k", "2"]
        command = [sys.executable, "-m", "arpo_megatron", "eval", server.url, *overrides, *where]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
            journal, give_up = out / "attempts.jsonl", time.monotonic() + 400
            while not journal.exists() or journal.read_bytes().count(b"\n") < 4:
                assert time.monotonic() < give_up and process.poll() is None
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
        kept = [json.loads(line) for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        assert 4 <= len(kept) < 12
        server.holds_after = float("inf")
        before = len(server.asked())
        found = evaluate(request(server, files, out, k=2, overrides=tuple(overrides)))
        assert len(server.asked()) - before == 12 - len(kept)
    assert (found["tasks"], found["attempts"], found["accuracy"]) == (6, 2, 1.0)
    rows = pl.read_parquet(out / "records.parquet")
    assert rows.select("question_id", "attempt").n_unique() == len(rows) == 12
    assert {row["seconds"] for row in kept} <= set(rows["seconds"].to_list())


@pytest.mark.parametrize("outcome", sorted(TRANSIENT))
def test_service_failures_are_a_warning(outcome: Outcome) -> None:
    attempt = score_response(
        Question("aime24", "1", "What?", ("2",)),
        0,
        NoResponse(outcome, "it is down"),
        lambda *_: AnswerVerdict(None, 0.0, False, True),
    )
    (line,) = failure_warnings([attempt])
    assert line.startswith(f"1 of 1 attempts failed because of a service ({outcome.value} 1)")
    assert line.endswith("run the same command again to repeat or judge them")


def test_table_has_published_and_measured_rows(files: Path, tmp_path: Path) -> None:
    found = evaluate(EvalRequest("oracle", suite=ALL, data=files, out=tmp_path / "out"))
    measured = read_summary(Path(found["out"]))
    text = write_report(tmp_path, [measured]).read_text()
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert any(
        re.search(r"Qwen2.5-7B +\| ARPO +\| published \(arXiv 2507.19849, table 1.*\).* 92.2 .* 58.3 ", row)
        for row in rows
    )
    assert any(re.search(r"oracle +\| trained +\| measured .*\| 100.0 \[100.0, 100.0\]", row) for row in rows)
    for row in rows:
        assert "published" not in row or "measured" not in row
    assert "no judge" in text and "gaia: 1 rows left out" in text
    with pytest.raises(UserError, match="contains no finished evaluation"):
        read_summary(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target": "nowhere"}, "neither a run directory"),
        ({"target": "oracle", "suite": None}, "--suite is missing"),
        ({"target": "oracle", "suite": "held_out"}, "not a run directory with held-out tasks"),
        ({"target": "oracle", "k": 3, "attempts": 2}, "--attempts 2 is fewer than --k 3"),
        ({"target": "oracle", "overrides": ("evaluation.temprature=0",)}, "temperature"),
        ({"target": "http://127.0.0.1:9"}, r"^cannot connect to http://127.0.0.1:9 \(.*\): is the server up\?$"),
        (
            {"target": "http://127.0.0.1:9", "model": "m", "tools": Tools.NONE},
            r"^cannot connect to http://127.0.0.1:9",
        ),
        (
            {"target": "http://127.0.0.1:9", "model": "m", "overrides": ("rollout.tools=[python,browse]",)},
            r"^rollout\.tools: the tool service does not offer 'browse'; it offers python$",
        ),
    ],
)
def test_user_error_is_one_line(files: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        evaluate(EvalRequest(**({"suite": "aime24", "data": files, "out": tmp_path / "out"} | fields)))
    assert "\n" not in str(caught.value)
