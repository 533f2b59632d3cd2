"""The journal survives a torn line, and records are a Parquet file."""

from dataclasses import replace
from pathlib import Path

import polars as pl

from arpo_megatron.evaluation.journal import Attempt, Journal, Outcome, write_records

ONE = Attempt(
    benchmark="aime24",
    question_id="aime24-0",
    attempt=0,
    question="1+1?",
    expected=("2", "two"),
    answer="2",
    score=1.0,
    correct=True,
    format_ok=True,
    outcome=Outcome.RIGHT,
    detail="",
    tool_calls=1,
    tool_errors=0,
    model_tokens=7,
    tool_tokens=3,
    seconds=0.5,
    response="it is\n2",
)


def test_torn_line_loses_one_attempt(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    journal = Journal(path)
    journal.add([ONE, replace(ONE, attempt=1)])
    journal.close()
    whole = path.read_bytes()
    for cut in (1, 40, len(whole) // 2 - 1):
        path.write_bytes(whole[:-cut])
        journal = Journal(path)
        assert [each.attempt for each in journal.attempts()] == [0]
        journal.add([replace(ONE, attempt=1)])
        journal.close()
        assert path.read_bytes() == whole


def test_service_failures_are_repeated(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "attempts.jsonl")
    journal.add([replace(ONE, outcome=Outcome.ENGINE), replace(ONE, attempt=1, outcome=Outcome.PROMPT_TOO_LONG)])
    assert not journal.done("aime24", "aime24-0", 0)
    assert journal.done("aime24", "aime24-0", 1)
    assert not journal.done("aime24", "aime24-0", 2)
    journal.add([ONE])
    assert journal.done("aime24", "aime24-0", 0)
    assert [each.outcome for each in journal.attempts()] == [Outcome.RIGHT, Outcome.PROMPT_TOO_LONG]
    journal.close()


def test_records_have_a_row_per_attempt(tmp_path: Path) -> None:
    path = tmp_path / "records.parquet"
    write_records(path, [ONE, replace(ONE, attempt=1, answer=None, outcome=Outcome.LENGTH)])
    table = pl.read_parquet(path)
    assert table["attempt"].to_list() == [0, 1]
    assert table["outcome"].to_list() == ["right", "length"]
    assert table["answer"].to_list() == ["2", None]
    assert table["expected"].to_list() == [["2", "two"]] * 2
    assert table.schema["score"] == pl.Float64 and table.schema["correct"] == pl.Boolean
    assert table.schema["model_tokens"] == pl.Int64
