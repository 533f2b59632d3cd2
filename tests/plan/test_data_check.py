"""`arpo data check` shows what a job would train on."""

import json
from pathlib import Path

import pytest

from arpo_megatron.cli.main import run_command
from arpo_megatron.config import DataConfig
from arpo_megatron.errors import UserError
from arpo_megatron.tasks.files.reader import read_tasks

READER = """
import csv
from dataclasses import dataclass

@dataclass(frozen=True)
class Semicolons:
    def rows(self, path):
        with path.open() as file:
            yield from csv.DictReader(file, delimiter=";")
"""


def test_data_check_refuses_a_second_name_of_the_data(tmp_path: Path) -> None:
    for second in ("data.path=other.parquet", "data.path={a.parquet: 1}", "data.path.a=1", "data={path: b}"):
        with pytest.raises(UserError, match=r"a\.parquet and the override data\.path=\.\.\. name the data twice"):
            run_command(["data", "check", str(tmp_path / "a.parquet"), second])


def test_data_check_shows_prompts_lengths_bad_rows_and_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "q.jsonl"
    rows = [{"question": f"What is {n} + {n}?", "answer": 2 * n} for n in range(40)] + [{"question": "no answer?"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_command(["data", "check", str(path)])
    shown = capsys.readouterr().out
    assert "40 questions (40 math), 1 bad row\n" in shown
    assert f"data.path={path}, line 41: no column" in shown
    assert "no prompt was compared with data.max_prompt_tokens, so a long one counts as usable: give model" in shown
    assert "prompt tokens: median" in shown
    assert "expected tokens of a step: " in shown
    assert shown.count("\n--- q-") == 5
    assert "What is 39 + 39?<|im_end|>" in shown
    assert "no system prompt" in shown
    assert "model.max_length" not in shown
    run_command(["data", "check", str(path), "rollout.system_prompt=arpo", "model.max_length=4200"])
    shown = capsys.readouterr().out
    assert shown.count("wikipedia search tool and python") == 5
    assert "40 prompts with system prompt and tools have more than 104 tokens" in shown
    path.write_text(json.dumps(rows[0]) + "\n" + 7 * '{"question": "no answer?"}\n')
    run_command(["data", "check", str(path)])
    assert "line 6: no column" in (shown := capsys.readouterr().out) and "  and 2 more: --all shows them\n" in shown
    run_command(["data", "check", str(path), "--all"])
    assert "line 8: no column" in (shown := capsys.readouterr().out) and " more" not in shown
    path.write_text('{"text": "x"}\n')
    with pytest.raises(UserError, match=r"none of its 1 rows can be used; the first: no column prompt"):
        run_command(["data", "check", str(path)])


def test_reader_of_a_file_gives_rows(tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text(READER)
    (tmp_path / "q.txt").write_text("question;answer\n1+1?;2\n2+2?;\n")
    data = DataConfig(kind="files", path=tmp_path / "q.txt", reader=f"{tmp_path / 'reader.py'}:Semicolons")
    read = read_tasks(data)
    assert [(task.prompt_text.count("1+1?"), task.ground_truth) for task in read.tasks] == [(1, "2")]
    assert [row.reason for row in read.bad_rows] == ["the answer is missing"]
