"""Evaluation questions that the training data holds are found; contest phrases alone are not enough."""

import json
from pathlib import Path

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.overlap import overlaps, training_questions
from arpo_megatron.evaluation.questions import Question

PHRASE = "where m and n are relatively prime positive integers. Find the sum m + n of both."
LONG = (
    "A train leaves the town of Arad at noon and meets another one that left Brad an hour later, half way between "
    "the two towns; how far apart are they, if "
)


def question(text: str) -> Question:
    return Question("aime24", "aime24-0", text, ("1",))


def test_equal_words_are_found_whatever_their_case_and_signs() -> None:
    (found,) = overlaps([question("Who wrote *Emma*?")], ["what?", "who  wrote Emma"])
    assert (found.training_row, found.share) == (1, 1.0)


def test_most_of_a_question_inside_another_is_found() -> None:
    (found,) = overlaps([question(LONG + "both go at 50 km/h?")], ["short", f"Read this. {LONG}both go at 70 km/h?"])
    assert found.training_row == 1
    assert 0.5 <= found.share < 1.0


def test_a_phrase_of_contests_is_no_overlap() -> None:
    asked = question(f"{LONG}the answer is m/n, {PHRASE}")
    assert not overlaps([asked], [f"Find the side of the square as m/n, {PHRASE}"])


def test_conversations_are_training_data_too(tmp_path: Path) -> None:
    path = tmp_path / "sft.jsonl"
    turns = [{"role": "user", "content": "Who wrote Emma?"}, {"role": "assistant", "content": "Austen"}]
    path.write_text(json.dumps({"messages": turns}) + "\nnot json\n")
    assert training_questions(path, "--train-data ") == ["Who wrote Emma?"]


@pytest.mark.parametrize("name", ["none.parquet", "none.jsonl", "none"])
def test_a_training_file_that_is_missing_is_named_as_it_was_given(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"^--train-data .*none\S*: no such file$"):
        training_questions(tmp_path / name, "--train-data ")


def test_a_training_file_that_cannot_be_read_is_named_as_it_was_given(tmp_path: Path) -> None:
    for name, text in (("a.json", "{"), ("a.parquet", "no"), ("a.csv", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UserError, match=rf"^--train-data \S*{name}: "):
            training_questions(tmp_path / name, "--train-data ")


def test_in_text_without_spaces_every_character_is_a_word() -> None:
    asked = question("请问在AIME2024比赛中获得满分的选手来自哪个城市的学校?")
    (found,) = overlaps([asked], ["题目:" + asked.text.removesuffix("的学校?") + ",请说明."])
    assert 0.5 <= found.share < 1.0
    assert not overlaps([asked], ["请问在哪个城市的学校能看到AIME2024比赛?"])
