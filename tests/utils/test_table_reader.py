"""Files of rows are read in every form, and one that cannot be read is one line that names file and place."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.utils.table_reader import BadRowError, parquet_columns, read_rows

ROWS = [{"question": "Who\u2028wrote\x0c it?", "answer": "Ada"}, {"question": "哪座山?", "answer": "珠峰"}]


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".csv":
            text = "question,answer\r\n" + "".join(f'"{row["question"]}",{row["answer"]}\r\n' for row in rows)
            path.write_text(text, encoding="utf-8-sig", newline="")
        case ".json":
            path.write_text(f"[\n{','.join(lines)}]", encoding="utf-8-sig")
        case _:
            path.write_text("\r\n\r\n".join(lines), encoding="utf-8-sig", newline="")
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv", "a"])
def test_all_formats_give_the_same_rows(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, ROWS)
    assert [(row.number, row.value()) for row in read_rows(path)] == list(enumerate(ROWS))
    assert [row.needed() for row in read_rows(path, content=path.read_bytes())] == ROWS


@pytest.mark.parametrize(("text", "rows"), [('{"a": 1}\n{"a": 2}\n', 2), ('{\n"a": 1}', 1), ("[]", 0)])
def test_json_file_may_hold_lines_or_one_row(tmp_path: Path, text: str, rows: int) -> None:
    path = tmp_path / "a.json"
    path.write_text(text)
    assert [row.value()["a"] for row in read_rows(path)] == list(range(1, rows + 1))


def test_old_line_ends_are_accepted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": 1}\r{"a": 2}\r')
    assert [row.value() for row in read_rows(path)] == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        ("a.parquet", b"no", ": not a readable parquet file"),
        ("a.csv", b"q\n1\n" + b"x" * 200_000, ", line 3: not CSV: field larger"),
        ("a.csv", b"q\nx\n\xff\n", ", line 3: not UTF-8 text at character 1"),
        ("a.json", b'[\n{"a": 1},\n{"a" 2}]', ", line 3: not JSON: Expecting ':' delimiter at column 6"),
        ("a.json", b"[" * 10**5, ": not JSON: maximum recursion"),
        ("a.json", b"[\n\xe2\x82]", ", line 2: not UTF-8 text at character 1"),
        ("a.jsonl", b"{}\n" * 9000 + b'{"a": "b\xff"}\n', ", line 9001: not UTF-8 text at character 9"),
        (".", None, ": Is a directory"),
        ("none.jsonl", None, ": no such file"),
        ("none.parquet", None, ": no such file"),
    ],
)
def test_unreadable_file_is_refused_with_its_line(tmp_path: Path, name: str, content: bytes | None, place: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        list(read_rows(path, "--given="))
    assert str(caught.value).startswith(f"--given={path}{place}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("broken", ["nonsense", "[" * 10**5, "1" * 5000])
def test_broken_line_is_a_row(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"a": 1}}\n\n{broken}\n{{"a": 2}}\n')
    first, bad, last = read_rows(path, "--given=")
    assert (first.value(), last.value(), bad.number) == ({"a": 1}, {"a": 2}, 1)
    with pytest.raises(BadRowError, match=r"^not JSON: "):
        bad.value()
    with pytest.raises(UserError, match=r"^--given=\S*a\.jsonl, line 3: not JSON: "):
        bad.needed()


def test_refused_row_is_named(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text('q\n"two\nlines"\nx\n')
    places = {write(tmp_path / "a.json", ROWS): "row 1 (from 0)", write(tmp_path / "a.jsonl", ROWS): "line 3"}
    for path, place in {**places, write(tmp_path / "a.parquet", ROWS): "row 1 (from 0)", table: "line 4"}.items():
        _, second = read_rows(path)
        assert str(second.refused("no answer")) == f"{path}, {place}: no answer"


def test_missing_columns_are_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "table.parquet", ROWS)

    def found(*columns: str) -> list[Any]:
        return [row.value() for row in read_rows(path, columns=columns)]

    assert parquet_columns(path) == ["question", "answer"]
    assert found("answer", "other") == [{"answer": row["answer"]} for row in ROWS]
    assert found("other") == ROWS
    with pytest.raises(UserError, match=r"^--given=\S*: not a readable parquet file"):
        (tmp_path / "text").write_text("no")
        parquet_columns(tmp_path / "text", "--given=")
