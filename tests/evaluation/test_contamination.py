"""Evaluation questions are found in training data; common contest phrases alone do not match."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from arpo_megatron.cli.evaluation import app
from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.contamination import find_overlaps, training_questions
from arpo_megatron.evaluation.questions import Question

PHRASE = "where m and n are relatively prime positive integers. Find the sum m + n of both."
LONG = (
    "A train leaves the town of Arad at noon and meets another one that left Brad an hour later, half way between "
    "the two towns; how far apart are they, if "
)


def question(text: str) -> Question:
    return Question("aime24", "aime24-0", text, ("1",))


def test_equal_words_match_without_case_and_punctuation() -> None:
    (found,) = find_overlaps([question("Who wrote *Emma*?")], ["what?", "who  wrote Emma"])
    assert (found.training_row, found.share) == (1, 1.0)


def test_most_of_a_question_inside_another_matches() -> None:
    (found,) = find_overlaps(
        [question(LONG + "both go at 50 km/h?")], ["short", f"Read this. {LONG}both go at 70 km/h?"]
    )
    assert found.training_row == 1
    assert 0.5 <= found.share < 1.0


def test_contest_phrase_alone_does_not_match() -> None:
    asked = question(f"{LONG}the answer is m/n, {PHRASE}")
    assert not find_overlaps([asked], [f"Find the side of the square as m/n, {PHRASE}"])


def test_user_turns_of_conversations_are_questions(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    turns = [{"role": "user", "content": "Who wrote Emma?"}, {"role": "assistant", "content": "Austen"}]
    path.write_text(json.dumps({"messages": turns}) + "\nnot json\n")
    found = training_questions(path, "--train-data ")
    assert found.texts == ["Who wrote Emma?"]
    assert "1 of 2 rows" in found.note and "(row 1): not JSON" in found.note


ROWS = [
    {"question": "Who wrote Emma?", "answer": "Austen"},
    {"problem": "Who wrote Emma?", "solution": "Austen"},
    {"Question": "Who wrote Emma?", "Final answer": "Austen"},
    {"prompt": "Who wrote Emma?", "answer": "Austen"},
    {"prompt": [{"role": "system", "content": "Hi."}, {"role": "user", "content": "Who wrote Emma?"}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "Who wrote Emma?"}]}]},
]


def test_csv_tables_are_training_data(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    path.write_text("question,answer\nWho wrote Emma?,Austen\n,none\n")
    found = training_questions(path, "")
    assert found.texts == ["Who wrote Emma?"]
    assert "(row 1): no question in it; it has question, answer" in found.note


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_questions_are_read_from_every_known_field(tmp_path: Path, row: dict[str, Any], suffix: str) -> None:
    path = tmp_path / f"train.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), path)
    else:
        path.write_text(json.dumps([row] if suffix == "json" else row))
    found = training_questions(path, "")
    assert (found.texts, found.note) == (["Who wrote Emma?"], "")


@pytest.mark.parametrize("rows", [[], [{"instruction": "Who wrote Emma?"}], [{"question": "QUJD", "canary": "k"}]])
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_file_without_questions_is_an_error(tmp_path: Path, rows: list[dict[str, str]], suffix: str) -> None:
    path = tmp_path / f"train.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"no question in its \d rows; expected .*messages.*question") as caught:
        training_questions(path, "--train-data ")
    assert "\n" not in str(caught.value)


def test_decontaminate_finds_a_benchmark_in_itself_and_counts_unread_rows(files: Path, tmp_path: Path) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text((files / "gsm8k.jsonl").read_text() + '{"text": "?"}\n')
    logged = CliRunner().invoke(app, ["decontaminate", str(train), "--suite", "gsm8k", "--data", str(files)])
    assert logged.exit_code == 1
    assert "gsm8k: 1 of 1 questions are in" in logged.stderr
    assert "1 of 2 rows" in logged.stderr and "(row 1): no question in it; it has text" in logged.stderr


def test_short_question_matches_inside_a_text_unless_very_short() -> None:
    asked = question("In what year was Jane Austen born?")
    (found,) = find_overlaps([asked], ["When?", "Question: in what year was Jane Austen born? Think first."])
    assert (found.training_row, found.share) == (1, 1.0)
    assert not find_overlaps([asked], ["In what year was Jane Bennet born?", "In what year was Jane Austen"])
    assert not find_overlaps([question("Compute $2^3$.")], ["Compute $2^3+7$."])
    assert find_overlaps([question("Compute $2^3$.")], ["compute 2^3"])


@pytest.mark.parametrize("name", ["none.parquet", "none.jsonl", "none"])
def test_missing_training_file_is_named_as_given(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"^--train-data .*none\S*: no such file$"):
        training_questions(tmp_path / name, "--train-data ")


def test_unreadable_training_file_is_named_as_given(tmp_path: Path) -> None:
    for name, text in (("a.json", "{"), ("a.parquet", "no"), ("a.csv", ""), ("a.txt", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=rf"^--train-data \S*{name}(, line 1)?: "):
            training_questions(tmp_path / name, "--train-data ")


def test_each_chinese_character_is_a_word() -> None:
    asked = question("请问在AIME2024比赛中获得满分的选手来自哪个城市的学校?")
    (found,) = find_overlaps([asked], ["题目:" + asked.text.removesuffix("的学校?") + ",请说明."])
    assert 0.5 <= found.share < 1.0
    assert not find_overlaps([asked], ["请问在哪个城市的学校能看到AIME2024比赛?"])
