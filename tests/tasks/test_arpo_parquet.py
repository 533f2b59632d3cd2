"""The released parquet files: read as published, with known defects fixed and bad rows counted."""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.models.tiny import train_bpe
from arpo_megatron.tasks.arpo_parquet import BadRow, read_parquet, read_texts
from arpo_megatron.tasks.system_prompts import ARPO_PROMPTS

DATA = Path(os.environ.get("ARPO_DATA", Path(__file__).parents[2] / ".." / "shared" / "data"))
real_data = pytest.mark.skipif(
    not (DATA / "train_10k.parquet").is_file(), reason="no released ARPO files: set ARPO_DATA to their directory"
)
SYSTEM = {"role": "system", "content": "answer in \x08oxed{}"}


def row(question: str = "1+1?", truth: str | None = "2", ability: str | None = "math") -> dict[str, Any]:
    return {
        "data_source": "mix",
        "prompt": [SYSTEM, {"role": "user", "content": question}],
        "ability": ability,
        "reward_model": {"ground_truth": truth, "style": "rule"},
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_parquet_reader_repairs_the_backspace_and_writes_chatml(tmp_path: Path) -> None:
    (task,) = read_parquet(write(tmp_path / "small.parquet", [row()])).tasks
    assert (task.id, task.ground_truth, task.source) == ("small-0", "2", "math")
    assert task.messages[0]["content"] == "answer in \\boxed{}"
    assert task.prompt_text == (
        "<|im_start|>system\nanswer in \\boxed{}<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_parquet_reader_uses_the_chat_template(tmp_path: Path) -> None:
    tokenizer = train_bpe(["text"], 288)
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "
    (task,) = read_parquet(write(tmp_path / "small.parquet", [row()]), tokenizer=tokenizer).tasks
    assert task.prompt_text == "[system] answer in \\boxed{}\n[user] 1+1?\n[assistant] "


def test_parquet_reader_names_bad_rows_and_keeps_the_rest(tmp_path: Path) -> None:
    rows = [row(), row(question=" \n"), row(truth=""), row(truth=None), row("long " * 500), row(ability="qa")]
    tokenizer = train_bpe(["text"], 288)
    read = read_parquet(write(tmp_path / "bad.parquet", rows), tokenizer=tokenizer, max_prompt_tokens=400)
    assert [task.id for task in read.tasks] == ["bad-0", "bad-5"]
    assert [task.source for task in read.tasks] == ["math", "qa"]
    assert [bad.row for bad in read.bad_rows] == [1, 2, 3, 4]
    assert read.bad_rows[0] == BadRow(1, "the question is empty")
    assert read.bad_rows[1].reason == read.bad_rows[2].reason == "the answer is missing"
    assert "more than data.max_prompt_tokens=400" in read.bad_rows[3].reason


def test_malformed_messages_are_bad_rows(tmp_path: Path) -> None:
    good, empty, silent, model = row(), row(), row(), row()
    empty["prompt"] = []
    silent["prompt"] = [{"role": "user", "content": None}]
    model["prompt"] = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    read = read_parquet(write(tmp_path / "odd.parquet", [good, empty, silent, model]))
    assert len(read.tasks) == 1
    reasons = [bad.reason for bad in read.bad_rows]
    assert reasons == ["the question is empty", "a message without role or content", "the question is empty"]


def test_kind_of_question_comes_from_ability_or_source(tmp_path: Path) -> None:
    unknown, from_source = row(ability=None), row(ability=None)
    unknown["data_source"] = None
    from_source["data_source"] = "MATH500"
    read = read_parquet(write(tmp_path / "kinds.parquet", [row(ability="qa"), from_source, unknown]))
    assert [task.source for task in read.tasks] == ["qa", "math"]
    assert [bad.row for bad in read.bad_rows] == [2]


def test_unusable_files_are_one_line_user_errors(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    write(tmp_path / "columns.parquet", [{"question": "1+1?", "answer": "2"}])
    write(tmp_path / "empty.parquet", [row(truth="")])
    expected = {
        "missing": "no such file",
        "text": "not a readable parquet file",
        "columns": "columns missing: prompt, reward_model, ability; it has: question, answer",
        "empty": "none of its 1 rows can be used; the first: the answer is missing",
    }
    for name, message in expected.items():
        with pytest.raises(UserError, match=message) as caught:
            read_parquet(tmp_path / f"{name}.parquet")
        assert "\n" not in str(caught.value)
        assert f"{name}.parquet" in str(caught.value)


@real_data
def test_released_training_set_is_read_completely() -> None:
    read = read_parquet(DATA / "train_10k.parquet")
    assert len(read.tasks) + len(read.bad_rows) == 10_000
    assert read.bad_rows == (BadRow(5274, "the answer is missing"),)
    assert {task.source for task in read.tasks} == {"math", "qa"}
    assert len({task.id for task in read.tasks}) == len(read.tasks)
    assert {task.messages[0]["content"] for task in read.tasks} == {ARPO_PROMPTS["arpo"]}


@real_data
def test_tokenizer_trained_on_the_released_questions_bounds_prompts() -> None:
    valid = DATA / "valid.parquet"
    tokenizer = train_bpe(read_texts(valid), 1024)
    assert len(read_parquet(valid, tokenizer=tokenizer, max_prompt_tokens=1536).tasks) == 180
    short = read_parquet(valid, tokenizer=tokenizer, max_prompt_tokens=500)
    assert len(short.tasks) + len(short.bad_rows) == 180
    for task in short.tasks:
        ids = tokenizer.encode(task.prompt_text, add_special_tokens=False)
        assert len(ids) <= 500
        assert tokenizer.decode(ids) == task.prompt_text
