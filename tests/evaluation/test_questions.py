"""Readers of released files, and the error for a missing one."""

import csv
import os
from pathlib import Path

import pytest

from arpo_megatron.errors import UserError
from arpo_megatron.evaluation.benchmarks import BENCHMARKS, SUITES, select_benchmarks
from arpo_megatron.evaluation.questions import Question, find, read, read_all

DATA = Path(os.environ.get("ARPO_DATA") or Path(__file__).resolve().parents[3] / "shared" / "data") / "eval"


def first(files: Path, name: str) -> Question:
    path = find(BENCHMARKS[name], files)
    assert path is not None
    return read(BENCHMARKS[name], path).questions[0]


def test_paper_has_thirteen_benchmarks_in_two_suites() -> None:
    of_paper = {name for suite in ("reasoning", "deepsearch") for name in SUITES[suite]}
    assert len(of_paper) == 13 and of_paper <= set(BENCHMARKS)
    assert all(each.licence and each.source for each in BENCHMARKS.values())


@pytest.mark.parametrize(
    ("name", "text", "answers"),
    [
        ("aime24", "What is 1 plus 1?", ("002",)),
        ("gsm8k", "Ann has 3 bags of 400 nuts. How many nuts?", ("1,200",)),
        ("math", "Solve $x^2=4$ for $x>0$, halved.", ("\\frac{2}{2}",)),
        ("hotpotqa", "Who wrote it?", ("Jane Austen", "Austen")),
        ("gaia", "Which city?", ("Lima",)),
        ("xbench", "哪座山更高?", ("珠峰",)),
    ],
)
def test_each_file_format_is_read(files: Path, name: str, text: str, answers: tuple[str, ...]) -> None:
    assert first(files, name) == Question(name, f"{name}-0", text, answers)


@pytest.mark.parametrize("mark", ["\u2028", "\x85", "\x0c", "\n", "\r\n"])
def test_csv_row_may_contain_line_separators(tmp_path: Path, mark: str) -> None:
    path = tmp_path / "bamboogle.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerows([("question", "answer"), (f"Who{mark}wrote it?", "Ada"), ("When?", f"in{mark}1843")])
    found = read(BENCHMARKS["bamboogle"], path)
    assert [(each.text, each.answers) for each in found.questions] == [
        (f"Who{mark}wrote it?", ("Ada",)),
        ("When?", (f"in{mark}1843",)),
    ]


def test_invalid_csv_is_a_one_line_error(tmp_path: Path) -> None:
    path = tmp_path / "bamboogle.csv"
    path.write_text("question,answer\n" + "x" * 200_000 + ",y\n")
    with pytest.raises(UserError, match=r"bamboogle.csv, line 2: not CSV: field larger") as caught:
        read(BENCHMARKS["bamboogle"], path)
    assert "\n" not in str(caught.value)


def test_unusable_rows_are_listed(files: Path) -> None:
    path = find(BENCHMARKS["gaia"], files)
    assert path is not None
    assert read(BENCHMARKS["gaia"], path).left_out == ((1, "it needs its file; only text questions are supported"),)


def test_missing_file_error_has_the_source(files: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_all(select_benchmarks("aime24,aime25,hle"), files, skip_missing=False)
    line = str(caught.value)
    assert "\n" not in line
    for text in ("aime25", "huggingface.co/datasets/math-ai/aime25", "missing too: hle", "--skip-missing"):
        assert text in line
    found, missing = read_all(select_benchmarks("aime24,aime25,hle"), files, skip_missing=True)
    assert [each.benchmark.name for each in found] == ["aime24"]
    assert [each.name for each in missing] == ["aime25", "hle"]


def test_skip_missing_needs_one_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--data DIR"):
        read_all(select_benchmarks("reasoning"), tmp_path, skip_missing=True)


def test_suites_and_names_mix_and_an_unknown_name_is_an_error() -> None:
    assert [each.name for each in select_benchmarks("deepsearch,gaia,aime24")] == [
        "gaia",
        "hle",
        "webwalker",
        "xbench",
        "aime24",
    ]
    with pytest.raises(UserError, match=r"'aime26'.*suites: reasoning, deepsearch"):
        select_benchmarks("aime24,aime26")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"problem": "1+1?", "answer": 2}\n\nnot json\n', r"aime24\.jsonl, line 3: not JSON: Expecting value"),
        (b"{}\n\xff\xfe\n", r"aime24\.jsonl, line 2: not UTF-8"),
        (b"[1]\n", "no question"),
        (b"", "no question"),
    ],
)
def test_unreadable_file_is_a_one_line_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "aime24.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        read(BENCHMARKS["aime24"], path)


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no released test sets at {DATA} (set ARPO_DATA to their parent)")
@pytest.mark.parametrize(("name", "count"), [("aime24", 30), ("math500", 500), ("gsm8k", 1319), ("hotpotqa", 200)])
def test_released_files_are_known_and_complete(name: str, count: int) -> None:
    path = find(BENCHMARKS[name], DATA)
    assert path is not None
    found = read(BENCHMARKS[name], path)
    assert found.known_file
    assert (len(found.questions), found.left_out) == (count, ())
