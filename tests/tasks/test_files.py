"""Question files: formats, columns, mixtures, and the released parquet files with their known defects."""

import json
import os
import tracemalloc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from arpo_megatron.config import AlgorithmConfig, DataConfig
from arpo_megatron.errors import UserError
from arpo_megatron.models.tiny import train_bpe
from arpo_megatron.tasks.base import BadRow
from arpo_megatron.tasks.files.mixture import MixedTasks, change_tasks
from arpo_megatron.tasks.files.reader import FileTasks, check_readable, read_tasks, read_texts
from arpo_megatron.tasks.files.rows import Columns
from arpo_megatron.tasks.selectors.base import make_task_selector
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


def read_parquet(path: Path, *, tokenizer: Any = None, max_prompt_tokens: int = 1536) -> FileTasks:
    return read_tasks(DataConfig(kind="files", path=path, max_prompt_tokens=max_prompt_tokens), tokenizer)


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
    assert [task.source for task in read.tasks] == ["qa", "math", "math"]  # the last one by its answer, a number


def test_unusable_files_are_one_line_user_errors(tmp_path: Path) -> None:
    (tmp_path / "text.parquet").write_text("no parquet")
    write(tmp_path / "columns.parquet", [{"text": "1+1?", "label": "2"}])
    write(tmp_path / "empty.parquet", [row(truth="")])
    expected = {
        "missing": "no such file",
        "text": "not a readable parquet file",
        "columns": "no column prompt or .*it has: text, label; set data.columns.question=COLUMN",
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
    tokenizer = train_bpe(read_texts(DataConfig(kind="files", path=valid)), 1024)
    assert len(read_parquet(valid, tokenizer=tokenizer, max_prompt_tokens=1536).tasks) == 180
    short = read_parquet(valid, tokenizer=tokenizer, max_prompt_tokens=500)
    assert len(short.tasks) + len(short.bad_rows) == 180
    for task in short.tasks:
        ids = tokenizer.encode(task.prompt_text, add_special_tokens=False)
        assert len(ids) <= 500
        assert tokenizer.decode(ids) == task.prompt_text


PLAIN = [{"question": "1+1?", "answer": 2}, {"question": "Capital of France?", "answer": ["Paris", "paris"]}]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def saved_dataset(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Write the layout of `datasets.Dataset.save_to_disk`, in two shards."""
    path.mkdir(parents=True)
    shards = [f"data-{number:05d}-of-00002.arrow" for number in range(2)]
    for name, part in zip(shards, (rows[:1], rows[1:]), strict=True):
        table = pa.Table.from_pylist(part)
        with pa.ipc.new_stream(path / name, table.schema) as writer:
            writer.write_table(table)
    (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in shards]}))
    (path / "dataset_info.json").write_text("{}")
    return path


def answers(path: Any, **keys: Any) -> list[tuple[str, str, str]]:
    read = read_tasks(DataConfig(kind="files", path=path, **keys))
    return [(task.messages[-1]["content"], task.ground_truth, task.source) for task in read.tasks]


def test_every_format_gives_the_same_tasks(tmp_path: Path) -> None:
    rows = [{"question": each["question"], "answer": str(each["answer"])} for each in PLAIN]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    repository = tmp_path / "repository"
    write_lines(repository / "data" / "test-00000-of-00001.jsonl", [{"question": "other", "answer": "x"}])
    for number, each in enumerate(rows):
        write_lines(repository / "data" / f"train-{number:05d}-of-00002.jsonl", [each])
    splits = tmp_path / "splits"
    saved_dataset(splits / "train", rows)
    (splits / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    paths = [write(tmp_path / "a.parquet", rows), write_lines(tmp_path / "a.jsonl", rows), tmp_path / "a.json"]
    for path in (*paths, repository, splits, saved_dataset(tmp_path / "saved", rows)):
        assert answers(path) == [("1+1?", "2", "math"), ("Capital of France?", "['Paris', 'paris']", "qa")], path
        assert len({task.id for task in read_tasks(DataConfig(kind="files", path=path)).tasks}) == 2
        check_readable(DataConfig(kind="files", path=path))


def test_directories_that_leave_a_choice_are_refused(tmp_path: Path) -> None:
    for name in ("main", "socratic"):
        write_lines(tmp_path / "two" / name / "train.jsonl", PLAIN)
    write_lines(tmp_path / "held" / "test.jsonl", PLAIN)
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("two", "directories main, socratic"),
        ("held", "data.split to one of: test"),
        ("empty", "no"),
    ):
        with pytest.raises(UserError, match=message):
            answers(tmp_path / name)
    assert len(answers(tmp_path / "two" / "main")) == len(answers(tmp_path / "held", split="test")) == 2


def test_plain_rows_and_mapped_columns(tmp_path: Path) -> None:
    assert answers(write_lines(tmp_path / "plain.jsonl", PLAIN)) == [
        ("1+1?", "2", "math"),
        ("Capital of France?", "Paris", "qa"),
    ]
    odd = write_lines(tmp_path / "odd.jsonl", [{"task": "6*7?", "out": {"value": "42"}, "topic": "geography"}])
    columns = {"question": "task", "answer": "out.value"}
    assert answers(odd, columns=columns) == [("6*7?", "42", "math")]
    assert answers(odd, columns={**columns, "kind": "topic"}) == [("6*7?", "42", "qa")]
    assert answers(odd, columns=columns, verifier="qa") == [("6*7?", "42", "qa")]
    steps = [{"problem": "p", "answer": "1", "hint": "a"}, {"problem": "q", "answer": "2", "work": " b\n"}]
    mapped = {"kind": "files", "path": write_lines(tmp_path / "steps.jsonl", steps)}
    assert [task.hint for task in read_tasks(DataConfig(**mapped)).tasks] == ["a", ""]
    assert [task.hint for task in read_tasks(DataConfig(**mapped, columns={"hint": "work"})).tasks] == ["", "b"]
    worked = [
        {"problem": "p", "solution": "So the answer is $\\boxed{\\frac12}$."},
        {"problem": "q", "answer": "a b\n#### 7"},
        {"problem": "r", "answer": "\\boxed{Paris}"},
        {"problem": "s", "golden_answers": [float("nan"), "Lima"]},
    ]
    found = [answer for _, answer, _ in answers(write_lines(tmp_path / "w.jsonl", worked))]
    assert found == ["\\frac12", "7", "Paris", "Lima"]


def test_bad_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(PLAIN[0]) + '\n\nnot json\n{"question": "q"}\n{"question": "q", "answer": NaN}\n')
    read = read_tasks(DataConfig(kind="files", path=path))
    assert len(read.tasks) == 1
    assert [row.where for row in read.bad_rows] == [f"data.path={path}, line {line}" for line in (3, 4, 5)]
    assert read.bad_rows[2].reason == "the answer is missing"
    assert read.bad_rows[0].reason.startswith("not JSON")
    assert "no column golden_answers or reward_model.ground_truth or answer" in read.bad_rows[1].reason


def test_missing_nested_column_is_named(tmp_path: Path) -> None:
    rows = [
        {"task": {"text": "q"}, "answer": "1"},
        {"task": None, "answer": "1"},
        {"task": {"tex": "q"}, "answer": "1"},
    ]
    path = write_lines(tmp_path / "nested.jsonl", rows)
    read = read_tasks(DataConfig(kind="files", path=path, columns={"question": "task.tex"}))
    assert len(read.tasks) == 1
    assert read.bad_rows[0].reason.startswith("no column task.tex; it has: task, answer; set data.columns.question=")
    assert read.bad_rows[1].reason == "the question is neither text nor a list of messages"


def test_half_a_surrogate_pair_is_a_bad_row(tmp_path: Path) -> None:
    path = tmp_path / "half.jsonl"
    path.write_text(json.dumps(PLAIN[0]) + '\n{"question": "\\ud800", "answer": "1"}\n')
    read = read_tasks(DataConfig(kind="files", path=path))
    assert len(read.tasks) == 1
    assert [row.reason for row in read.bad_rows] == ["half of a surrogate pair, which is no character"]


@pytest.mark.parametrize("body", ["yield {}; raise ValueError('bad byte')", "return None"])
def test_reader_that_fails_is_one_line(tmp_path: Path, body: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(f"import dataclasses\n@dataclasses.dataclass\nclass Own:\n    def rows(self, path): {body}\n")
    with pytest.raises(UserError, match=r"data\.reader Own failed at or after row 0") as caught:
        read_tasks(DataConfig(kind="files", path=path, reader=f"{path}:Own"))
    assert "\n" not in str(caught.value)


def test_unknown_reader_names_the_choices(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "q.jsonl", [{"question": "1+1?", "answer": 2}])
    with pytest.raises(UserError, match=r"^unknown data reader 'nope'; known: auto, FILE\.py:NAME$"):
        read_tasks(DataConfig(kind="files", path=path, reader="nope"))


def test_every_answer_of_a_list_is_right(tmp_path: Path) -> None:
    search_r1: dict[str, Any] = {"golden_answers": ["Paris", "", "City of Paris"], "ability": "fact-reasoning"}
    search_r1 |= {"prompt": row()["prompt"], "reward_model": {"ground_truth": {"target": ["Paris"]}}}
    lists: list[list[Any]] = [[7, 7.0, "7"], ["1912", "in 1912"], []]
    rows = [search_r1, *({"question": "?", "answer": each} for each in lists)]
    read = read_tasks(DataConfig(kind="files", path=write_lines(tmp_path / "q.jsonl", rows)))
    assert [task.answers for task in read.tasks] == [("Paris", "City of Paris"), ("7", "7.0"), ("1912", "in 1912")]
    assert [task.source for task in read.tasks] == ["qa", "math", "qa"]
    assert [bad.reason for bad in read.bad_rows] == ["the answer is missing"]


def test_tasks_on_disk_equal_those_in_memory(tmp_path: Path) -> None:
    rows = [
        {"question": f"{n} + {n}? " + "x" * 50, "answer": [2 * n, f"{2 * n}.0"], "hint": f"{n}"} for n in range(1300)
    ]
    data = DataConfig(kind="files", path=write_lines(tmp_path / "many.jsonl", rows))
    memory, disk = read_tasks(data).tasks, read_tasks(data, limit=20_000).tasks
    assert isinstance(memory, tuple)
    assert not isinstance(disk, tuple)
    assert list(disk) == list(memory)
    assert [disk[n] for n in (0, 511, 512, 1299, -1)] == [memory[n] for n in (0, 511, 512, 1299, -1)]
    train, held_out = FileTasks(disk, ()).split(100)
    assert (list(train), list(held_out)) == (list(memory[:1200]), list(memory[1200:]))
    marked = [change_tasks(tasks, lambda task: replace(task, source="marked")) for tasks in (memory, disk)]
    assert marked[1][700] == marked[0][700] == replace(memory[700], source="marked")
    assert list(marked[1][3:5]) == marked[0][3:5]
    algorithm = AlgorithmConfig()
    drawn = [make_task_selector(algorithm, tasks, seed=1).next_batch(16, {memory[3].id}) for tasks in (memory, disk)]
    assert drawn[0] == drawn[1]


def test_reading_a_large_file_takes_bounded_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for number in range(1500):
            file.write(json.dumps({"question": f"{number} " + "x" * 8000, "answer": number}) + "\n")
    tracemalloc.start()
    tasks = read_tasks(DataConfig(kind="files", path=path), limit=2**19).tasks
    peak = tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes()
    tracemalloc.stop()
    assert len(tasks) == 1500
    assert path.stat().st_size > 12e6
    assert peak < path.stat().st_size


def mixture(tmp_path: Path) -> FileTasks:
    sizes = {"a": 40, "b": 30, "c": 5}
    for name, size in sizes.items():
        rows = [{"question": f"{name}{n}?", "answer": n} for n in range(size)]
        write_lines(tmp_path / f"{name}.jsonl", rows)
    weights = {str(tmp_path / f"{name}.jsonl"): weight for name, weight in (("a", 0.6), ("b", 0.3), ("c", 0.1))}
    return read_tasks(DataConfig(kind="files", path=weights))


def test_tasks_of_files_with_equal_names_have_different_ids(tmp_path: Path) -> None:
    """Else the result of a task would count for another data set, and both would make the same draws."""
    paths = [tmp_path / place / "train.jsonl" for place in ("math/x", "qa/x", "qa")]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_lines(path, [{"question": f"{n}?", "answer": n} for n in range(3)])
    for chosen, first in (
        (paths[1:], ["x-train-0", "qa-train-0"]),
        (paths, ["x-train-0-0", "x-train-1-0", "qa-train-2-0"]),
    ):
        tasks = read_tasks(DataConfig(kind="files", path={str(path): 1.0 for path in chosen})).tasks
        assert [tasks[3 * place].id for place in range(len(chosen))] == first
        assert len({task.id for task in tasks}) == 3 * len(chosen)


def test_mixture_draws_by_weight_whatever_the_sizes(tmp_path: Path) -> None:
    train, held_out = mixture(tmp_path).split(10)
    assert Counter(task.id[0] for task in held_out) == {"a": 6, "b": 3, "c": 1}
    assert not {task.id for task in train} & {task.id for task in held_out}
    selector = make_task_selector(AlgorithmConfig(), train, seed=1)
    drawn = Counter[str]()
    for step in range(1, 26):
        batch = selector.next_batch(4)
        assert len({task.id for task in batch}) == 4
        drawn.update(task.id[0] for task in batch)
        for task in batch:
            selector.record_result(task.id, [1.0])
        assert all(abs(drawn[name] - weight * 4 * step) <= 1 for name, weight in (("a", 0.6), ("b", 0.3), ("c", 0.1)))


@pytest.mark.parametrize("kind", ["epochs", "solvable", "targeted"])
def test_mixture_resumes_exactly(tmp_path: Path, kind: str) -> None:
    train, _ = mixture(tmp_path).split(10)
    assert isinstance(train, MixedTasks)
    algorithm = AlgorithmConfig(selector=kind)
    selector, resumed = (make_task_selector(algorithm, train, seed=1) for _ in range(2))
    for _ in range(7):
        for task in selector.next_batch(6)[:4]:  # two trees of each step stay in flight
            selector.record_result(task.id, [0.0, 1.0])
    resumed.load_state_dict(json.loads(json.dumps(selector.state_dict())))
    assert [task.id for task in resumed.next_batch(12)] == [task.id for task in selector.next_batch(12)]
    other = make_task_selector(algorithm, MixedTasks(train.parts[:2]), seed=1)
    with pytest.raises(UserError, match="another mixture"):
        other.load_state_dict(selector.state_dict())


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        (
            "math",
            ["7", "-1,000.5", ".5", "5 %", "3/4", "1e-5", "x = -3/4", "(1, 2)", "sqrt(2)", r"\\frac34", "\u22127"],
        ),
        ("qa", ["Paris", "4 cats", "2001-09-11", "10:30", "1999/2000 season", ".", "a=b"]),
    ],
)
def test_kind_of_a_plain_row_follows_from_its_answer(kind: str, answers: list[str]) -> None:
    assert {Columns().read({"question": "?", "answer": answer})[2] for answer in answers} == {kind}
